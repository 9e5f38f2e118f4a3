package agent

import (
	"context"
	"errors"

	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// trials is the job of a run of which this agent's sessions train several trials at once, as
// a search does. It begins with the first of these sessions, ends with the last, and has the
// run's lease meanwhile. A session of the trial main has a job of its own, and excludes them.
type trials struct {
	job      string
	sessions int           // that have not ended; guarded by the lock of the agent
	begun    chan struct{} // closed when the fields below are valid
	over     chan struct{} // closed when the job has ended

	ctx context.Context
	end func(error) error
	err error // why the job did not begin
}

// shares reports whether the group's session shares its job with other trials of the run.
func (g *group) shares() bool { return g.Trial != projections.DefaultTrial }

// excludes reports whether no session of the given run and trial may run next to the group's.
func (g *group) excludes(run, trial string) bool {
	return g.Run == run && (g.Trial == trial || !g.shares() || trial == projections.DefaultTrial)
}

// hold takes the lease of the group's run, or joins the job that has it for other trials. Its
// context ends when another job has taken the lease. The caller passes the error of the
// session to release, which returns it joined with its own.
func (a *Agent) hold(g *group) (_ context.Context, release func(error) error, err error) {
	if !g.shares() {
		ctx, release, err := a.store.HoldRun(a.life, g.Run, g.job)
		if err != nil {
			return nil, nil, err
		}
		return ctx, func(err error) error { return errors.Join(err, release()) }, nil
	}
	for {
		t, first, ended := a.joinTrials(g)
		switch {
		case ended:
			select {
			case <-t.over:
				continue
			case <-a.life.Done():
				return nil, nil, context.Cause(a.life)
			}
		case first:
			t.ctx, t.end, t.err = a.beginTrials(g)
			close(t.begun)
		default:
			<-t.begun
		}
		if t.err != nil {
			return nil, nil, a.leaveTrials(g.Run, t, t.err)
		}
		return t.ctx, func(err error) error { return a.leaveTrials(g.Run, t, err) }, nil
	}
}

// joinTrials makes the group's session part of its run's job. first reports that the caller
// begins it, ended that it is ending, and the session is not part of it.
func (a *Agent) joinTrials(g *group) (t *trials, first, ended bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if t = a.trained[g.Run]; t == nil {
		t, first = &trials{job: g.job, begun: make(chan struct{}), over: make(chan struct{})}, true
		a.trained[g.Run] = t
	} else if t.sessions == 0 {
		return t, false, true
	}
	t.sessions++
	g.job = t.job
	return t, first, false
}

// beginTrials takes the run's lease and records the start of its job. end records its end.
func (a *Agent) beginTrials(g *group) (_ context.Context, end func(error) error, err error) {
	ctx, release, err := a.store.HoldRun(a.life, g.Run, g.job)
	if err != nil {
		return nil, nil, err
	}
	ranks := make([]int, g.WorldSize)
	for rank := range ranks {
		ranks[rank] = rank
	}
	cfg := launch.Config{Config: a.cfg.Session, Resume: g.Resume, Shared: true, Backend: launch.SessionBackend}
	cfg.Run, cfg.Trial, cfg.Job, cfg.Nodes, cfg.Logger, cfg.NewID = g.Run, g.Trial, g.job, session.Nodes{ranks}, a.log, store.NewID
	a.mu.Lock()
	if m := g.members[0]; m != nil {
		cfg.Command = m.command()
	}
	a.mu.Unlock()
	ended, err := launch.Began(ctx, cfg, a.sessionStore())
	if err != nil {
		return nil, nil, errors.Join(err, release())
	}
	return ctx, func(err error) error { return errors.Join(ended("its last session has ended", err), release()) }, nil
}

// leaveTrials ends a session's part in its run's job, and the job with its last session. err
// is that of the session.
func (a *Agent) leaveTrials(run string, t *trials, err error) error {
	a.mu.Lock()
	t.sessions--
	last := t.sessions == 0
	a.mu.Unlock()
	if !last {
		return err
	}
	if t.err == nil {
		err = t.end(err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.trained, run)
	close(t.over)
	return err
}
