package agent

import (
	"context"
	"fmt"
	"time"

	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// JoinRequest makes a process one rank of a group.
type JoinRequest struct {
	Protocols []int          `json:"protocols"`
	Key       string         `json:"key"` // the same on all ranks of the group, and on no others
	Run       string         `json:"run"`
	Derived   bool           `json:"derived,omitempty"` // the run's name is not the user's: see Agent.joinDerived
	Trial     string         `json:"trial,omitempty"`   // default main
	Rank      int            `json:"rank"`
	WorldSize int            `json:"world_size"`
	PID       int            `json:"pid"`
	Resume    string         `json:"resume,omitempty"` // as trainer run --resume; default auto
	Config    map[string]any `json:"config,omitempty"` // of the trial, when it is new
}

// JoinReply tells a rank the socket that serves it from now on.
type JoinReply struct {
	Run     string `json:"run"`
	Socket  string `json:"socket"`
	Token   string `json:"token"`
	Job     string `json:"job"`
	Attempt int    `json:"attempt"`
	Resume  string `json:"resume"` // full ID of the checkpoint to resume from; empty: a fresh start
}

// maxWorld bounds the ranks of a group.
const maxWorld = 1 << 16

// maxKey bounds the length of a key, in bytes.
const maxKey = 1024

// check refuses impossible groups, and sets defaults.
func (r *JoinRequest) check() error {
	if r.Trial == "" {
		r.Trial = projections.DefaultTrial
	}
	if r.Resume == "" {
		r.Resume = "auto"
	}
	switch {
	case r.Key == "" || len(r.Key) > maxKey:
		return problem.Errorf(problem.Invalid, "a key of %d bytes: it has 1 to %d", len(r.Key), maxKey)
	case r.WorldSize < 1 || r.WorldSize > maxWorld:
		return problem.Errorf(problem.Invalid, "a world of %d ranks: it has 1 to %d", r.WorldSize, maxWorld)
	case r.Rank < 0 || r.Rank >= r.WorldSize:
		return problem.Errorf(problem.Invalid, "rank %d is not below the world size %d", r.Rank, r.WorldSize)
	case r.Derived && r.WorldSize > 1:
		return problem.Errorf(problem.Invalid, "the name of run %q is derived, and %d ranks join it: a group's run has a name that was given", r.Run, r.WorldSize)
	case r.PID < 0:
		return problem.Errorf(problem.Invalid, "process %d does not exist", r.PID)
	}
	if err := store.ValidRun(r.Run); err != nil {
		return problem.Errorf(problem.Invalid, "run %q: %w: choose another name", r.Run, err)
	}
	if err := store.ValidRun(r.Trial); err != nil {
		return problem.Errorf(problem.Invalid, "trial %q: %w: choose another name", r.Trial, err)
	}
	return nil
}

func (a *Agent) onJoin(ctx context.Context, r JoinRequest) (JoinReply, error) {
	if err := a.speaks(r.Protocols); err != nil {
		return JoinReply{}, err
	}
	if err := r.check(); err != nil {
		return JoinReply{}, err
	}
	if a.store == nil {
		return JoinReply{}, a.readOnly(fmt.Sprintf("run %q", r.Run))
	}
	defer a.begin()()
	if r.Derived {
		return a.joinDerived(ctx, r)
	}
	return a.join(ctx, r)
}

// readOnly refuses sessions in a store that this agent only reads.
func (a *Agent) readOnly(what string) error {
	return problem.Errorf(problem.Denied, "the store %s cannot be written by this user here, so %s can neither save nor resume in it: give another store (its checkpoints can be looked into by ckptstore.open); if it can be written by now, run `ckptstore agent stop --store %s` first", a.at.Name, what, a.at.Name)
}

// join makes a process a member of a group, and waits until the group is served.
func (a *Agent) join(ctx context.Context, r JoinRequest) (JoinReply, error) {
	m, err := enlist(ctx, r.Rank, r.PID)
	if err != nil {
		return JoinReply{}, err
	}
	g, err := a.enter(ctx, r, m)
	if err != nil {
		m.forget()
		return JoinReply{}, err
	}
	if a.link != nil {
		if err := a.joinAway(ctx, g, r, m); err != nil {
			a.withdraw(g, m)
			return JoinReply{}, err
		}
	}
	select {
	case <-g.ready:
	case <-ctx.Done():
		a.withdraw(g, m)
		return JoinReply{}, ctx.Err()
	}
	if g.err != nil {
		return JoinReply{}, g.err
	}
	return JoinReply{Run: g.Run, Socket: g.serving.Sockets[r.Rank], Token: g.serving.Tokens[r.Rank], Job: g.job, Attempt: g.serving.Attempt, Resume: g.serving.Resume}, nil
}

// enter makes a process a member of its group. It waits for a group of the same
// key whose members are leaving.
func (a *Agent) enter(ctx context.Context, r JoinRequest, m *member) (*group, error) {
	limit := time.NewTimer(a.cfg.Handover)
	defer limit.Stop()
	for {
		g, old, err := a.tryEnter(r, m)
		if old == nil {
			return g, err
		}
		select {
		case <-old.over:
		case <-limit.C:
			return nil, err
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// tryEnter returns the group that the process has entered, or the group whose end
// it must wait for, with the error to return if that end does not come.
func (a *Agent) tryEnter(r JoinRequest, m *member) (g, old *group, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if g = a.groups[r.Key]; g != nil {
		if err := g.agrees(r); err != nil {
			return nil, nil, err
		}
		was := g.members[r.Rank]
		switch {
		case g.state != joining && was != nil && was.is(m) && !g.parted[r.Rank]:
			m.forget() // the reply to it was lost
			return g, nil, nil
		case g.state != joining:
			if was == nil { // of a follower: the rank was on another machine
				return nil, g, problem.Errorf(problem.Conflict, "job %s of run %q is running under this key without rank %d here: a restarted group has its own key", g.job, g.Run, r.Rank)
			}
			err := problem.Errorf(problem.Conflict, "rank %d has joined job %s of run %q already, as %v: each process has its own rank, and a restarted group its own key", r.Rank, g.job, g.Run, was)
			if len(g.parted) > 0 {
				return nil, g, err
			}
			return nil, nil, err
		case was != nil && !was.is(m) && was.lives():
			return nil, nil, problem.Errorf(problem.Conflict, "rank %d has joined run %q already, as %v: each process has its own rank", r.Rank, g.Run, was)
		case was != nil:
			delete(g.members, r.Rank)
			was.forget()
		}
	} else {
		if a.stopping != "" {
			return nil, nil, a.refusal()
		}
		if err := a.inUse(r.Run, r.Trial); err != nil {
			return nil, nil, err
		}
		g = &group{
			JoinRequest: r, state: joining, members: map[int]*member{}, placed: make(chan struct{}), ready: make(chan struct{}), over: make(chan struct{}),
			parted: map[int]bool{}, ends: make(chan launch.MemberEnd, r.WorldSize), job: store.NewID(),
		}
		limit := a.cfg.Join
		if a.link != nil {
			limit += a.cfg.Silence // the coordinating agent knows the other machines
		}
		g.late = time.AfterFunc(limit, func() { a.tooLate(g) })
		a.groups[r.Key] = g
		a.awaited = time.Time{}
	}
	g.members[r.Rank] = m
	go func() {
		select {
		case <-m.gone:
			a.lost(g, m)
		case <-m.forgot:
		}
	}()
	if len(g.members) == g.WorldSize {
		g.state = running
		g.late.Stop()
		go a.run(g)
	}
	return g, nil, nil
}

// refusal reports that no more sessions are taken. The caller holds the lock.
func (a *Agent) refusal() error {
	return problem.Errorf(problem.Unavailable, "the agent (process %d) is stopping (%s) and takes no new sessions: when it has ended, `ckptstore agent start` starts another", a.card.PID, a.stopping)
}

// inUse refuses a trial that a session with all its members alive excludes. The caller
// holds the lock.
func (a *Agent) inUse(run, trial string) error {
	for _, g := range a.groups {
		if g.excludes(run, trial) && len(g.parted) == 0 {
			return g.occupied()
		}
	}
	return nil
}
