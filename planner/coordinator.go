package planner

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
)

// Coordinator tracks all open saves of one attempt, as a state machine. [Coordinator.Apply]
// folds the log; [Coordinator.Tick] compares the state with the clock and returns the due
// commands. Commands follow from state, not from transitions: a coordinator that replays the
// log of a dead one takes over wherever that one stopped.
//
//	plan.local of the first rank           → decide checkpoint.begun
//	begun, an unknown fingerprint          → ask that rank
//	begun, all local plans in the log      → publish plan.global, or abort
//	plan.global, write.sealed of a rank    → write that rank
//	write.sealed of all                    → decide checkpoint.staged
//	staged, write.completed of all         → commit
//	plan.node, seal.node, write.node       → as such an event of each rank in them
//	write.failed (also before any plan),
//	a death before its seal,
//	a deadline, a drain                    → decide checkpoint.aborted
//
// The cost of an event and the Tick after it does not grow with the number of ranks. A save
// counts its missing seals and writes, and Tick looks only at saves that an event or the clock
// has changed. Only a few steps, such as the global plan and the commit, look at all ranks.
//
// Only the coordinating node executes decisions, and the log refuses those of a fenced
// attempt. Every other node of a job runs a coordinator of its part: see
// [CoordinatorConfig.Part].
type Coordinator struct {
	cfg      CoordinatorConfig
	saves    map[string]*save
	cache    *Cache
	decoder  checkpoint.LocalDecoder
	ended    map[string]bool                  // IDs that were committed or aborted
	adopted  map[string][]int                 // ranks of saves that were not open yet, by ID: see Adopt
	refused  map[string][]*events.WriteFailed // of saves without a plan so far
	exited   map[int]string                   // ranks whose process ended, and how
	exits    []int                            // ranks, in the order of their exits
	by       events.Actor                     // node that coordinates the group since the newest takeover; empty: there was none
	prints   *prints                          // of the last full plan
	nodeSets map[int][]nodeSet                // by their first rank: the last listed, the newest last
	draining string                           // reason, if no new save may begin
	lost     bool                             // staged bytes are gone: only complete saves can be finished,
	kept     []string                         // and these, whose bytes are not gone
	fenced   int                              // the newer attempt that ended this one

	layouts []Shared // of the last global plans, the newest last, if this is one of a part

	changed []*save // saves that the next Tick looks at
	waiting []*save // saves with a deadline, the earliest first
}

// CoordinatorConfig identifies the attempt whose saves a coordinator coordinates, and its
// policies.
type CoordinatorConfig struct {
	Store     string // identity, written into manifests
	Run       string
	Trial     string
	Attempt   int
	WorldSize int
	// Timeout is the time that a save may stay open, counted from the first Tick that sees
	// it. A save in which a rank never takes part ends here.
	Timeout time.Duration
	// Strict aborts a save in which replicas disagree, instead of storing the lowest rank's.
	Strict bool
	// Part is for a node that does not coordinate. Of the facts it folds only those of its
	// own ranks and the global plans, in any order, besides the decisions. It requests the
	// writes of these ranks, and the abort of a save whose global plan cannot be read. The
	// coordinating node judges all else.
	Part bool
}

// Command is an action that a coordinator requests: [Decide], [Publish], [Write], [Commit] or
// [Ask].
type Command interface{ command() }

// Ask requests a rank's plan.local of a checkpoint again, in full: the fingerprint that the
// rank sent is unknown.
type Ask struct {
	Checkpoint string
	Rank       int
}

// Decide requests that a decision is appended to the trial's lane.
type Decide struct{ Body events.Body }

// Publish requests that a fact of the coordinating node is appended.
type Publish struct{ Body events.Body }

// Write requests that the node of a rank writes that rank's sealed bytes.
type Write struct {
	Checkpoint string
	Rank       int
	Items      []checkpoint.Item
}

// Commit requests to make the manifest durable, to append checkpoint.committed with its
// digest, and to write the receipt, in that order.
type Commit struct {
	Manifest checkpoint.Manifest
	Bytes    int64
}

func (Decide) command()  {}
func (Publish) command() {}
func (Write) command()   {}
func (Commit) command()  {}
func (Ask) command()     {}

// NewCoordinator returns a coordinator without open saves. The caller feeds it the log from
// the attempt's group.started on.
func NewCoordinator(cfg CoordinatorConfig) *Coordinator {
	return &Coordinator{cfg: cfg, saves: map[string]*save{}, cache: newCache(cachedSets), ended: map[string]bool{}, adopted: map[string][]int{}, refused: map[string][]*events.WriteFailed{}, exited: map[int]string{}, nodeSets: map[int][]nodeSet{}}
}

// Fenced returns the number of the newer attempt that took over, or 0.
func (c *Coordinator) Fenced() int { return c.fenced }

// Open lists the IDs of the open saves, oldest first.
func (c *Coordinator) Open() []string {
	var ids []string
	for _, s := range c.ordered() {
		ids = append(ids, s.id)
	}
	return ids
}

// Drain forbids new saves and aborts every open save that is not sealed by all its
// participants; the sealed saves will be finished.
func (c *Coordinator) Drain(reason string) {
	c.draining = reason
	c.changeAll()
}

