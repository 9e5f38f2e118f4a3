package agent

import (
	"fmt"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// State of a group.
const (
	joining = "joining" // not all ranks have joined
	running = "running" // all ranks have joined
	ending  = "ending"  // all members are gone; their staged saves are being finished
)

// group is the processes of one key. The lock of the agent guards all of it,
// except the fields written before ready is closed.
type group struct {
	JoinRequest // of the first member
	state       string
	members     map[int]*member
	late        *time.Timer   // ends an incomplete group
	placed      chan struct{} // closed when part0 is valid, if ranks are on other machines
	part0       partReply
	ready       chan struct{}
	over        chan struct{} // closed when the session has ended

	parted map[int]bool // ranks that have left
	ends   chan launch.MemberEnd
	holds  bool // of the groups of this agent that exclude each other, this one has the trial

	job     string
	serving launch.Serving
	err     error // why there is no session
}

// agrees refuses a member that does not fit the group.
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

// occupiedError reports that another session has the run.
type occupiedError struct{ error }

// occupied returns the refusal of another session of the group's run.
func (g *group) occupied() error {
	return problem.Wrap(problem.Conflict, occupiedError{fmt.Errorf("run %q is in use: job %s of this agent has the processes %v: wait for them or end them, or choose another run name, by CKPTSTORE_RUN or ckptstore.init(run=…)", g.Run, g.job, g.pids())})
}

// pids returns the processes of the members that have not left, by rank.
func (g *group) pids() []int {
	pids := []int{}
	for rank := range g.WorldSize {
		if m := g.members[rank]; m != nil && !g.parted[rank] {
			pids = append(pids, m.pid)
		}
	}
	return pids
}

// present names the processes that have joined, by machine.
func (g *group) present() string {
	by := map[string][]int{}
	for rank := range g.WorldSize {
		if m := g.members[rank]; m != nil {
			by[m.host] = append(by[m.host], m.pid)
		}
	}
	if len(by) == 1 && by[""] != nil {
		return fmt.Sprintf("the processes %v", by[""])
	}
	var texts []string
	for _, host := range slices.Sorted(maps.Keys(by)) {
		at := host
		if host == "" {
			at = "this machine"
			if name, err := os.Hostname(); err == nil {
				at = name
			}
		}
		texts = append(texts, fmt.Sprintf("%v on %s", by[host], at))
	}
	return "the processes " + strings.Join(texts, ", ")
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

// withdraw removes a member whose request has ended before the group was
// complete.
func (a *Agent) withdraw(g *group, m *member) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if g.state != joining || g.members[m.rank] != m {
		return // the end of its process is noticed otherwise
	}
	delete(g.members, m.rank)
	m.forget()
	if len(g.members) == 0 {
		a.fail(g, fmt.Errorf("no process joins run %q any more", g.Run))
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
	a.fail(g, problem.Errorf(problem.Late, "ranks %v of %d have not joined run %q within %v; those that have are %s: every rank of a group must join, with the same key", absent, g.WorldSize, g.Run, a.cfg.Join, g.present()))
}

// lost handles the end of a member's process.
func (a *Agent) lost(g *group, m *member) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case g.members[m.rank] != m:
	case g.state == joining:
		if a.link != nil {
			go a.gone(g, m) // its agent ends the group
			return
		}
		a.fail(g, problem.Errorf(problem.Conflict, "rank %d (%v) has ended before all %d ranks had joined run %q", m.rank, m, g.WorldSize, g.Run))
	case m.node == 0: // the session notices the end of others
		g.part(launch.MemberEnd{Rank: m.rank})
	}
}

// part removes a rank, once. The caller holds the lock.
func (g *group) part(e launch.MemberEnd) {
	if g.parted[e.Rank] {
		return
	}
	g.parts(e.Rank)
	g.ends <- e // there is room for each rank
}

// parts records that a rank has left. The caller holds the lock.
func (g *group) parts(rank int) {
	if g.parted[rank] = true; len(g.parted) == len(g.members) {
		g.state = ending
	}
}

// fail ends a group without a session. The caller holds the lock.
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

// began reports whether the group's members have their outcome.
func (g *group) began() bool {
	select {
	case <-g.ready:
		return true
	default:
		return false
	}
}
