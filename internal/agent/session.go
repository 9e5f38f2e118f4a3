package agent

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/launch"
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
	if err := a.succeed(g); err != nil {
		return err
	}
	ctx, release, err := a.store.HoldRun(a.life, g.Run, g.job)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, release()) }()
	cfg := launch.AttendConfig{Config: a.cfg.Session, Ends: g.ends}
	cfg.Run, cfg.Trial, cfg.Job, cfg.TrialConfig = g.Run, g.Trial, g.job, g.JoinRequest.Config
	cfg.Nodes, cfg.Resume = session.OneNode(g.WorldSize), g.Resume
	cfg.Services, cfg.Logger, cfg.NewID = a.cfg.Services, a.log, store.NewID
	a.mu.Lock()
	for rank := range g.WorldSize {
		cfg.PIDs = append(cfg.PIDs, g.members[rank].pid)
	}
	cfg.Command = g.members[0].command()
	a.mu.Unlock()
	cfg.Serve = func(at launch.Serving) {
		g.serving = at
		close(g.ready)
	}
	cfg.Leave = func(rank int) {
		a.mu.Lock()
		defer a.mu.Unlock()
		g.part(launch.MemberEnd{Rank: rank, Left: true})
	}
	st := a.store
	return launch.Attend(ctx, cfg, session.Store{
		ID: st.ID, Log: st.Log, Views: store.Queries{From: st.Views()}, Blobs: st.Blobs, Data: st.Data, Foreign: store.OpenForeign,
		Conflict: func(err error) bool { return errors.Is(err, jetlog.ErrConflict) }, Unserved: store.Unserved,
		Runtime: st.Runtime, Shared: a.cfg.Shared,
	})
}

// succeed waits for the end of a session of the same run whose members are
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

// before returns an unfinished session of the run of g, and how long to wait for
// it: not at all while all its members live, and as long as finishing its saves
// may take when none does. If there is none, g gets the run.
func (a *Agent) before(g *group) (*group, time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, old := range a.groups {
		switch {
		case !old.holds || old.Run != g.Run:
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
