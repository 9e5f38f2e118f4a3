package agent

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"reflect"
	"slices"
	"time"

	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/store"
	"github.com/ckptstore/ckptstore/worker"
)

// JoinRequest makes a process one rank of a group.
type JoinRequest struct {
	Protocols []int          `json:"protocols"`
	Key       string         `json:"key"` // the same on all ranks of the group, and of no other
	Run       string         `json:"run"`
	Trial     string         `json:"trial,omitempty"` // default main
	Rank      int            `json:"rank"`
	WorldSize int            `json:"world_size"`
	PID       int            `json:"pid"`
	Resume    string         `json:"resume,omitempty"` // as trainer run --resume; default auto
	Config    map[string]any `json:"config,omitempty"` // of the trial, when it is new
}

// JoinReply says where a rank is served from now on.
type JoinReply struct {
	Socket  string `json:"socket"`
	Token   string `json:"token"`
	Job     string `json:"job"`
	Attempt int    `json:"attempt"`
	Resume  string `json:"resume"` // full ID of the checkpoint to resume from; empty: a fresh start
}

// maxWorld bounds the ranks of a group on one machine.
const maxWorld = 4096

// maxKey bounds the length of a key, in bytes.
const maxKey = 1024

// check refuses what no group can be, and sets defaults.
func (r *JoinRequest) check() error {
	if r.Trial == "" {
		r.Trial = projections.DefaultTrial
	}
	if r.Resume == "" {
		r.Resume = "auto"
	}
	switch {
	case r.Key == "" || len(r.Key) > maxKey:
		return problemf(http.StatusBadRequest, "a key of %d bytes: it has 1 to %d", len(r.Key), maxKey)
	case r.WorldSize < 1 || r.WorldSize > maxWorld:
		return problemf(http.StatusBadRequest, "a world of %d ranks: it has 1 to %d", r.WorldSize, maxWorld)
	case r.Rank < 0 || r.Rank >= r.WorldSize:
		return problemf(http.StatusBadRequest, "rank %d is not below the world size %d", r.Rank, r.WorldSize)
	case r.PID < 0:
		return problemf(http.StatusBadRequest, "process %d is none", r.PID)
	}
	if err := store.ValidRun(r.Run); err != nil {
		return problemf(http.StatusBadRequest, "run %q: %w: choose another name", r.Run, err)
	}
	if err := store.ValidRun(r.Trial); err != nil {
		return problemf(http.StatusBadRequest, "trial %q: %w: choose another name", r.Trial, err)
	}
	return nil
}

// State of a group.
const (
	joining = "joining" // not all ranks are there
	running = "running" // it is complete
	ending  = "ending"  // all members are gone, and what they had staged is finished
)

// group is the processes of one key. All of it is under the lock of the agent,
// but what is written before ready is closed.
type group struct {
	JoinRequest // of the first member
	state       string
	members     map[int]*member
	late        *time.Timer // ends a group that is not complete
	ready       chan struct{}
	over        chan struct{} // closed when the session has ended

	parted map[int]bool // ranks that take no part any more
	ends   chan worker.MemberEnd
	holds  bool // the run is this group's, of those of this agent

	job     string
	serving worker.Serving
	err     error // why there is no session
}

