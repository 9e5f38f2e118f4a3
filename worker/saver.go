package worker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/storage"
	"github.com/ckptstore/ckptstore/worker/client"
)

// saver is the coordinator's shell: it feeds the log to the state machine and
// executes its commands. Decisions and facts are appended one after the
// other; ranks are written in parallel.
type saver struct {
	lane  *lane
	store Store
	log   *slog.Logger
	now   func() time.Time
	coord *planner.Coordinator // owned by the goroutine of run
	slots *staging
	// put writes the bytes of one rank, out of the slots unless it is set.
	put func(context.Context, planner.Write) (storage.Written, error)
	// kept is told of each commit, before anybody who waits for it.
	kept func()

	resume   string // what the attempt was resumed from: a reference or a path
	from     string // path of the checkpoint that is imported
	together bool   // all ranks of a save are written here
	reuse    bases

	drain   chan drain // once
	idle    chan struct{}
	written chan error
	writing int
	permits chan struct{}

	mu      sync.Mutex
	states  map[string]client.WaitReply    // of each save of the attempt
	moved   chan struct{}                  // closed when something below or states changed
	part    map[rankSave]bool              // ranks whose plan has come by
	refused map[rankSave]string            // why a rank has no part in a save
	plans   map[rankSave]*events.LocalPlan // in full, of the saves that are open
	newest  string                         // save that was begun last
	uses    map[string]*storage.Uses       // of the saves that are open, by ID
	err     error                          // why the saver stopped
}

// rankSave is one rank's part in a save.
type rankSave struct {
	checkpoint string
	rank       int
}

// drain asks a saver to finish what was sealed at the sequence upTo of the log
// and to abort the rest.
type drain struct {
	reason string
	upTo   uint64
}

// newSaver makes the shell of a coordinator that writes from slots.
func newSaver(l *lane, store Store, coord *planner.Coordinator, log *slog.Logger, slots *staging) *saver {
	s := &saver{
		lane: l, store: store, log: log, now: l.now, coord: coord, slots: slots,
		drain: make(chan drain, 1), idle: make(chan struct{}), written: make(chan error, 1),
		permits: make(chan struct{}, defaultWorkers()),
		states:  map[string]client.WaitReply{}, moved: make(chan struct{}), part: map[rankSave]bool{}, refused: map[rankSave]string{}, plans: map[rankSave]*events.LocalPlan{},
		uses: map[string]*storage.Uses{},
	}
	s.put, s.kept = s.writeData, func() {}
	return s
}

// run follows the log from a sequence until ctx ends, the attempt is fenced,
// or, after a drain, nothing is open any more. Nothing is decided before the
// event at known has been folded: a coordinator that takes over must know
// what the dead one had done.
func (s *saver) run(ctx context.Context, from, known uint64) error {
	err := s.follow(ctx, from, known)
	s.mu.Lock()
	s.err = cmpErr(err, errors.New("the trainer no longer takes saves"))
	close(s.moved)
	s.moved = nil
	s.mu.Unlock()
	close(s.idle)
	return err
}

func cmpErr(err, otherwise error) error {
	if err != nil {
		return err
	}
	return otherwise
}

func (s *saver) follow(ctx context.Context, from, known uint64) error {
	ctx, stop := context.WithCancel(ctx)
	tail, tailErr := s.tail(ctx, from)
	defer func() {
		stop()
		for range tail { // the reader ends with the context
		}
		for ; s.writing > 0; s.writing-- {
			if err := <-s.written; err != nil {
				s.log.Warn("a write ended with an error after the attempt", "error", err)
			}
		}
	}()
	timer := time.NewTimer(0)
	defer timer.Stop()
	var draining *drain // until the coordinator was told
	drained, seen := false, from-1
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case r, ok := <-tail:
			if !ok {
				return <-tailErr
			}
			if err := s.apply(ctx, r); err != nil {
				return err
			}
			seen = r.Sequence
		case err := <-s.written:
			s.writing--
			if err != nil {
				return err
			}
		case d := <-s.drain:
			draining = &d
		case <-timer.C:
		}
		if seen < known {
			continue
		}
		due, next := s.coord.Tick(s.now())
		for _, c := range due {
			if err := s.execute(ctx, c); err != nil {
				return err
			}
		}
		if n := s.coord.Fenced(); n > 0 {
			return fmt.Errorf("%w: attempt %d", ErrFenced, n)
		}
		if draining != nil && seen >= draining.upTo {
			// Not before: what the ranks had sealed by then must have begun.
			s.coord.Drain(draining.reason)
			draining, drained = nil, true
			timer.Reset(0)
			continue
		}
		if drained && s.writing == 0 && len(s.coord.Open()) == 0 {
			return nil
		}
		if !next.IsZero() {
			timer.Reset(max(0, next.Sub(s.now())))
		}
	}
}

// tail reads the log in the background, with the blobs that the coordinator
// looks into resolved.
func (s *saver) tail(ctx context.Context, from uint64) (<-chan events.Recorded, <-chan error) {
	out, failed := make(chan events.Recorded, 64), make(chan error, 1)
	go func() {
		defer close(out)
		for r, err := range s.store.Log.Read(ctx, from, 0) {
			if err == nil {
				r, err = resolveBlobs(ctx, s.store.Blobs, r)
			}
			if err != nil {
				failed <- err
				return
			}
			select {
			case out <- r:
			case <-ctx.Done():
				failed <- ctx.Err()
				return
			}
		}
		failed <- cmpErr(ctx.Err(), errors.New("the log ended"))
	}()
	return out, failed
}

