package agent

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/internal/httpkit"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/store"
)

// invited is the name of the invitation of a launch: see [nodes.Invitation].
func invited(launch string) string { return "launch-" + launch }

// joinDir is where the agents of a store's machines find each other.
func joinDir(dir string) string { return filepath.Join(dir, "join") }

// manyMachines bounds the machines of all launches of an agent.
const manyMachines = 1 << 16

// LaunchRequest tells the agent of rank 0's machine that the other ranks of a launch are
// on other machines too. Its reply is empty. It may be repeated.
type LaunchRequest struct {
	Key    string `json:"key"`    // of the launch, the same on all its ranks
	Master string `json:"master"` // host that the launcher names, which other machines reach
}

// machines is the agent's side of the agents on other machines, which follow it. It is
// made with the first launch over several machines.
type machines struct {
	*Agent
	endpoint *nodes.Endpoint
	job      string
	events   sync.WaitGroup

	launches map[string]bool // by key; guarded by the lock of the agent
}

// onLaunch makes this agent the coordinating one of a launch.
func (a *Agent) onLaunch(ctx context.Context, r LaunchRequest) (struct{}, error) {
	switch {
	case a.store == nil:
		return struct{}{}, a.readOnly("this launch")
	case a.link != nil:
		return struct{}{}, problem.Errorf(problem.Conflict, "this agent follows that of %s in one launch: ask the agent that `ckptstore agent start` without --launch starts", a.link.Host())
	}
	defer a.begin()()
	a.opening.Lock()
	defer a.opening.Unlock()
	a.mu.Lock()
	if a.stopping != "" {
		defer a.mu.Unlock()
		return struct{}{}, a.refusal()
	}
	m := a.machines
	known := m != nil && m.launches[r.Key]
	a.mu.Unlock()
	if known {
		return struct{}{}, nil
	}
	if m == nil {
		var err error
		if m, err = a.openMachines(ctx); err != nil {
			return struct{}{}, err
		}
	}
	a.mu.Lock()
	a.machines = m
	m.launches[r.Key] = true // before the invitation: see [StartRank]
	a.awaited = time.Now()
	a.mu.Unlock()
	if err := m.endpoint.Invite(invited(r.Key), nodes.Addresses(ctx, r.Master)); err != nil {
		a.mu.Lock()
		delete(m.launches, r.Key)
		a.mu.Unlock()
		return struct{}{}, err
	}
	a.log.Info("launch over several machines", "launch", r.Key, "endpoint", m.endpoint.Addr())
	return struct{}{}, nil
}

// openMachines opens the endpoint for the agents of other machines.
func (a *Agent) openMachines(ctx context.Context) (*machines, error) {
	job := store.NewID()
	e, err := nodes.Listen(ctx, nodes.EndpointConfig{
		Address: ":0", Dir: joinDir(a.at.Dir), Job: job, Store: a.at.ID, Version: a.cfg.Version, Min: 1, Max: manyMachines,
		Self: nodes.Node{Index: 0}, Timeout: a.cfg.Silence, Logger: a.log,
	})
	if err != nil {
		return nil, fmt.Errorf("serve the agents of other machines: %w", err)
	}
	m := &machines{Agent: a, endpoint: e, job: job, launches: map[string]bool{}}
	if !store.IsURL(a.at.Location) {
		e.Handle("POST /v1/doors/{door}", nodes.Tunnel(func(r *http.Request) (net.Conn, error) {
			return a.store.DialOwner(r.Context(), store.Door(r.PathValue("door")))
		}))
	}
	if a.cfg.Services != nil {
		e.Handle("POST "+session.ServicePath+"fs/", a.cfg.Services)
	}
	e.ServeProbes(joinDir(a.at.Dir), a.log)
	e.Handle("POST /v1/agents/join", httpkit.Handle(maxBody, m.onJoin))
	e.Handle("POST /v1/agents/gone", httpkit.Handle(maxBody, m.onGone))
	m.events.Go(func() {
		for e := range m.endpoint.Events() {
			m.handle(e)
		}
	})
	return m, nil
}

// close ends the agents of other machines.
func (m *machines) close() error {
	if m == nil {
		return nil
	}
	var problems []error
	for key := range m.launches {
		problems = append(problems, m.endpoint.Disinvite(invited(key)))
	}
	ctx, cancel := context.WithTimeout(context.Background(), m.cfg.Silence)
	defer cancel()
	if err := m.endpoint.End(ctx, "the agent of rank 0's machine has stopped", 0); err != nil {
		m.log.Warn("agents of other machines not told of the end", "error", err)
	}
	problems = append(problems, m.endpoint.Close())
	m.events.Wait()
	return errors.Join(problems...)
}

