package session

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/redact"
	"github.com/ckptstore/ckptstore/internal/session/outbox"
	"github.com/ckptstore/ckptstore/internal/session/retry"
)

// decideTimeout is how long a responsive log takes for a decision.
const decideTimeout = 60 * time.Second

// ErrFenced reports that a newer attempt of the trial has taken over; this
// attempt must not decide anything further.
var ErrFenced = problem.New(problem.Conflict, "fenced by a newer attempt")

// errEnded reports that another process has committed or aborted the checkpoint.
var errEnded = errors.New("the checkpoint has already ended")

// eventWriter mints events and appends facts. It is separate from decisionLog
// because any goroutine may append facts, unconditionally.
type eventWriter struct {
	log    Log
	calls  *retry.Calls // waits for room in the log; nil: appends do not wait
	run    string
	trial  string
	source string
	node   events.Actor
	now    func() time.Time
	newID  func() string
	names  redact.Names         // of secrets, which stay out of the log
	heard  atomic.Pointer[feed] // gets the facts that were appended; nil: the log is read
}

// newEventWriter returns a writer that appends as the job on its node.
func newEventWriter(cfg Config, log Log) *eventWriter {
	return &eventWriter{
		log: log, run: cfg.Run, trial: cfg.Trial, source: "trainer/" + cfg.Job,
		node: events.Node(cfg.Node), now: cfg.Now, newID: cfg.NewID, names: cfg.Redact,
	}
}

func (s *eventWriter) stamp() events.Stamp {
	return events.Stamp{ID: s.newID(), Source: s.source, Time: s.now()}
}

// record durably appends facts about the trial, as this node. It waits for room on
// the disk.
func (s *eventWriter) record(ctx context.Context, bodies ...events.Body) error {
	return s.recordAs(ctx, s.trial, s.node, bodies...)
}

func (s *eventWriter) recordAs(ctx context.Context, trial string, actor events.Actor, bodies ...events.Body) error {
	facts, err := s.facts(trial, actor, bodies)
	if err != nil {
		return err
	}
	return s.append(ctx, facts...)
}

// recordNow is recordAs without waiting for room.
func (s *eventWriter) recordNow(ctx context.Context, trial string, actor events.Actor, bodies ...events.Body) error {
	facts, err := s.facts(trial, actor, bodies)
	if err == nil {
		err = s.put(ctx, facts)
	}
	return err
}

func (s *eventWriter) put(ctx context.Context, facts []events.Fact) error {
	sequences, err := s.log.Append(ctx, facts...)
	if f := s.heard.Load(); f != nil && err == nil {
		f.appended(facts, sequences)
	}
	return err
}

// measured appends metrics. It does not wait for room; reports do that.
func (s *eventWriter) measured(ctx context.Context, bodies ...events.Body) error {
	return s.recordNow(ctx, s.trial, s.node, bodies...)
}

// append appends facts and waits for room.
func (s *eventWriter) append(ctx context.Context, facts ...events.Fact) error {
	return s.calls.UntilRoom(ctx, func() error { return s.put(ctx, facts) })
}

func (s *eventWriter) facts(trial string, actor events.Actor, bodies []events.Body) ([]events.Fact, error) {
	facts := make([]events.Fact, len(bodies))
	for i, b := range bodies {
		f, err := s.fact(trial, actor, b)
		if err != nil {
			return nil, err
		}
		facts[i] = f
	}
	return facts, nil
}

// fact mints a fact, for callers that append facts of several actors at once.
func (s *eventWriter) fact(trial string, actor events.Actor, body events.Body) (events.Fact, error) {
	return events.NewFact(s.stamp(), events.Scope{Run: s.run, Trial: trial, Actor: actor}, recorded(s.names, body))
}

// join returns what joins the facts of this node's ranks.
func (s *eventWriter) join(ctx context.Context, local []int) *outbox.Joining {
	return outbox.Join(ctx, outbox.Config{
		Local: local, Node: s.node, Append: s.append,
		Fact: func(actor events.Actor, body events.Body) (events.Fact, error) { return s.fact(s.trial, actor, body) },
	})
}

// decisionLog appends the decisions of one trial one at a time, each conditional
// on the last decision that this process has seen.
type decisionLog struct {
	*eventWriter
	agg      events.Aggregate
	conflict func(error) bool
	attempt  int              // decisions are made for this attempt; 0 before the first
	noted    func(seq uint64) // receives each decision's sequence; may be nil

	mu    sync.Mutex
	last  uint64          // sequence of the last decision seen
	took  string          // ID of the decision by which this process coordinates a living group
	term  string          // ID of the newest decision by which this process coordinates a group
	ended map[string]bool // checkpoints that ended, in this process or another
}

