package jetlog

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/ckptstore/ckptstore/internal/front"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// Errors to test with errors.Is.
var (
	// ErrNoLog reports that there is no stream, or an empty one whose first boot was
	// cut.
	ErrNoLog = errors.New("no log")
	// ErrServed reports that another server has the directory.
	ErrServed = problem.New(problem.Locked, "another server has the log open")
	// ErrForeign reports that the log belongs to another store, or was recreated since
	// it was opened.
	ErrForeign = errors.New("foreign log")
	// ErrUnsafe reports that the stream is configured so that it could lose events.
	ErrUnsafe = problem.New(problem.Damage, "unsafe log")
	// ErrReplicas reports that the server cannot keep the requested number of copies.
	ErrReplicas = errors.New("too few servers")
	// ErrGap reports that an event of the log is missing or unreadable.
	ErrGap = problem.New(problem.Damage, "gap in the log")
	// ErrUnrecovered reports that the embedded server could not recover its files.
	ErrUnrecovered = problem.New(problem.Damage, "the log cannot be recovered")
	// ErrEnd reports that the log ends before the requested event.
	ErrEnd = problem.New(problem.NotFound, "end of the log")
	// ErrConflict reports that another decision of the aggregate came first.
	ErrConflict = errors.New("conflict")
	// ErrUnacknowledged reports that the deadline passed before an acknowledgement. The
	// event may or may not be in the log; appending it again settles that.
	ErrUnacknowledged = errors.New("not acknowledged")
	// ErrClosed reports that this process closed the log.
	ErrClosed = errors.New("log is closed")
	// ErrLeaseHeld reports that another holder has the lease.
	ErrLeaseHeld = errors.New("lease is held")
	// ErrLeaseLost reports that another holder took the lease, or that it was released.
	ErrLeaseLost = errors.New("lease is lost")
)

// restore is the remedy for an incomplete log. The copy comes first because a server
// that opens the log may truncate what it cannot read.
const restore = "stop, keep a copy of the directory, and restore log/ from a backup; without one, move log/ away and run `ckptstore recover`, which makes a log of the receipts"

// ConflictError reports that a lane has moved since the caller read it.
type ConflictError struct {
	Lane   string
	After  uint64 // the end of the lane that the caller expected
	Actual uint64 // its current end
}

// Error implements error.
func (e *ConflictError) Error() string {
	return fmt.Sprintf("decide on %s after %d: conflict: the lane is at %d; read it and decide again", e.Lane, e.After, e.Actual)
}

// Is makes errors.Is(err, ErrConflict) true.
func (e *ConflictError) Is(target error) bool { return target == ErrConflict }

// Codes of the JetStream API.
const (
	codeWrongLast        = jetstream.ErrorCode(10071) // an expected sequence is not the last one
	codeWrongLastPending = jetstream.ErrorCode(10164) // the same, against an append that is in flight
	codePending          = jetstream.ErrorCode(10158) // the same ID is in flight: an earlier attempt without a quorum
	codeBatchIncomplete  = jetstream.ErrorCode(10176) // a message of the batch is missing
	codeBatchDuplicate   = jetstream.ErrorCode(10201) // an ID of the batch is in the log already
	codeBatchInflight    = jetstream.ErrorCode(10210) // too many open batches
	codeStoreFailed      = jetstream.ErrorCode(10077) // disk or quota
	codeInsufficient     = jetstream.ErrorCode(10023) // the server's quota
	codeNoPeers          = jetstream.ErrorCode(10005) // the cluster has too few servers
	codeNotClustered     = jetstream.ErrorCode(10074) // more than one replica without a cluster
	codeNoMessage        = jetstream.ErrorCode(10037)
	codeNotLeader        = jetstream.ErrorCode(10009)
	codeNoStream         = jetstream.ErrorCode(10059)
	codeOtherStream      = jetstream.ErrorCode(10060) // the append was for another stream
)

func hasCode(err error, codes ...jetstream.ErrorCode) bool {
	var api *jetstream.APIError
	if !errors.As(err, &api) {
		return false
	}
	for _, c := range codes {
		if api.ErrorCode == c {
			return true
		}
	}
	return false
}

// errAgain marks a refusal that a retry settles.
var errAgain = errors.New("try again")