// followers counts the agents of other machines. The caller holds the lock.
func (m *machines) followers() (n int) {
	if m == nil {
		return 0
	}
	for _, member := range m.endpoint.Members() {
		if member.Index != 0 && member.State != nodes.StateLost {
			n++
		}
	}
	return n
}

// handle obeys an event of the endpoint: without its agent, a machine's processes cannot
// complete a group.
func (m *machines) handle(e nodes.Event) {
	switch e := e.(type) {
	case nodes.Lost:
		m.lostMachine(e.Node)
	case nodes.Left:
		m.lostMachine(e.Node)
	case nodes.Rejoined:
		m.lostMachine(e.Member.Index)
	}
}

func (m *machines) lostMachine(node int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, g := range m.groups {
		for _, of := range g.members {
			if of.node == node {
				of.end()
			}
		}
	}
}

// remoteJoin is the join of a process of another machine.
type remoteJoin struct {
	JoinRequest
	Host string `json:"host"`
}

// partReply gives a machine its part of a complete group.
type partReply struct {
	Job   string        `json:"job"`
	Nodes session.Nodes `json:"nodes"` // the ranks of each machine
	Node  int           `json:"node"`  // the machine's place
	Port  int           `json:"port"`  // of the session's endpoint, on the machine of the coordinating agent
	Token string        `json:"token"` // for it

	SaveTimeout time.Duration  `json:"save_timeout"`
	Drain       time.Duration  `json:"drain_timeout"`
	Collective  time.Duration  `json:"collective_timeout"`
	Config      map[string]any `json:"config,omitempty"`
}

// onJoin makes a process of another machine a member of a group. It replies when all
// ranks have joined.
func (m *machines) onJoin(ctx context.Context, r remoteJoin) (partReply, error) {
	if err := r.check(); err != nil {
		return partReply{}, err
	}
	defer m.begin()()
	of := distant(nodes.From(ctx), r)
	g, err := m.enter(ctx, r.JoinRequest, of)
	if err != nil {
		of.forget()
		return partReply{}, err
	}
	select {
	case <-g.placed:
	case <-g.ready:
	case <-ctx.Done():
		m.withdraw(g, of)
		return partReply{}, ctx.Err()
	}
	if g.began() && g.err != nil {
		return partReply{}, g.err
	}
	part := g.part0
	part.Node, _ = part.Nodes.Of(r.Rank)
	return part, nil
}

// goneRequest reports the end of a process of another machine.
type goneRequest struct {
	Key  string `json:"key"`
	Rank int    `json:"rank"`
	PID  int    `json:"pid"`
}

func (m *machines) onGone(ctx context.Context, r goneRequest) (struct{}, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if g := m.groups[r.Key]; g != nil {
		if of := g.members[r.Rank]; of != nil && of.node == nodes.From(ctx) && of.pid == r.PID {
			of.end()
		}
	}
	return struct{}{}, nil
}

// spread places the ranks of a complete group on their machines, this one first, and
// opens the endpoint of its session. It returns nil if all are here.
func (a *Agent) spread(ctx context.Context, g *group) (session.Nodes, *nodes.Endpoint, error) {
	a.mu.Lock()
	place := session.Nodes{nil}
	at := map[int]int{0: 0} // places by the machine's index
	for _, rank := range slices.Sorted(maps.Keys(g.members)) {
		node := g.members[rank].node
		if _, known := at[node]; !known {
			at[node] = len(place)
			place = append(place, nil)
		}
		place[at[node]] = append(place[at[node]], rank)
	}
	a.mu.Unlock()
	if len(place) == 1 {
		return place, nil, nil
	}
	part := partReply{
		Job: g.job, Nodes: place, Token: rand.Text() + rand.Text(), Config: g.Config,
		SaveTimeout: a.cfg.Session.SaveTimeout, Drain: a.cfg.Session.DrainTimeout, Collective: a.cfg.Session.Collective,
	}
	e, err := nodes.Listen(ctx, nodes.EndpointConfig{
		Address: ":0", Token: part.Token, Job: g.job, Run: g.Run, Store: a.at.ID, Version: a.cfg.Version, Min: len(place), Max: len(place),
		Self: nodes.Node{Index: 0, Procs: len(place[0])}, Timeout: a.cfg.Silence, Logger: a.log,
	})
	if err != nil {
		return nil, nil, fmt.Errorf("serve the ranks of other machines: %w", err)
	}
	if tcp, ok := e.Addr().(*net.TCPAddr); ok {
		part.Port = tcp.Port
	}
	g.part0 = part
	close(g.placed)
	return place, e, nil
}

// NewFollower returns an agent that serves the ranks of one launch on this machine, while
// the agent at the other end of link coordinates. The caller has opened the store through
// the link, and keeps both until Serve has returned.
func NewFollower(cfg Config, st *store.Store, key string, link *nodes.Link) *Agent {
	a := New(cfg, st)
	a.link, a.key = link, key
	return a
}