// decide appends a decision and returns it with its sequence. If another decision
// came first, decide reads it: a newer attempt is [ErrFenced], the end of the
// same checkpoint is errEnded, and after any other decision it retries. It waits
// for a log that does not answer: see [retry.Calls].
func (l *decisionLog) decide(ctx context.Context, body events.Body) (events.Recorded, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	d, err := events.NewDecision(l.stamp(), l.agg, recorded(l.names, body))
	if err != nil {
		return events.Recorded{}, err
	}
	if _, ok := body.(*events.GroupCoordinator); ok {
		l.took = d.ID
	}
	for unseen := 0; ; {
		if id := about(body); l.ended[id] {
			return events.Recorded{}, fmt.Errorf("decide %s: %s: %w", body.Kind(), id, errEnded)
		}
		seq, err := l.log.Decide(ctx, d, l.last)
		if err == nil {
			l.saw(seq, body)
			switch body.(type) {
			case *events.GroupStarted, *events.GroupCoordinator:
				l.term = d.ID
			}
			return events.Recorded{Event: d.Event, Sequence: seq}, nil
		}
		if !l.conflict(err) {
			return events.Recorded{}, fmt.Errorf("decide %s: %w", body.Kind(), err)
		}
		before := l.last
		if err := l.reread(ctx); err != nil {
			return events.Recorded{}, fmt.Errorf("decide %s: %w", body.Kind(), err)
		}
		if l.last > before {
			unseen = 0
			continue
		}
		// The lane's end differs from the last decision that this process has
		// read.
		if unseen++; unseen > maxUnseen {
			return events.Recorded{}, fmt.Errorf("decide %s: the decision that came first cannot be read: %w: read the whole log with `ckptstore verify --log`", body.Kind(), err)
		}
		select {
		case <-ctx.Done():
			return events.Recorded{}, fmt.Errorf("decide %s: %w", body.Kind(), context.Cause(ctx))
		case <-time.After(unseenPause):
		}
	}
}

// Limit and pause of the retries that look for a decision that came first.
const (
	maxUnseen   = 10
	unseenPause = 50 * time.Millisecond
)

// saw records a decision of the lane.
func (l *decisionLog) saw(seq uint64, body events.Body) {
	l.last = seq
	if l.noted != nil {
		l.noted(seq)
	}
	if id := ends(body); id != "" {
		if l.ended == nil {
			l.ended = map[string]bool{}
		}
		l.ended[id] = true
	}
}

// reread reads the decisions of other processes. The end is that of the trial, which the log's leader knows: a copy of
// the log that was cut off may tell for a while that the log ends earlier.
func (l *decisionLog) reread(ctx context.Context) error {
	end, err := l.log.LastOf(ctx, l.agg)
	if err != nil || end == 0 {
		return err
	}
	for r, err := range l.log.ReadLane(ctx, l.agg, l.last+1, end) {
		if err != nil {
			return err
		}
		body, err := r.Body()
		if err != nil {
			return err
		}
		// No other job may use this attempt's number.
		if g, ok := body.(*events.GroupStarted); ok && g.Attempt >= l.attempt && r.Source != l.source {
			return fmt.Errorf("attempt %d: %w (attempt %d of job %s)", l.attempt, ErrFenced, g.Attempt, g.Job)
		}
		// Another process coordinates, this attempt or a later one.
		if c, ok := body.(*events.GroupCoordinator); ok && r.ID != l.took {
			return fmt.Errorf("attempt %d: %w: node %d on %s coordinates now", l.attempt, ErrOvertaken, c.Node, c.Host)
		}
		l.saw(r.Sequence, body)
	}
	return nil
}

// ErrOvertaken reports that another process coordinates the living group: see
// [events.GroupCoordinator]. It is an [ErrFenced].
var ErrOvertaken = fmt.Errorf("%w: another coordinator has taken over", ErrFenced)

// overtaken reads the lane, and returns an [ErrFenced] if another process may decide in place of
// this one.
func (l *decisionLog) overtaken(ctx context.Context) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.reread(ctx)
}

// ends returns the ID of the checkpoint that a decision ends, or "".
func ends(b events.Body) string {
	switch b := b.(type) {
	case *events.CheckpointCommitted:
		return b.Checkpoint
	case *events.CheckpointAborted:
		return b.Checkpoint
	}
	return ""
}

// about returns the ID of the checkpoint that a coordinator's decision concerns.
func about(b events.Body) string {
	switch b := b.(type) {
	case *events.CheckpointBegun:
		return b.Checkpoint
	case *events.CheckpointStaged:
		return b.Checkpoint
	}
	return ends(b)
}