// apply folds one event and tells those who wait for its checkpoint.
func (s *saver) apply(ctx context.Context, r events.Recorded) error {
	if err := s.coord.Apply(r); err != nil {
		return err
	}
	if r.Scope.Run != s.lane.run || r.Scope.Trial != s.lane.trial {
		return nil
	}
	body, err := r.Body()
	if err != nil {
		return err
	}
	switch b := body.(type) {
	case *events.LocalPlan:
		s.joined(b)
	case *events.GlobalPlan:
		s.disagree(b)
	case *events.CheckpointBegun:
		s.begin(b)
		s.share(b)
		s.move(b.Checkpoint, client.WaitReply{State: client.Begun})
	case *events.CheckpointStaged:
		s.move(b.Checkpoint, client.WaitReply{State: client.Staged})
	case *events.CheckpointCommitted:
		s.log.Info("checkpoint committed", "checkpoint", b.Checkpoint, "bytes", b.Bytes)
		s.kept()
		s.move(b.Checkpoint, client.WaitReply{State: client.Committed})
	case *events.CheckpointAborted:
		s.log.Warn("checkpoint aborted", "checkpoint", b.Checkpoint, "reason", b.Reason, "ranks", b.Ranks)
		reason := b.Reason
		if len(b.Ranks) > 0 {
			reason = fmt.Sprintf("%s (ranks %v)", b.Reason, b.Ranks)
		}
		// In this order: a rank that takes a slot too late sees the state, or
		// its slot is freed here.
		s.move(b.Checkpoint, client.WaitReply{State: client.Aborted, Reason: reason})
		s.slots.abort(b.Checkpoint)
		s.sweep(ctx, b.Checkpoint)
	}
	return nil
}

// begin notes which save of the attempt was begun last.
func (s *saver) begin(b *events.CheckpointBegun) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if b.Attempt == s.lane.attempt {
		s.newest = b.Checkpoint
	}
}

// begun is the save of the attempt that was begun last, empty if none was.
func (s *saver) begun() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.newest
}

// joined notes that the plan of a rank has come by. It refuses one for a save
// that has ended without it: the checkpoint that has that ID is not this
// rank's.
func (s *saver) joined(b *events.LocalPlan) {
	if b.Attempt != s.lane.attempt {
		return
	}
	who, now := rankSave{b.Checkpoint, b.Rank}, s.state(b.Checkpoint, b.Rank)
	late := order(now.State) >= order(client.Committed)
	s.mu.Lock()
	again := s.part[who]
	s.part[who] = true
	if late = late && !again; late {
		if now.State == client.Committed {
			now.Reason = fmt.Sprintf("rank %d came after it was committed by other ranks: ranks that save one name must all name the same participants", b.Rank)
		}
		s.refused[who] = now.Reason
	}
	close(s.moved)
	s.moved = make(chan struct{})
	s.mu.Unlock()
	if late {
		s.slots.abort(b.Checkpoint, b.Rank)
	}
}

// has reports whether the plan of a rank for a save has come by.
func (s *saver) has(id string, rank int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.part[rankSave{id, rank}]
}

// disagree warns of replicas that are none.
func (s *saver) disagree(b *events.GlobalPlan) {
	for _, d := range b.Disagreements {
		s.log.Warn("replicas differ between ranks; one rank's bytes are saved", "checkpoint", b.Checkpoint,
			"fqn", d.FQN, "offsets", d.Offsets, "sizes", d.Sizes, "saved", d.Kept, "differ", d.Ranks)
	}
	if b.MoreDisagreements > 0 {
		s.log.Warn("more replicas differ", "checkpoint", b.Checkpoint, "count", b.MoreDisagreements)
	}
}

func (s *saver) move(id string, state client.WaitReply) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if order(s.states[id].State) >= order(client.Committed) {
		return
	}
	s.states[id] = state
	if order(state.State) >= order(client.Committed) {
		maps.DeleteFunc(s.plans, func(p rankSave, _ *events.LocalPlan) bool { return p.checkpoint == id })
		if u := s.uses[id]; u != nil {
			u.Stop()
			delete(s.uses, id)
		}
	}
	close(s.moved)
	s.moved = make(chan struct{})
}

// state is what the log says of a rank's save so far.
func (s *saver) state(id string, rank int) client.WaitReply {
	s.mu.Lock()
	defer s.mu.Unlock()
	if why, ok := s.refused[rankSave{id, rank}]; ok {
		return client.WaitReply{State: client.Aborted, Reason: why}
	}
	return s.states[id]
}

func order(state string) int {
	return slices.Index([]string{"", client.Begun, client.Staged, client.Committed, client.Aborted}, state)
}

// wait blocks until a rank's save has reached a state or was aborted.
func (s *saver) wait(ctx context.Context, id string, rank int, state string) (client.WaitReply, error) {
	for {
		s.mu.Lock()
		moved, err := s.moved, s.err
		s.mu.Unlock()
		// Until the rank's own plan has come by, others may have committed a
		// checkpoint of that name in which it has no part.
		now, own := s.state(id, rank), s.has(id, rank)
		if own && order(now.State) >= order(state) || now.State == client.Aborted {
			return now, nil
		}
		if err != nil {
			return client.WaitReply{}, err
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return client.WaitReply{}, fmt.Errorf("wait for %s to be %s: %w", id, state, ctx.Err())
		}
	}
}
