package session

import (
	"context"
	"sync"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/planner"
)

// Forwarder passes to the processes of a group's other nodes what they must know of its
// saves. The methods must not block; each process gets what was passed in the same order.
type Forwarder interface {
	// Event passes on an event of the log: see [Group.Heard].
	Event(Forwarded)
	// Ask asks for the plan of a rank: see [Group.Asked].
	Ask(checkpoint string, rank int)
}

// Forwarded is an event of the log, as the coordinating process forwards it.
type Forwarded struct {
	Attempt  int            `json:"attempt"`
	Sequence uint64         `json:"sequence"`
	Event    events.Message `json:"event"`
}

// forwarded has the kinds of events that concern the ranks of all nodes.
var forwarded = map[events.Kind]bool{
	(events.GlobalPlan{}).Kind():          true,
	(events.CheckpointBegun{}).Kind():     true,
	(events.CheckpointStaged{}).Kind():    true,
	(events.CheckpointCommitted{}).Kind(): true,
	(events.CheckpointAborted{}).Kind():   true,
}

// feed is what the saver of a node that does not coordinate reads in place of the log: the
// events that the coordinating process forwards, and the facts that this process has
// appended. If every process read the whole trial, a save would cost the square of the
// number of nodes.
type feed struct {
	trial string

	mu    sync.Mutex
	queue []fed
	ended bool          // it is not read any more
	came  chan struct{} // has a value if the queue has
}

// fed is an event, a question about the plan of a rank, an order to write replicas, or a mark.
type fed struct {
	event  events.Recorded
	ask    *planner.Ask
	adopt  *adoption
	folded chan struct{} // closed once all that was put before is folded
}

func newFeed(trial string) *feed { return &feed{trial: trial, came: make(chan struct{}, 1)} }

func (f *feed) put(of fed) {
	f.mu.Lock()
	if !f.ended {
		f.queue = append(f.queue, of)
	}
	f.mu.Unlock()
	select {
	case f.came <- struct{}{}:
	default:
	}
}

// appended puts facts that the log has taken.
func (f *feed) appended(facts []events.Fact, sequences []uint64) {
	for i, fact := range facts {
		switch fact.Kind.Family() {
		case "plan", "seal", "write":
			if fact.Scope.Trial == f.trial {
				f.put(fed{event: events.Recorded{Event: fact.Event, Sequence: sequences[i]}})
			}
		}
	}
}

// end drops what comes from now on.
func (f *feed) end() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.queue, f.ended = nil, true
}

// next waits for what was put.
func (f *feed) next(ctx context.Context) ([]fed, error) {
	select {
	case <-f.came:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	of := f.queue
	f.queue = nil
	return of, nil
}

// Heard takes an event that the coordinating process has forwarded.
func (g *Group) Heard(of Forwarded) error {
	if last := g.heard.Load(); of.Sequence <= last && last > 0 {
		return nil // an earlier coordinator has forwarded it
	}
	g.heard.Store(of.Sequence)
	e, err := events.Decode(of.Event)
	if err == nil {
		g.saver.feed.put(fed{event: events.Recorded{Event: e, Sequence: of.Sequence}})
	}
	return err
}

// LastHeard returns the sequence of the last event that the coordinating process has forwarded.
func (g *Group) LastHeard() uint64 { return g.heard.Load() }

// Fold waits until all that the coordinating process has forwarded so far is folded, the
// saves have ended, or ctx has.
func (g *Group) Fold(ctx context.Context) {
	mark := make(chan struct{})
	g.saver.feed.put(fed{folded: mark})
	select {
	case <-mark:
	case <-g.saver.idle:
	case <-ctx.Done():
	}
}

// Asked takes a question of the coordinating process, which does not know the plan of a
// local rank by its fingerprint: the plan is appended in full.
func (g *Group) Asked(checkpoint string, rank int) {
	g.saver.feed.put(fed{ask: &planner.Ask{Checkpoint: checkpoint, Rank: rank}})
}
