package nodes

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/ckptstore/ckptstore/internal/problem"
)

// Defaults of joining.
const (
	defaultWait     = 10 * time.Minute
	defaultPatience = time.Minute      // for a file of another node to become visible
	attemptTimeout  = 10 * time.Second // of one request
	quietTime       = 5 * time.Second  // before Join warns that the endpoint does not answer
)

// JoinConfig configures a [Link].
type JoinConfig struct {
	Address string // HOST:PORT of the endpoint
	// Dir is the directory of [EndpointConfig.Dir], as this node sees it. Token is used
	// instead of it if set.
	Dir, Token string
	// Self describes this node. Join fills in an empty key, host, boot ID, process ID and
	// address.
	Self   Node
	Logger *slog.Logger // may be nil
	// Wait is how long to try to reach the endpoint: at first, and after contact was
	// lost. It is 10 minutes if 0.
	Wait time.Duration
	// Answered, if set, is called after the answer to each beat, with the time at which the
	// beat was sent: the group may live until sent+timeout/2. It must not block.
	Answered func(sent time.Time, timeout time.Duration)

	dial     dialFunc
	patience time.Duration
	quiet    time.Duration
}

// Join joins the job at an endpoint. Its caller has ended all processes of an earlier
// agent of this node. It tries until Wait has passed. ctx bounds the
// joining only; [Link.Leave] or [Link.Close] ends the link.
func Join(ctx context.Context, c JoinConfig) (*Link, error) {
	c.Wait = cmp.Or(c.Wait, defaultWait)
	c.patience, c.quiet = cmp.Or(c.patience, min(defaultPatience, c.Wait/2)), cmp.Or(c.quiet, quietTime)
	c.Logger = cmp.Or(c.Logger, slog.New(slog.DiscardHandler))
	c.Self = c.Self.here(rand.Text)
	if _, _, err := net.SplitHostPort(c.Address); err != nil || c.Dir == "" && c.Token == "" {
		return nil, problem.Errorf(problem.Invalid, "join endpoint %q: give HOST:PORT, and a shared directory or a token", c.Address)
	}
	a := &attempt{JoinConfig: c, session: rand.Text(), started: time.Now()}
	of, err := a.run(ctx)
	if err != nil {
		return nil, fmt.Errorf("join endpoint %s from node %s: %w", c.Address, c.Self.describe(), err)
	}
	return newLink(c, of), nil
}

// attempt is one call of Join.
type attempt struct {
	JoinConfig
	session string
	started time.Time
	warned  bool // that the endpoint does not answer
	clashed time.Time
}

// joined is the result of joining: what a [Link] needs.
type joined struct {
	self        Node
	as          credential
	certificate string
	answer      joinAnswer
	sent        time.Time // when the join request was sent: the first beat
}

// transient marks an error after which Join tries again.
type transient struct{ error }

func (t transient) Unwrap() error { return t.error }

// run repeats the steps of joining until one fails for good.
func (a *attempt) run(ctx context.Context) (of joined, err error) {
	for pause := 50 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		of, err := a.try(ctx)
		if err == nil {
			return of, nil
		}
		if ctx.Err() != nil {
			return of, context.Cause(ctx)
		}
		if !errors.As(err, new(transient)) {
			return of, err
		}
		waited := time.Since(a.started)
		if waited+pause > a.Wait && errors.As(err, new(*refusal)) {
			return of, err
		}
		if waited+pause > a.Wait {
			return of, fmt.Errorf("%w within %v: %w; start the agent of the endpoint's node, and check its address and the firewall", ErrNoContact, a.Wait, err)
		}
		if waited > a.quiet && !a.warned {
			a.warned = true
			a.Logger.Warn("endpoint does not answer", "endpoint", a.Address, "waited", waited.Round(time.Second), "limit", a.Wait, "err", err)
		}
		if err := pauseFor(ctx, pause); err != nil {
			return of, err
		}
	}
}

