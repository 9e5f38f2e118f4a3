// Package agent serves a store to processes that no trainer started: a plain
// `python train.py`, a notebook, the ranks of torchrun.
//
//	Agent      one process for a store and user on a machine, shared by the user's
//	           other processes, on a socket in the store's private directory
//	card       agent.json there: the agent's address and token
//	group      processes that join under one key, until all ranks have joined
//	session    the job of a complete group, with one attempt: see [launch.Attend]
//	trials     sessions of one run and different trials, which share a job
//	member     one process of a group, watched from its join to its end
//
//	machines   the agents of other machines, which follow this one in a launch over
//	           several: see below
//
// An agent starts no process and ends none. The session records each member that
// leaves or disappears. When all have, their staged saves are finished and the
// job ends in the log. The agent stops after an idle period, or on request: then
// it takes no new sessions, and ends with the last of its sessions.
//
// [Start] finds the agent of a store or starts one.
//
// # Several machines
//
// Where the ranks of a launch are on several machines, the agent of rank 0's machine
// coordinates. Only this agent may own the store. It invites the others by a file
// in the store's directory that the launch's key names:
//
//	STORE/join/launch-KEY.json   address of the coordinating agent
//	STORE/join/JOB.json          token and certificate: see package nodes
//
// On every other machine, [StartRank] starts an agent for this launch alone, a follower.
// It opens the store through its link to the coordinating agent, and never takes the
// store's lock. It passes the joins of its machine's processes on, and serves its
// machine's part of a complete group: see [launch.AttendPart].
//
// A machine that is silent for [Config].Silence is lost with its ranks. No process is
// killed: the others' requests end with the reason.
package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/session/shm"
	"github.com/ckptstore/ckptstore/internal/store"
)

// Config configures an agent. Durations are deadlines; zero means the default.
type Config struct {
	// Services answers requests below [session.ServicePath] on the agent's own
	// socket and on those of its sessions' ranks; nil refuses them. Busy returns
	// the service that keeps the agent from stopping, or ""; it may be nil.
	Services http.Handler
	Busy     func() string

	// Idle is how long an agent without sessions and requests waits before it
	// stops; 0: forever.
	Idle time.Duration
	// Join is how long a group may take to be complete, from its first member on;
	// default 2 min. Handover is how long a new group of a run waits for the end
	// of an old group that has lost members; default 20 s.
	Join, Handover time.Duration
	// Silence is how long another machine may be silent before its ranks count as gone;
	// default 10 s.
	Silence time.Duration
	// Session is the common configuration of the sessions: timeouts and staging.
	Session session.Config

	Shared  string // directory in memory for staging; default: the machine's
	Version string // of this program, for messages
	Logger  *slog.Logger
}

func (cfg Config) withDefaults() Config {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	def(&cfg.Join, 2*time.Minute)
	def(&cfg.Handover, 20*time.Second)
	def(&cfg.Silence, 10*time.Second)
	def(&cfg.Session.SaveTimeout, 10*time.Minute)
	def(&cfg.Session.DrainTimeout, 2*time.Minute)
	def(&cfg.Session.Collective, 10*time.Minute)
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.Shared == "" {
		cfg.Shared, _ = shm.Dir()
	}
	return cfg
}

// Agent serves one store.
type Agent struct {
	cfg   Config
	at    store.Whereabouts
	store *store.Store // nil: not writable, so there are no sessions
	log   *slog.Logger
	card  Card

	// link leads to the agent of rank 0's machine, which this one follows in the launch
	// key; nil: it coordinates.
	link *nodes.Link
	key  string

	life context.Context // of the sessions
	end  context.CancelCauseFunc

	mu       sync.Mutex
	stopping string             // why no more sessions are taken; empty: they are
	now      bool               // wait for the sessions only
	groups   map[string]*group  // by key, until their sessions are over
	trained  map[string]*trials // by run, while sessions train trials other than main
	requests int                // being answered
	machines *machines          // nil before the first launch over several
	used     time.Time          // time of the last answer
	changed  chan struct{}      // of capacity one

	opening sync.Mutex // of machines
	wish    string     // the newest of another machine when this agent began
	awaited time.Time  // when a launch was made of which no process has joined; guarded by mu
}

// ErrStopped reports that a session ended because the agent was asked to stop.
var ErrStopped = problem.New(problem.Unavailable, "the agent was asked to stop")

// ErrServed reports that another agent serves the store.
var ErrServed = problem.New(problem.Conflict, "another agent serves this store")

// New returns an agent for an open store, which the caller keeps.
func New(cfg Config, st *store.Store) *Agent {
	a := NewReader(cfg, store.Whereabouts{ID: st.ID, Location: st.Location, Name: st.Location, Runtime: st.Runtime, Dir: st.Dir()})
	a.store = st
	return a
}

// NewReader returns an agent for a store that this user cannot write: it provides
// the configured services, and refuses joins.
func NewReader(cfg Config, at store.Whereabouts) *Agent {
	cfg = cfg.withDefaults()
	a := &Agent{
		cfg: cfg, at: at, log: cfg.Logger, groups: map[string]*group{}, trained: map[string]*trials{},
		used: time.Now(), changed: make(chan struct{}, 1),
	}
	a.life, a.end = context.WithCancelCause(context.Background())
	return a
}

