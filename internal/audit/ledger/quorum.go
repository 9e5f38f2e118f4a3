package ledger

import (
	"context"
	"crypto/sha256"
	"errors"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/internal/audit"
)

// witnesses are those of a policy. They are asked concurrently, so that a silent witness
// delays no head for which the others suffice.
type witnesses struct {
	policy audit.Policy
	list   []*witnessed // by URL
	end    func()
}

// witnessesOf returns the witnesses of a policy. The caller closes them.
func witnessesOf(policy string) (*witnesses, error) {
	p, err := audit.ParsePolicy(policy)
	if err != nil {
		return nil, err
	}
	life, cancel := context.WithCancel(context.Background())
	client := newClient(life)
	ws := &witnesses{policy: p, end: func() {
		cancel()
		client.CloseIdleConnections()
	}}
	for url, key := range p.Witnesses.Endpoints() {
		ws.list = append(ws.list, &witnessed{url: url, key: key, client: client})
	}
	slices.SortFunc(ws.list, func(a, b *witnessed) int { return strings.Compare(a.url, b.url) })
	return ws, nil
}

// close ends the connections, also those that are being made. The witnesses cannot be
// asked afterwards.
func (ws *witnesses) close() { ws.end() }

// answer is what one witness answered.
type answer struct {
	*witnessed
	lines []byte
	err   error
}

// ask calls one for each witness of a list, concurrently, and take with each answer, one at
// a time. Once take returns true the requests that still run are cancelled; take gets their
// answers too. When ask returns, none runs any longer.
func (*witnesses) ask(ctx context.Context, list []*witnessed, one func(context.Context, *witnessed) ([]byte, error), take func(answer) (enough bool)) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	answers := make(chan answer, len(list))
	for _, w := range list {
		go func() {
			lines, err := one(ctx, w)
			answers <- answer{w, lines, err}
		}()
	}
	for range list {
		if take(<-answers) {
			cancel()
		}
	}
}

// A witness that fails is left alone for restLeast, and twice as long each time, up to
// restMost.
const (
	restLeast = time.Second
	restMost  = 30 * time.Second
)

// rest is when a witness that failed is asked again.
type rest struct {
	last  error // nil: it has answered
	times int   // failures since then
	until time.Time
}

// after counts a failure, or its end.
func (r *rest) after(err error, now time.Time) {
	if r.last = err; err == nil {
		r.times = 0
		return
	}
	r.until = now.Add(min(restMost, restLeast<<min(r.times, 10)))
	r.times++
}

// resting reports whether the witness is left alone.
func (r *rest) resting(now time.Time) bool { return r.last != nil && now.Before(r.until) }

// awake returns the witnesses to ask now.
func (ws *witnesses) awake() (list []*witnessed) {
	now := time.Now()
	for _, w := range ws.list {
		if !w.resting(now) {
			list = append(list, w)
		}
	}
	return list
}

// failed returns the newest failure of each witness that fails.
func (ws *witnesses) failed() error {
	var errs []error
	for _, w := range ws.list {
		if w.last != nil {
			errs = append(errs, w.last)
		}
	}
	return errors.Join(errs...)
}

// rest notes how a request ended, and logs a change.
func (k *Keeper) rest(a answer) {
	had := a.last
	a.after(a.err, time.Now())
	switch {
	case a.err == nil && had != nil:
		k.o.Logger.Info("audit: witness answers again", "url", a.url)
	case a.err != nil && causeOf(had) != causeOf(a.err):
		k.o.Logger.Warn("audit: witness failed; asked again later", "url", a.url, "error", a.err)
	}
}

// varying are the parts of an error that differ each time, though its cause is the same:
// sizes and roots of heads, and ports of connections.
var varying = regexp.MustCompile(`[A-Za-z0-9+/]{43}=|[0-9]+`)

// causeOf returns the text of an error without its varying parts, "" for nil.
func causeOf(err error) string {
	if err == nil {
		return ""
	}
	return varying.ReplaceAllString(err.Error(), "")
}

// emptyRoot is the root of a log without entries.
var emptyRoot = audit.Hash(sha256.Sum256(nil))