// transient reports whether the same request may succeed later. That includes timeouts:
// ctx distinguishes the caller's deadline from that of one request.
func transient(err error) bool {
	switch {
	case errors.Is(err, errAgain):
		return true
	case err == nil, errors.Is(err, nats.ErrConnectionClosed), errors.Is(err, nats.ErrMaxPayload),
		errors.Is(err, nats.ErrBadSubject), errors.Is(err, nats.ErrHeadersNotSupported):
		return false
	case hasCode(err, codeStoreFailed, codeInsufficient), hasCode(err, forGood...):
		return false
	case hasCode(err, codePending, codeBatchIncomplete, codeBatchInflight, codeNotLeader):
		return true
	}
	var api *jetstream.APIError
	if errors.As(err, &api) {
		return api.Code == 503
	}
	for _, e := range []error{
		nats.ErrTimeout, nats.ErrNoResponders, nats.ErrDisconnected, nats.ErrConnectionReconnecting,
		nats.ErrReconnectBufExceeded, nats.ErrStaleConnection, jetstream.ErrNoStreamResponse,
		jetstream.ErrNoHeartbeat, jetstream.ErrConsumerDeleted, jetstream.ErrConsumerNotFound,
		context.DeadlineExceeded, context.Canceled,
	} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// backoff is a pause between attempts that grows to 250 ms.
type backoff struct{ next time.Duration }

func (b *backoff) reset() { b.next = 0 }

// wait pauses, or ends with ctx.
func (b *backoff) wait(ctx context.Context) error {
	b.next = min(max(2*b.next, 5*time.Millisecond), 250*time.Millisecond)
	t := time.NewTimer(b.next/2 + rand.N(b.next/2))
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// retry calls f with the timeout of one request until f succeeds or fails permanently,
// or ctx or the log ends. The result includes the last error of f.
func (l *Log) retry(ctx context.Context, f func(ctx context.Context) error) error {
	var b backoff
	since := l.denials.mark()
	for {
		once, cancel := l.attempt(ctx)
		err := f(once)
		cancel()
		if l.ctx.Err() != nil && err != nil {
			return fmt.Errorf("%w: %w", ErrClosed, err)
		}
		if err == nil || !transient(err) {
			return refusedBy(err)
		}
		if denied := l.denials.of(since, concernOf(ctx)); denied != nil {
			return denied
		}
		if b.wait(ctx) != nil {
			return l.because(fmt.Errorf("%w (%w)", context.Cause(ctx), err))
		}
	}
}

// because adds the known cause to the error of an abandoned wait.
func (l *Log) because(err error) error {
	if !l.nc.IsConnected() {
		err = fmt.Errorf("%w (no process serves the log at the moment)", err)
	}
	if l.opts.Down != nil {
		if why := l.opts.Down(); why != nil {
			err = fmt.Errorf("%w: %w", err, why)
		}
	}
	return err
}

// attempt bounds one attempt by the timeout of a request, by the next reconnect,
// because the next server knows nothing of the request, and by the server's denial of
// the request.
func (l *Log) attempt(ctx context.Context) (context.Context, context.CancelFunc) {
	once, cancel := context.WithTimeout(ctx, l.opts.Timeout)
	unwatch := l.watch(cancel)
	heed := l.denials.watch(cancel, concernOf(ctx))
	return once, func() {
		heed()
		unwatch()
		cancel()
	}
}

// deadline adds a deadline to a ctx without one.
func deadline(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, d)
}

// Unanswered reports whether a call failed because the server did not answer or had no
// room. The same call may succeed later.
func Unanswered(err error) bool {
	return errors.Is(err, ErrUnacknowledged) || hasCode(err, codeStoreFailed, codeInsufficient) || transient(err)
}

// ErrRefused reports that the owner of the store refuses this client's request. The
// same call is refused again.
var ErrRefused = errors.New("refused by the owner of the store")

// RefusedError is a refusal by a front, with its reason. It matches [ErrRefused]. It
// also matches [ErrNotAllowed] if clients may never do that, and [syscall.ENOSPC] if
// the store's disk is nearly full.
type RefusedError struct {
	Code int // one of package internal/front
	Text string
}

// Error implements error.
func (e *RefusedError) Error() string {
	if e.Code == front.CodeDenied {
		return fmt.Sprintf("%v: %s", ErrNotAllowed, e.Text)
	}
	return fmt.Sprintf("%v: %s", ErrRefused, e.Text)
}

// ProblemKind returns [problem.Denied] if clients may never do that.
func (e *RefusedError) ProblemKind() problem.Kind {
	if e.Code == front.CodeDenied {
		return problem.Denied
	}
	return ""
}

// Is implements errors.Is.
func (e *RefusedError) Is(target error) bool {
	switch target {
	case ErrRefused:
		return true
	case ErrNotAllowed:
		return e.Code == front.CodeDenied
	case syscall.ENOSPC:
		return e.Code == front.CodeNoRoom
	}
	return false
}

// forGood lists the codes of refusals that an immediate retry does not settle.
var forGood = []jetstream.ErrorCode{
	front.CodeUnknownKind, front.CodeNewer, front.CodeEvent, front.CodeTooLarge, front.CodeLane,
	front.CodeNoRoom, front.CodeDenied, front.CodeBatch, front.CodeEntry, front.CodeHeld,
}

// refusedBy turns a front's refusal into a [*RefusedError]. It returns other errors
// unchanged.
func refusedBy(err error) error {
	var api *jetstream.APIError
	var known *RefusedError
	if !errors.As(err, &api) || errors.As(err, &known) || !slices.Contains(forGood, api.ErrorCode) {
		return err
	}
	return &RefusedError{Code: int(api.ErrorCode), Text: api.Description}
}

// ErrNotAllowed reports that the server does not let this client in, or that the client
// does not trust the server.
var ErrNotAllowed = problem.New(problem.Denied, "not allowed")

// credentials returns the connection options for the client's credentials and TLS.
func (o Options) credentials() []nats.Option {
	var opts []nats.Option
	switch {
	case o.FindToken != nil:
		opts = append(opts, nats.TokenHandler(o.FindToken))
	case o.Token != "":
		opts = append(opts, nats.Token(o.Token))
	}
	if o.TLS != nil {
		opts = append(opts, nats.Secure(o.TLS))
	}
	return opts
}

// refused adds the cause and the next step to the error of a first connection.
func (o Options) refused(err error) error {
	var (
		unknown x509.UnknownAuthorityError
		check   *tls.CertificateVerificationError
		remote  *net.OpError
	)
	switch {
	case errors.Is(err, nats.ErrAuthorization) && o.Token == "" && o.FindToken == nil:
		return fmt.Errorf("%w: the server asks for a token or a password, and none was given: %w", ErrNotAllowed, err)
	case errors.Is(err, nats.ErrAuthRevoked), worded(err, nats.AUTHENTICATION_REVOKED_ERR):
		return fmt.Errorf("%w: the token was revoked: ask the operator of the server for another: %w", ErrNotAllowed, err)
	case errors.Is(err, nats.ErrAuthExpired), worded(err, nats.AUTHENTICATION_EXPIRED_ERR):
		return fmt.Errorf("%w: the token has expired: ask the operator of the server for another: %w", ErrNotAllowed, err)
	case errors.Is(err, nats.ErrAuthorization):
		return fmt.Errorf("%w: the server does not know this token: %w", ErrNotAllowed, err)
	case errors.As(err, &unknown):
		return fmt.Errorf("%w: the server's certificate is signed by a CA that is not trusted here: %w", ErrNotAllowed, err)
	case errors.As(err, &check):
		return fmt.Errorf("%w: the server's certificate is not valid for this address: %w", ErrNotAllowed, err)
	// By the time the server's alert arrives, the error is one of these.
	case errors.As(err, &remote) && remote.Op == "remote error", errors.Is(err, nats.ErrTLS):
		return fmt.Errorf("%w: the server does not accept this client's certificate, or its lack of one: %w", ErrNotAllowed, err)
	case errors.Is(err, nats.ErrSecureConnWanted):
		return fmt.Errorf("%w: the server has no TLS and tls:// asks for it: %w", ErrNotAllowed, err)
	case o.Dial != nil:
		return fmt.Errorf("%w; check that the process that holds the store is alive", err)
	}
	return fmt.Errorf("%w; check that a NATS server with JetStream runs there ('nats-server -js' starts one)", err)
}

// worded reports whether an error of a first connection has the server's text: the library gives
// it no name there.
func worded(err error, text string) bool { return strings.Contains(strings.ToLower(err.Error()), text) }

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