// Hold makes this process the store's only agent, from before it opens the store
// until after it has closed it. It returns [ErrServed] if another agent, even an
// ending one, has not ended within patience.
//
// launch is the key of the launch in which it is to follow, see [NewFollower], or empty:
// the agents of launches do not exclude each other.
func Hold(ctx context.Context, at store.Whereabouts, launch string, patience time.Duration) (release func() error, err error) {
	lock, err := takeLock(ctx, fileOf(at.Runtime, launch, lockFile), patience)
	if errors.Is(err, errHeld) {
		err = ErrServed
		if c, cerr := readCard(at.Runtime, launch); cerr == nil {
			err = fmt.Errorf("%w: process %d; see `ckptstore agent status --store %s`", ErrServed, c.PID, at.Name)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("serve an agent of %s: %w", at.Name, err)
	}
	if launch == "" {
		return lock.Close, nil
	}
	return func() error { // no other agent has this launch later
		gone := os.Remove(fileOf(at.Runtime, launch, startFile))
		if errors.Is(gone, os.ErrNotExist) {
			gone = nil
		}
		return errors.Join(gone, os.Remove(lock.Name()), lock.Close())
	}, nil
}

// Serve serves until the agent is idle or asked to stop, or ctx ends: then it
// ends the sessions and finishes their staged saves. The caller holds the store
// by [Hold].
func (a *Agent) Serve(ctx context.Context) error {
	server, err := a.listen()
	if err != nil {
		return err
	}
	a.log.Info("agent serves", "store", a.at.ID, "location", a.at.Name, "socket", a.card.Socket, "pid", os.Getpid(), "version", a.cfg.Version)
	defer context.AfterFunc(ctx, func() { a.Stop(context.Cause(ctx).Error(), true) })()
	unfollow := a.follow()
	if a.yields() {
		a.wish, _ = nodes.Wished(joinDir(a.at.Dir))
	}
	a.keep()
	unfollow()
	return errors.Join(forget(a.at.Runtime, a.launch()), server.close(), a.unanswered(), a.machines.close())
}

// closeLimit is how long requests may take to end after their connections were
// closed.
const closeLimit = 30 * time.Second

// unanswered waits for the requests that were cut off.
func (a *Agent) unanswered() error {
	limit := time.NewTimer(closeLimit)
	defer limit.Stop()
	for {
		a.mu.Lock()
		n := a.requests
		a.mu.Unlock()
		if n == 0 {
			return nil
		}
		select {
		case <-a.changed:
		case <-limit.C:
			return fmt.Errorf("%d requests have not ended %v after their connections were closed: look at the disk of the store", n, closeLimit)
		}
	}
}

// Stop makes the agent take no new sessions, and end with those it has. With now,
// it ends the sessions and finishes their staged saves.
func (a *Agent) Stop(why string, now bool) {
	a.mu.Lock()
	if a.stopping == "" {
		a.stopping = why
		a.log.Info("agent takes no more sessions", "why", why, "sessions", len(a.groups))
	}
	if now && !a.now {
		a.now = true
		a.log.Info("sessions ended; finishing staged saves", "why", why)
		for _, g := range a.groups {
			if g.state == joining {
				a.fail(g, a.refusal())
			}
		}
	}
	a.mu.Unlock()
	if now {
		a.end(fmt.Errorf("%w: %s", ErrStopped, why))
	}
	a.move()
}

// move wakes keep.
func (a *Agent) move() {
	select {
	case a.changed <- struct{}{}:
	default: // keep is already notified
	}
}

// keep returns when the agent must end.
func (a *Agent) keep() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-a.changed:
		case <-timer.C:
		}
		over, next := a.over(time.Now(), a.wished())
		if over {
			return
		}
		timer.Reset(next)
	}
}

// busyPoll is how often the agent asks whether its services allow it to stop.
const busyPoll = 200 * time.Millisecond

// followersPoll is how often an idle agent asks whether agents of other machines still
// follow it.
const followersPoll = 5 * time.Second

// wishPoll is how often an idle agent asks whether another machine needs its store.
const wishPoll = 500 * time.Millisecond

// yields reports whether this agent owns a store that agents of other machines may need.
func (a *Agent) yields() bool {
	return a.store != nil && a.link == nil && !store.IsURL(a.at.Location)
}

// wished returns the machine whose agent needs the store that this idle agent owns, or "".
func (a *Agent) wished() string {
	a.mu.Lock()
	idle := len(a.groups) == 0 && a.requests == 0
	a.mu.Unlock()
	if !idle || !a.yields() {
		return ""
	}
	id, host := nodes.Wished(joinDir(a.at.Dir))
	if id == a.wish {
		return ""
	}
	return host
}

// over reports whether nothing keeps the agent running, or when to check again. wished is
// the machine that needs its store.
func (a *Agent) over(now time.Time, wished string) (stop bool, next time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.groups) > 0 || a.requests > 0 && !a.now {
		return false, time.Hour // their end wakes keep
	}
	if a.now {
		return true, 0
	}
	if a.cfg.Busy != nil && a.cfg.Busy() != "" {
		a.used = now
		return false, busyPoll
	}
	if a.stopping != "" {
		return true, 0
	}
	if wished != "" && now.Sub(a.awaited) > a.cfg.Handover {
		a.stopping = fmt.Sprintf("it is idle, and %s needs the store", wished)
		a.log.Info("agent stops", "why", a.stopping)
		return true, 0
	}
	if a.yields() {
		defer func() { next = min(next, wishPoll) }()
	}
	if a.cfg.Idle == 0 {
		return false, time.Hour
	}
	if a.machines.followers() > 0 { // they stop by themselves
		a.used = now
		return false, min(a.cfg.Idle, followersPoll)
	}
	if left := a.used.Add(a.cfg.Idle).Sub(now); left > 0 {
		return false, left
	}
	a.stopping = fmt.Sprintf("it was idle for %v", a.cfg.Idle)
	a.log.Info("agent stops", "why", a.stopping)
	return true, 0
}

// begin counts a request; the caller calls answered with the reply.
func (a *Agent) begin() (answered func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.requests++
	return func() {
		a.mu.Lock()
		a.requests--
		a.used = time.Now()
		a.mu.Unlock()
		a.move()
	}
}
