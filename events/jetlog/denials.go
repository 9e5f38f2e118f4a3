package jetlog

import (
	"context"
	"fmt"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/ckptstore/ckptstore/internal/problem"
)

// A server reports a denied publish or subscription on the connection, not in an
// answer; the request itself would wait for its deadline. Each request under way
// therefore notes the subjects that concern it, and ends when one of them is denied.

// DeniedError reports that the server does not let this client publish or subscribe to
// a subject. It matches [ErrNotAllowed].
type DeniedError struct {
	Subject   string
	Subscribe bool
	User      string // description of the client that the server refuses
}

// Error names the permission that the administrator of the server must add.
func (e *DeniedError) Error() string {
	verb := "publish"
	if e.Subscribe {
		verb = "subscribe"
	}
	hint := fmt.Sprintf("add the subject to the user's permissions to %s in the server's configuration", verb)
	if strings.HasPrefix(e.Subject, apiCreate+"KV_") || e.Subject == apiAccount {
		hint = "a bucket of the store is missing: run `ckptstore init` with the URL and --data of the store, as a user who may make streams"
	}
	return fmt.Sprintf("%v: the server does not let %s %s to %s: %s", ErrNotAllowed, e.User, verb, e.Subject, hint)
}

// ProblemKind returns [problem.Denied].
func (*DeniedError) ProblemKind() problem.Kind { return problem.Denied }

// Is makes errors.Is(err, ErrNotAllowed) true.
func (e *DeniedError) Is(target error) bool { return target == ErrNotAllowed }

// The JetStream requests that this package sends.
const (
	apiGet    = "$JS.API.STREAM.MSG.GET."
	apiInfo   = "$JS.API.STREAM.INFO."
	apiCreate = "$JS.API.STREAM.CREATE."
	inbox     = "_INBOX."
	// apiAccount is requested only before a bucket is created.
	apiAccount = "$JS.API.INFO"
)

// concern reports whether a call uses a subject.
type concern func(subject string) bool

type concernKey struct{}

// concerning stores the concern of a call in its context.
func concerning(ctx context.Context, c concern) context.Context {
	return context.WithValue(ctx, concernKey{}, c)
}

// concernOf returns the concern of a call. Every call asks for the state of the stream
// and waits for answers.
func concernOf(ctx context.Context) concern {
	own, _ := ctx.Value(concernKey{}).(concern)
	return func(subject string) bool {
		return strings.HasPrefix(subject, apiInfo+Stream) || strings.HasPrefix(subject, apiGet+Stream) || strings.HasPrefix(subject, inbox) || own != nil && own(subject)
	}
}

// subjects returns the concern for exactly these subjects.
func subjects(all ...string) concern {
	return func(subject string) bool { return slices.Contains(all, subject) }
}

// inBucket returns the concern for one key of a bucket, and for the bucket as a whole.
func inBucket(bucket, key string) concern {
	return func(subject string) bool {
		return subject == "$KV."+bucket+"."+key || subject == apiAccount || strings.HasPrefix(subject, "$JS.API.") && strings.HasSuffix(subject, ".KV_"+bucket)
	}
}

// ofCursor returns the concern for a cursor and its witness.
func ofCursor(name string) concern {
	key := bucketKey(name)
	cursor, witness := inBucket(Cursors, key), inBucket(Witnesses, key)
	return func(subject string) bool { return cursor(subject) || witness(subject) }
}

// denials is the list of the server's denials, the newest last. Denials that no call
// under way can ask about are dropped.
type denials struct {
	mu       sync.Mutex
	dropped  int // number of denials no longer in list
	list     []*DeniedError
	barred   error // the token was revoked or has expired: every call fails
	watchers map[*denialWatch]bool
}

type denialWatch struct {
	cancel context.CancelFunc
	c      concern
}

// keptDenials bounds the memory for a client that is denied again and again. A call
// looks right after each of its attempts.
const keptDenials = 256

// saysDenied finds the denied subject in the server's error.
var saysDenied = regexp.MustCompile(`(?i)(publish|subscription) to "([^"]+)"`)

// add records the server's error and ends the attempts that it concerns. It returns the
// subject, or "" if it cannot parse the error.
func (d *denials) add(word error, user string) (subject string) {
	said := saysDenied.FindStringSubmatch(word.Error())
	if said == nil {
		return ""
	}
	e := &DeniedError{Subject: said[2], Subscribe: strings.EqualFold(said[1], "subscription"), User: user}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.list = append(d.list, e); len(d.list) > keptDenials {
		d.list = d.list[1:]
		d.dropped++
	}
	for w := range d.watchers {
		if w.c(e.Subject) {
			w.cancel()
		}
	}
	return e.Subject
}

// bar records that the server admits the token of this client no more, and ends all
// attempts; nil: it admits the client.
func (d *denials) bar(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.barred = err; err == nil {
		return
	}
	for w := range d.watchers {
		w.cancel()
	}
}

// lasting returns the error of [denials.bar], or nil.
func (d *denials) lasting() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.barred
}

// mark returns a point in time for of.
func (d *denials) mark() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.dropped + len(d.list)
}

// of returns a denial since a mark that concerns a call, the error of [denials.bar], or nil.
func (d *denials) of(since int, c concern) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.barred != nil {
		return d.barred
	}
	for _, e := range d.list[max(0, since-d.dropped):] {
		if c(e.Subject) {
			return e
		}
	}
	return nil
}

// watch calls cancel at a denial that concerns a call. The returned function stops the
// watch.
func (d *denials) watch(cancel context.CancelFunc, c concern) (stop func()) {
	w := &denialWatch{cancel, c}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.watchers == nil {
		d.watchers = map[*denialWatch]bool{}
	}
	d.watchers[w] = true
	return func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.watchers, w)
	}
}

// user names this client in errors. A URL with a name and no password holds a token,
// which is secret.
func (o Options) user() string {
	first, _, _ := strings.Cut(o.URL, ",")
	if u, err := url.Parse(first); err == nil && u.User != nil {
		if _, named := u.User.Password(); named {
			return fmt.Sprintf("the user %q", u.User.Username())
		}
		return "the user of this token"
	}
	switch {
	case o.Token != "", o.FindToken != nil:
		return "the user of this token"
	case o.TLS != nil && len(o.TLS.Certificates) > 0:
		return "the user of this certificate"
	}
	return "clients without a token or password"
}