func pauseFor(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// try takes all steps of joining: ask which job it is, find its credentials, and join
// over a connection that is pinned to them.
func (a *attempt) try(ctx context.Context) (of joined, err error) {
	base := "https://" + a.Address
	stranger := connect(a.dial, "", attemptTimeout)
	defer stranger.close()
	nonce := rand.Text()
	info, state, err := a.ask(ctx, stranger, base+"/v1/job?nonce="+nonce)
	if err != nil {
		return of, err
	}
	switch {
	case info.Protocol != Protocol:
		return of, problem.Errorf(problem.Invalid, "the coordinator has protocol %d (version %q), this node has %d (version %q); use the same version of the program on all nodes", info.Protocol, info.Version, Protocol, a.Self.Version)
	case info.Version != a.Self.Version:
		return of, problem.Errorf(problem.Invalid, "the coordinator has version %q of the program, this node has %q; use the same version on all nodes", info.Version, a.Self.Version)
	}
	certificate := digest(state.PeerCertificates[0].Raw)
	token, err := a.trust(ctx, info, certificate, nonce)
	if err != nil {
		return of, err
	}
	self := a.Self
	if self.Address == "" {
		self.Address, _ = numeric(stranger.localAddr())
	}
	pinned := connect(a.dial, certificate, attemptTimeout)
	limited, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	as := credential{token, a.session}
	sent := time.Now()
	answer, _, err := call[joinAnswer](limited, pinned, as, http.MethodPost, base+"/v1/join", joinRequest{Protocol, a.session, self}, maxWelcome+smallBody)
	pinned.close()
	if err != nil {
		return of, a.judge(err)
	}
	for _, warning := range answer.Warnings {
		a.Logger.Warn("node differs", "node", answer.Index, "difference", warning)
	}
	return joined{self, as, certificate, answer, sent}, nil
}

// ask requests the job of an endpoint that is not trusted yet.
func (a *attempt) ask(ctx context.Context, c *connections, url string) (jobInfo, *tls.ConnectionState, error) {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	info, state, err := call[jobInfo](ctx, c, credential{}, http.MethodGet, url, nil, smallBody)
	other := tls.RecordHeaderError{}
	switch {
	case err == nil && info.Job != "" && state != nil:
		return info, state, nil
	case err == nil, errors.Is(err, errForeign), errors.As(err, &other):
		if err == nil {
			err = errors.New("it is no endpoint of a trainer")
		}
		return info, state, problem.Errorf(problem.Foreign, "another program listens there: %w; choose a free port for the endpoint", err)
	}
	return info, state, transient{err}
}

// trust returns the token for an endpoint, if the endpoint is that of the job.
func (a *attempt) trust(ctx context.Context, info jobInfo, certificate, nonce string) (string, error) {
	switch {
	case a.Token != "" && info.Shared:
		return "", problem.Errorf(problem.Unauthorized, "the coordinator of job %s keeps its token in a shared directory, this node was given a token; configure all nodes alike", info.Job)
	case a.Token != "" && !same(info.Proof, proof(a.Token, nonce, certificate)):
		return "", problem.Errorf(problem.Unauthorized, "the token of this node is not that of job %s; give all nodes the same token", info.Job)
	case a.Token != "":
		return a.Token, nil
	case !info.Shared:
		return "", problem.Errorf(problem.Unauthorized, "the coordinator of job %s was given a token, and this node was not; give all nodes the same token", info.Job)
	}
	ctx, cancel := context.WithTimeout(ctx, a.patience)
	defer cancel()
	path := credentialsPath(a.Dir, info.Job)
	for {
		c, err := readCredentials(a.Dir, info.Job)
		switch {
		case err == nil && same(c.Certificate, certificate):
			return c.Token, nil
		case err != nil && !absent(err):
			return "", err
		}
		// A cache of this node may hide the file, or hold an older one.
		look(a.Dir)
		if waiting := pauseFor(ctx, min(time.Second, a.patience/10)); waiting == nil {
			continue
		}
		if err == nil {
			return "", problem.Errorf(problem.Foreign, "the endpoint's certificate is not that of job %s in %s: another job or another program answers at %s; use a free port for each job", info.Job, path, a.Address)
		}
		return "", problem.Errorf(problem.Foreign, "node %s does not see the file %s, which the coordinator on %s has written: %s is not the same directory on both; mount one shared directory there", a.Self.describe(), path, a.Address, a.Dir)
	}
}

// judge returns the error of a join request, transient if another try may succeed.
func (a *attempt) judge(err error) error {
	refused := &refusal{}
	switch {
	case errors.Is(err, errOther):
		return transient{err} // the coordinator was restarted meanwhile
	case !errors.As(err, &refused):
		return transient{err}
	case refused.Kind == problem.Unavailable:
		return transient{refused}
	case refused.Kind == problem.Conflict && refused.within > 0:
		// The agent that is in the way may have died: its node is lost after T.
		if a.clashed.IsZero() {
			a.clashed = time.Now()
			a.Logger.Warn("join refused for now", "endpoint", a.Address, "limit", refused.within, "err", refused)
		}
		if time.Since(a.clashed) < refused.within {
			return transient{refused}
		}
	}
	return refused
}