// Owner returns the way to the owner of a store on another machine for
// [store.Options].Owner: through a link of [JoinLaunch]. It is nil for a store on a server.
func Owner(at store.Whereabouts, link *nodes.Link) func(context.Context, store.Door) (net.Conn, error) {
	if store.IsURL(at.Location) {
		return nil
	}
	return func(ctx context.Context, door store.Door) (net.Conn, error) {
		return link.Dial(ctx, "/v1/doors/"+string(door))
	}
}

// launch returns the key of the launch in which this agent follows, or "".
func (a *Agent) launch() string { return a.key }

// follow stops a follower when its link ends. The caller calls stop.
func (a *Agent) follow() (stop func()) {
	if a.link == nil {
		return func() {}
	}
	done := make(chan struct{})
	go func() {
		select {
		case <-a.link.Done():
			a.Stop(fmt.Sprintf("the agent on %s, which it follows, is gone: %v", a.link.Host(), a.link.Err()), true)
		case <-done:
		}
	}()
	return func() { close(done) }
}

// again is the pause before a request without an answer is repeated.
const again = 200 * time.Millisecond

// ask repeats a request to the coordinating agent until it is answered.
func (a *Agent) ask(ctx context.Context, path string, in, out any) error {
	for {
		err := a.link.Request(ctx, path, in, out)
		if err == nil || problem.Given(err) {
			return err
		}
		select {
		case <-time.After(again):
		case <-a.link.Done():
			return problem.Errorf(problem.Unavailable, "the agent on %s, which coordinates this launch, is gone: %w: %w", a.link.Host(), cmp.Or(a.link.Err(), errStopping), err)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// joinAway makes a process a member of a group that the agent of rank 0's machine forms.
func (a *Agent) joinAway(ctx context.Context, g *group, r JoinRequest, m *member) error {
	a.mu.Lock()
	complete := g.state != joining
	a.mu.Unlock()
	if complete { // the reply to the process was lost
		return nil
	}
	r.PID = m.pid
	host, err := os.Hostname()
	if err != nil {
		return fmt.Errorf("hostname: %w", err)
	}
	var part partReply
	if err := a.ask(ctx, "/v1/agents/join", remoteJoin{r, host}, &part); err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if g.state == joining {
		g.state, g.job, g.part0 = running, part.Job, part
		g.late.Stop()
		go a.run(g)
	}
	return nil
}

// gone tells the coordinating agent that a process has ended before its group was
// complete.
func (a *Agent) gone(g *group, m *member) {
	ctx, cancel := context.WithTimeout(a.life, a.cfg.Silence)
	defer cancel()
	if err := a.ask(ctx, "/v1/agents/gone", goneRequest{g.Key, m.rank, m.pid}, new(struct{})); err != nil {
		a.log.Warn("end of a process not reported", "rank", m.rank, "error", err)
	}
}

// serveAway serves this machine's members of a complete group.
func (a *Agent) serveAway(g *group) (err error) {
	if err := a.succeed(g); err != nil {
		return err
	}
	part := g.part0
	link, err := nodes.Join(a.life, nodes.JoinConfig{
		Address: net.JoinHostPort(a.link.Host(), strconv.Itoa(part.Port)), Token: part.Token, Wait: 3 * a.cfg.Silence, Logger: a.log,
		Self: nodes.Node{Key: fmt.Sprint("machine ", part.Node), Index: part.Node, Procs: len(part.Nodes[part.Node]), Version: a.cfg.Version, Store: a.at.ID},
	})
	if err != nil {
		return err
	}
	defer link.Close()
	cfg := a.attending(g, part.Nodes, part.Node)
	cfg.SaveTimeout, cfg.DrainTimeout, cfg.Collective, cfg.TrialConfig = part.SaveTimeout, part.Drain, part.Collective, part.Config
	for began := time.Now(); ; {
		err = launch.AttendPart(a.life, cfg, a.sessionStore(), link)
		// The last session of the run here may not have released its memory yet.
		if !errors.Is(err, session.ErrTaken) || time.Since(began) > a.cfg.Handover {
			break
		}
		select {
		case <-time.After(again):
		case <-a.life.Done():
		}
	}
	var ended *nodes.EndedError
	switch {
	case !errors.As(err, &ended):
		return err
	case ended.Code == 0:
		return nil
	}
	return problem.Errorf(kindOf(ended.Code), "%s", ended.Reason)
}

// kindOf returns the kind of a session's error that another agent has sent as a status.
func kindOf(status int) problem.Kind {
	for _, k := range []problem.Kind{problem.Invalid, problem.NotFound, problem.Conflict, problem.Gone, problem.Unavailable, problem.Late, problem.NoSpace, problem.Denied} {
		if k.Status() == status {
			return k
		}
	}
	return problem.Internal
}
