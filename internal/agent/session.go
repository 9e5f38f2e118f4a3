package agent

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/httpkit"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/store"
)

// run runs a complete group to its end.
func (a *Agent) run(g *group) {
	err := a.serve(g)
	if err != nil {
		a.log.Warn("session failed", "run", g.Run, "job", g.job, "error", err)
	} else {
		a.log.Info("session ended", "run", g.Run, "job", g.job)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if err == nil {
		err = errors.New("the session has ended")
	}
	a.fail(g, refused(err))
}

// refused returns the error of a session to its ranks. If another process has the
// run, it adds the next step.
func refused(err error) error {
	if !problem.Given(err) && errors.As(err, new(*store.RunningError)) {
		return fmt.Errorf("%w, or choose another run name", err)
	}
	return err
}

// serve runs the session of a group, after the run's previous session has ended.
func (a *Agent) serve(g *group) (err error) {
	if a.link != nil {
		return a.serveAway(g)
	}
	if err := a.succeed(g); err != nil {
		return err
	}
	ctx, release, err := a.hold(g)
	if err != nil {
		return err
	}
	defer func() { err = release(err) }()
	place, endpoint, err := a.spread(ctx, g)
	if err != nil {
		return err
	}
	cfg := a.attending(g, place, 0)
	if endpoint != nil {
		defer func() { err = errors.Join(err, a.endSession(endpoint, err)) }()
		cfg.Endpoint, cfg.GatherTimeout = endpoint, a.cfg.Join
	}
	return launch.Attend(ctx, cfg, a.sessionStore())
}

// endSession tells the other machines how a session has ended.
func (a *Agent) endSession(endpoint *nodes.Endpoint, err error) error {
	reason, code := "the session is over", 0
	if err != nil {
		reason, code = session.Beginning(refused(err).Error(), session.MaxMessage), httpkit.DetailsOf(err).Status
	}
	ctx, cancel := context.WithTimeout(context.Background(), a.cfg.Silence)
	defer cancel()
	if lost := endpoint.End(ctx, reason, code); lost != nil {
		a.log.Warn("machines not told of the session's end", "error", lost)
	}
	return endpoint.Close()
}

// attending configures the session of a group for the ranks of one machine.
func (a *Agent) attending(g *group, place session.Nodes, node int) launch.AttendConfig {
	cfg := launch.AttendConfig{Config: a.cfg.Session, Ends: g.ends, PIDs: map[int]int{}}
	cfg.Run, cfg.Trial, cfg.Job, cfg.TrialConfig = g.Run, g.Trial, g.job, g.JoinRequest.Config
	cfg.Nodes, cfg.Node, cfg.Resume, cfg.Shared = place, node, g.Resume, g.shares()
	cfg.Services, cfg.Logger, cfg.NewID = a.cfg.Services, a.log, store.NewID
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, rank := range place[node] {
		m := g.members[rank]
		if m == nil { // its request ended at the last moment
			m = &member{rank: rank, forget: func() {}}
			g.members[rank] = m
			g.part(launch.MemberEnd{Rank: rank})
		}
		cfg.PIDs[rank] = m.pid
	}
	if first := g.members[0]; first != nil {
		cfg.Command = first.command()
	}
	cfg.Serve = func(at launch.Serving) {
		g.serving = at
		close(g.ready)
	}
	cfg.Leave = func(rank int) {
		a.mu.Lock()
		defer a.mu.Unlock()
		g.part(launch.MemberEnd{Rank: rank, Left: true})
	}
	cfg.Parted = func(rank int) {
		a.mu.Lock()
		defer a.mu.Unlock()
		g.parts(rank)
	}
	return cfg
}

func (a *Agent) sessionStore() session.Store {
	st := a.store
	return session.Store{
		ID: st.ID, Log: st.Log, Views: store.Queries{From: st.Views()}, Blobs: st.Blobs, Data: st.Data, Foreign: store.OpenForeign,
		Conflict: func(err error) bool { return errors.Is(err, jetlog.ErrConflict) }, Unserved: store.Unserved,
		Runtime: st.Runtime, Shared: a.cfg.Shared,
	}
}

// succeed waits for the end of a session that excludes g and whose members are
// leaving.
func (a *Agent) succeed(g *group) error {
	began := time.Now()
	for {
		old, limit := a.before(g)
		if old == nil {
			return nil
		}
		ctx, cancel := context.WithTimeout(a.life, time.Until(began.Add(limit)))
		select {
		case <-old.over:
			cancel()
		case <-ctx.Done():
			cancel()
			a.mu.Lock()
			defer a.mu.Unlock()
			return errors.Join(old.occupied(), context.Cause(a.life))
		}
	}
}

// before returns an unfinished session that excludes g, and how long to wait for
// it: not at all while all its members live, and as long as finishing its saves
// may take when none does. If there is none, g gets its trial.
func (a *Agent) before(g *group) (*group, time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, old := range a.groups {
		switch {
		case !old.holds || !old.excludes(g.Run, g.Trial):
		case old.state == ending:
			return old, a.cfg.Session.DrainTimeout + a.cfg.Handover
		case len(old.parted) == 0:
			return old, 0
		default:
			return old, a.cfg.Handover
		}
	}
	g.holds = true
	return nil, 0
}
