package agent

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"time"

	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/problem"
)

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
	ends   chan launch.MemberEnd
	holds  bool // the run is this group's, of those of this agent

	job     string
	serving launch.Serving
	err     error // why there is no session
}

// agrees refuses a member that belongs to another group.
func (g *group) agrees(r JoinRequest) error {
	differ := func(what string, mine, other any) error {
		return problem.Errorf(problem.Conflict, "rank %d joins with %s %v, and others of its key with %v: give all ranks of a group the same, and each group a key of its own", r.Rank, what, mine, other)
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

// occupiedError says that a run is another session's.
type occupiedError struct{ error }

// occupied is the refusal of another session of the group's run.
func (g *group) occupied() error {
	return problem.Wrap(problem.Conflict, occupiedError{fmt.Errorf("run %q is in use: job %s of this agent has the processes %v: wait for them or end them, or choose another run name, by CKPTSTORE_RUN or ckptstore.init(run=…)", g.Run, g.job, g.pids())})
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
	a.fail(g, problem.Errorf(problem.Late, "ranks %v of %d have not joined run %q within %v; those that have are the processes %v: every rank of a group must join, with the same key", absent, g.WorldSize, g.Run, a.cfg.Join, g.pids()))
}

// lost takes note of the end of a member's process.
func (a *Agent) lost(g *group, m *member) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case g.members[m.rank] != m:
	case g.state == joining:
		a.fail(g, problem.Errorf(problem.Conflict, "rank %d (process %d) has ended before all %d ranks had joined run %q", m.rank, m.pid, g.WorldSize, g.Run))
	default:
		g.part(launch.MemberEnd{Rank: m.rank})
	}
}

// part takes out a rank, once. The caller holds the lock.
func (g *group) part(e launch.MemberEnd) {
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