func (a *Agent) onJoin(ctx context.Context, r JoinRequest) (JoinReply, error) {
	if err := a.speaks(r.Protocols); err != nil {
		return JoinReply{}, err
	}
	if err := r.check(); err != nil {
		return JoinReply{}, err
	}
	if a.store == nil {
		return JoinReply{}, problemf(http.StatusForbidden, "the store %s cannot be written by this user here, so run %q can neither save nor resume in it: give another store (its checkpoints can be looked into by ckptstore.open); if it can be written by now, run `ckptstore agent stop --store %s` first", a.at.Name, r.Run, a.at.Name)
	}
	defer a.begin()()
	m, err := enlist(ctx, r.Rank, r.PID)
	if err != nil {
		return JoinReply{}, err
	}
	g, err := a.enter(ctx, r, m)
	if err != nil {
		m.forget()
		return JoinReply{}, err
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
	return JoinReply{Socket: g.serving.Sockets[r.Rank], Token: g.serving.Tokens[r.Rank], Job: g.job, Attempt: g.serving.Attempt, Resume: g.serving.Resume}, nil
}

// enter makes a process a member of its group. A group of the same key whose
// members go away is waited for.
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

// tryEnter gives the group that the process is in now, or the one whose end it
// must wait for, with the error if that does not come.
func (a *Agent) tryEnter(r JoinRequest, m *member) (g, old *group, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if g = a.groups[r.Key]; g != nil {
		if err := g.agrees(r); err != nil {
			return nil, nil, err
		}
		was := g.members[r.Rank]
		switch {
		case g.state != joining && was.pid == m.pid && !g.parted[r.Rank]:
			m.forget() // it has lost the reply
			return g, nil, nil
		case g.state != joining:
			err := problemf(http.StatusConflict, "rank %d has joined job %s of run %q already, as process %d: each process has its own rank, and a restarted group its own key", r.Rank, g.job, g.Run, was.pid)
			if len(g.parted) > 0 {
				return nil, g, err
			}
			return nil, nil, err
		case was != nil && was.pid != m.pid && was.lives():
			return nil, nil, problemf(http.StatusConflict, "rank %d has joined run %q already, as process %d: each process has its own rank", r.Rank, g.Run, was.pid)
		case was != nil:
			delete(g.members, r.Rank)
			was.forget()
		}
	} else {
		if a.stopping != "" {
			return nil, nil, a.refusal()
		}
		if err := a.inUse(r.Run); err != nil {
			return nil, nil, err
		}
		g = &group{
			JoinRequest: r, state: joining, members: map[int]*member{}, ready: make(chan struct{}), over: make(chan struct{}),
			parted: map[int]bool{}, ends: make(chan worker.MemberEnd, r.WorldSize), job: store.NewID(),
		}
		g.late = time.AfterFunc(a.cfg.Join, func() { a.tooLate(g) })
		a.groups[r.Key] = g
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

// agrees refuses a member that belongs to another group.
func (g *group) agrees(r JoinRequest) error {
	differ := func(what string, mine, other any) error {
		return problemf(http.StatusConflict, "rank %d joins with %s %v, and others of its key with %v: give all ranks of a group the same, and each group a key of its own", r.Rank, what, mine, other)
	}
	switch {
	case r.Run != g.Run:
		return differ("run", r.Run, g.Run)
	case r.Trial != g.Trial:
		return differ("trial", r.Trial, g.Trial)
	case r.WorldSize != g.WorldSize:
		return differ("world size", r.WorldSize, g.WorldSize)
	case r.Resume != g.Resume:
		return differ("resume", r.Resume, g.Resume)
	case !reflect.DeepEqual(r.Config, g.Config):
		return differ("config", r.Config, g.Config)
	}
	return nil
}

// refusal says that no session is taken any more. The caller holds the lock.
func (a *Agent) refusal() error {
	return problemf(http.StatusServiceUnavailable, "the agent (process %d) is stopping (%s) and takes no new sessions: when it has ended, `ckptstore agent start` starts another", a.card.PID, a.stopping)
}

// inUse refuses a run of which all members of a session live. The caller holds
// the lock.
func (a *Agent) inUse(run string) error {
	for _, g := range a.groups {
		if g.Run == run && len(g.parted) == 0 {
			return g.occupied()
		}
	}
	return nil
}

// occupied is the refusal of another session of the group's run.
func (g *group) occupied() error {
	return problemf(http.StatusConflict, "run %q is in use: job %s of this agent has the processes %v: wait for them or end them, or choose another run name", g.Run, g.job, g.pids())
}

// pids are the members that take part, by rank.
func (g *group) pids() []int {
	pids := []int{}
	for rank := range g.WorldSize {
		if m := g.members[rank]; m != nil && !g.parted[rank] {
			pids = append(pids, m.pid)
		}
	}
	return pids
}

func (g *group) status() SessionStatus {
	s := SessionStatus{Run: g.Run, Trial: g.Trial, Job: g.job, State: g.state, WorldSize: g.WorldSize, PIDs: g.pids()}
	select {
	case <-g.ready:
		s.Attempt = g.serving.Attempt
	default:
	}
	return s
}

// withdraw takes out a member whose request has ended before the group was
// complete.
func (a *Agent) withdraw(g *group, m *member) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if g.state != joining || g.members[m.rank] != m {
		return // its end is told by its process
	}
	delete(g.members, m.rank)
	m.forget()
	if len(g.members) == 0 {
		a.fail(g, fmt.Errorf("nobody joins run %q any more", g.Run))
	}
}

// tooLate ends a group that is not complete in time.
func (a *Agent) tooLate(g *group) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if g.state != joining {
		return
	}
	var absent []int
	for rank := range g.WorldSize {
		if g.members[rank] == nil {
			absent = append(absent, rank)
		}
	}
	a.fail(g, problemf(http.StatusGatewayTimeout, "ranks %v of %d have not joined run %q within %v; those that have are the processes %v: every rank of a group must join, with the same key", absent, g.WorldSize, g.Run, a.cfg.Join, g.pids()))
}

// lost takes note of the end of a member's process.
func (a *Agent) lost(g *group, m *member) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case g.members[m.rank] != m:
	case g.state == joining:
		a.fail(g, problemf(http.StatusConflict, "rank %d (process %d) has ended before all %d ranks had joined run %q", m.rank, m.pid, g.WorldSize, g.Run))
	default:
		g.part(worker.MemberEnd{Rank: m.rank})
	}
}

// part takes out a rank, once. The caller holds the lock.
func (g *group) part(e worker.MemberEnd) {
	if g.parted[e.Rank] {
		return
	}
	g.parted[e.Rank] = true
	if len(g.parted) == g.WorldSize {
		g.state = ending
	}
	g.ends <- e // there is room for each rank
}

// fail ends a group of which nothing becomes. The caller holds the lock.
func (a *Agent) fail(g *group, err error) {
	if a.groups[g.Key] == g {
		delete(a.groups, g.Key)
	}
	g.late.Stop()
	g.state = ending
	if !g.began() {
		g.err = err
		close(g.ready)
	}
	close(g.over)
	members := slices.Collect(maps.Values(g.members))
	g.members = map[int]*member{}
	for _, m := range members {
		m.forget()
	}
	a.move()
}

// began reports whether the group's members were told what becomes of it.
func (g *group) began() bool {
	select {
	case <-g.ready:
		return true
	default:
		return false
	}
}
