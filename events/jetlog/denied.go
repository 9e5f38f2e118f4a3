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

// A server that does not let a client publish or subscribe says so on the
// connection, not in an answer: the request itself would wait for its deadline.
// So each request that is under way notes which subjects concern it, and ends
// when one of them is denied.

// DeniedError says that the server does not let this client publish to, or
// subscribe to, a subject. It is [ErrNotAllowed] to errors.Is.
type DeniedError struct {
	Subject   string
	Subscribe bool
	User      string // whom the server refuses, in words
}

// Error says what the administrator of the server has to allow.
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

// The requests of JetStream that ours are made of.
const (
	apiGet    = "$JS.API.STREAM.MSG.GET."
	apiInfo   = "$JS.API.STREAM.INFO."
	apiCreate = "$JS.API.STREAM.CREATE."
	inbox     = "_INBOX."
	// apiAccount is asked before a bucket is made, and never else.
	apiAccount = "$JS.API.INFO"
)

// concern tells whether a subject is one that a call uses.
type concern func(subject string) bool

type concernKey struct{}

// concerning notes the subjects of a call in its context.
func concerning(ctx context.Context, c concern) context.Context {
	return context.WithValue(ctx, concernKey{}, c)
}

// concernOf is the concern of a call. Every call asks what the stream is and has,
// and waits for answers.
func concernOf(ctx context.Context) concern {
	own, _ := ctx.Value(concernKey{}).(concern)
	return func(subject string) bool {
		return strings.HasPrefix(subject, apiInfo+Stream) || strings.HasPrefix(subject, apiGet+Stream) || strings.HasPrefix(subject, inbox) || own != nil && own(subject)
	}
}

// subjects concerns these subjects alone.
func subjects(all ...string) concern {
	return func(subject string) bool { return slices.Contains(all, subject) }
}

// inBucket concerns one key of a bucket, and the bucket as a whole.
func inBucket(bucket, key string) concern {
	return func(subject string) bool {
		return subject == "$KV."+bucket+"."+key || subject == apiAccount || strings.HasPrefix(subject, "$JS.API.") && strings.HasSuffix(subject, ".KV_"+bucket)
	}
}

// ofCursor concerns a cursor and its witness.
func ofCursor(name string) concern {
	key := bucketKey(name)
	cursor, witness := inBucket(Cursors, key), inBucket(Witnesses, key)
	return func(subject string) bool { return cursor(subject) || witness(subject) }
}

// denials are what the server has denied, the newest last. Those that no call
// under way can ask about any more are dropped.
type denials struct {
	mu       sync.Mutex
	dropped  int // of all that came, so many are not in list any more
	list     []*DeniedError
	watchers map[*denialWatch]bool
}

type denialWatch struct {
	cancel context.CancelFunc
	c      concern
}

// keptDenials bounds the memory for a client that is denied again and again. A
// call looks right after each of its attempts.
const keptDenials = 256

// saysDenied finds what was denied in the server's words.
var saysDenied = regexp.MustCompile(`(?i)(publish|subscription) to "([^"]+)"`)

// add takes note of the server's word and ends the attempts that it concerns.
// It returns the subject, or nothing if the word is not understood.
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

// mark is a point in time for of.
func (d *denials) mark() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.dropped + len(d.list)
}

// of is a denial since a mark that concerns a call, as an error; or nil.
func (d *denials) of(since int, c concern) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, e := range d.list[max(0, since-d.dropped):] {
		if c(e.Subject) {
			return e
		}
	}
	return nil
}

// watch calls cancel at a denial that concerns a call. The result takes that
// back.
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

// user names this client in errors. A URL with a name and no password holds a
// token, which is nobody else's business.
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