// Abandon is [Coordinator.Drain] for a coordinator that takes over from a dead one. Staged
// bytes are lost too, so only a save whose files are all written is committed. For the saves
// whose IDs are in kept, the staged bytes of all participants still exist: these saves are
// written and committed.
func (c *Coordinator) Abandon(reason string, kept ...string) {
	c.draining, c.lost, c.kept = reason, true, kept
	c.changeAll()
}

// change returns the open save with an ID, or nil, and makes the next Tick look at it.
func (c *Coordinator) change(id string) *save {
	s := c.saves[id]
	if s != nil && !s.changed {
		s.changed = true
		c.changed = append(c.changed, s)
	}
	return s
}

func (c *Coordinator) changeAll() {
	for id := range c.saves {
		c.change(id)
	}
}

// Tick returns the commands that are due at now, each exactly once, and the time at which
// Tick must be called again if no event comes before. That time is zero if no open save waits
// for the clock.
func (c *Coordinator) Tick(now time.Time) (due []Command, next time.Time) {
	if c.fenced > 0 {
		return nil, time.Time{}
	}
	for len(c.waiting) > 0 && !now.Before(c.waiting[0].deadline) {
		c.change(c.waiting[0].id)
		c.awaited()
	}
	changed := c.changed
	c.changed = nil
	slices.SortFunc(changed, bySequence)
	for _, s := range changed {
		s.changed = false
		switch {
		case s.over:
			continue
		case c.cfg.Part:
			if s.unreadable != "" && s.ask("abort") {
				due = append(due, Decide{&events.CheckpointAborted{Attempt: c.cfg.Attempt, Checkpoint: s.id, Reason: s.unreadable}})
			}
			due = append(due, s.ranksToWrite()...)
			continue
		case c.draining != "" && !s.begun && !s.asked["begin"]:
			c.end(s.id) // no other process knows of it: there is nothing to abort
			continue
		case s.asked["commit"]:
			continue // the log decides now: neither the clock nor a late fact may end the save otherwise
		}
		if s.deadline.IsZero() {
			s.deadline = now.Add(c.cfg.Timeout)
			c.wait(s)
		}
		c.judge(s, now)
		due = append(due, c.commands(s)...)
	}
	return due, c.next(now)
}

func (c *Coordinator) ordered() []*save { return slices.SortedFunc(maps.Values(c.saves), bySequence) }

func bySequence(a, b *save) int { return cmp.Compare(a.seq, b.seq) }

// ask reports whether a command is issued for the first time.
func (s *save) ask(what string) bool {
	first := !s.asked[what]
	s.asked[what] = true
	return first
}

// commands returns the commands that the state of s requires and that were not issued yet.
func (c *Coordinator) commands(s *save) (due []Command) {
	if !s.begun {
		// An abort needs a begun before it, so that the log has the whole history.
		if s.ask("begin") {
			due = append(due, Decide{&events.CheckpointBegun{
				Attempt: c.cfg.Attempt, Checkpoint: s.id, Name: s.name, Step: s.step,
				WorldSize: c.cfg.WorldSize, Participants: s.participants.listed(c.cfg.WorldSize),
			}})
		}
		return due
	}
	if s.shared == nil && s.failure == nil && len(s.offers) == s.participants.n && s.ask("global") {
		due = append(due, c.global(s)...)
	}
	if s.failure != nil {
		if s.ask("abort") {
			s.failure.Attempt = c.cfg.Attempt
			due = append(due, Decide{s.failure})
		}
		return due
	}
	due = append(due, c.ask(s)...)
	due = append(due, s.ranksToWrite()...)
	if len(s.sealed) == s.participants.n && !s.staged && s.ask("stage") {
		due = append(due, Decide{&events.CheckpointStaged{Attempt: c.cfg.Attempt, Checkpoint: s.id}})
	}
	if s.staged && s.complete() && s.ask("commit") {
		due = append(due, Commit{Manifest: c.manifest(s), Bytes: s.shared.Layout.Bytes()})
	}
	return due
}

// ranksToWrite requests the writes of the ranks that have sealed since the last time.
func (s *save) ranksToWrite() (due []Command) {
	if s.shared == nil || s.failure != nil {
		return nil
	}
	for _, rank := range s.participants.ordered(s.ready) {
		if _, done := s.writes[rank]; !done && !s.written[rank] {
			s.written[rank] = true
			due = append(due, Write{Checkpoint: s.id, Rank: rank, Items: s.shared.Shares.Items(rank)})
		}
	}
	s.ready = nil
	return due
}

// manifest returns the manifest, a pure function of the log up to the last write.
func (c *Coordinator) manifest(s *save) checkpoint.Manifest {
	m := checkpoint.Manifest{
		Store: c.cfg.Store, Run: c.cfg.Run, Trial: c.cfg.Trial, Checkpoint: s.id, Name: s.name,
		Step: s.step, Attempt: c.cfg.Attempt, WorldSize: c.cfg.WorldSize, Layout: s.shared.Layout,
	}
	for _, rank := range s.participants.all() {
		m.Ranks = append(m.Ranks, checkpoint.RankIndex{Rank: rank, Index: s.writes[rank]})
	}
	return m
}
