package worker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/planner/plan"
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

	drain   chan drain // once
	idle    chan struct{}
	written chan error
	writing int
	permits chan struct{}

	mu     sync.Mutex
	states map[string]client.WaitReply // of each save of the attempt
	moved  chan struct{}               // closed when states changed
	err    error                       // why the saver stopped
}

// drain asks a saver to finish what was sealed at the sequence upTo of the log
// and to abort the rest.
type drain struct {
	reason string
	upTo   uint64
}

// newSaver makes the shell of a coordinator that writes from slots.
func newSaver(l *lane, store Store, coord *planner.Coordinator, log *slog.Logger, slots *staging) *saver {
	return &saver{
		lane: l, store: store, log: log, now: l.now, coord: coord, slots: slots,
		drain: make(chan drain, 1), idle: make(chan struct{}), written: make(chan error, 1),
		permits: make(chan struct{}, defaultWorkers()),
		states:  map[string]client.WaitReply{}, moved: make(chan struct{}),
	}
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
	case *events.CheckpointBegun:
		s.move(b.Checkpoint, client.WaitReply{State: client.Begun})
	case *events.CheckpointStaged:
		s.move(b.Checkpoint, client.WaitReply{State: client.Staged})
	case *events.CheckpointCommitted:
		s.log.Info("checkpoint committed", "checkpoint", b.Checkpoint, "bytes", b.Bytes)
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

func (s *saver) move(id string, state client.WaitReply) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if order(s.states[id].State) >= order(client.Committed) {
		return
	}
	s.states[id] = state
	close(s.moved)
	s.moved = make(chan struct{})
}

// state is what the log says of a checkpoint so far.
func (s *saver) state(id string) client.WaitReply {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.states[id]
}

func order(state string) int {
	return slices.Index([]string{"", client.Begun, client.Staged, client.Committed, client.Aborted}, state)
}

// wait blocks until a checkpoint has reached a state or was aborted.
func (s *saver) wait(ctx context.Context, id, state string) (client.WaitReply, error) {
	for {
		s.mu.Lock()
		now, moved, err := s.states[id], s.moved, s.err
		s.mu.Unlock()
		if order(now.State) >= order(state) {
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

func (s *saver) execute(ctx context.Context, c planner.Command) error {
	switch c := c.(type) {
	case planner.Decide:
		_, err := s.lane.decide(ctx, c.Body)
		if errors.Is(err, errEnded) {
			return nil // the log says how, and comes by here
		}
		return err
	case planner.Publish:
		return s.publish(ctx, c.Body)
	case planner.Write:
		s.writing++
		go func() { s.written <- s.write(ctx, c) }()
		return nil
	case planner.Commit:
		return s.commit(ctx, c)
	}
	return fmt.Errorf("unknown command %T", c)
}

func (s *saver) publish(ctx context.Context, body events.Body) error {
	if g, ok := body.(*events.GlobalPlan); ok {
		layout, err := plan.DecodeLayout(g.Layout.Inline)
		if err != nil {
			return err
		}
		w := s.store.Data.Writer(s.ref(g.Checkpoint))
		if layout, err = w.PrepareGlobalPlan(ctx, layout); err != nil {
			return s.abort(ctx, plan.Manifest{Attempt: g.Attempt, Checkpoint: g.Checkpoint}, err)
		}
		b, err := s.store.Blobs.Put(ctx, plan.EncodeLayout(layout))
		if err != nil {
			return err
		}
		g.Layout = b
	}
	return s.lane.say(ctx, body)
}

func (s *saver) ref(checkpoint string) storage.Ref {
	return storage.Ref{
		Run: events.EncodeName(s.lane.run), Trial: events.EncodeName(s.lane.trial), Checkpoint: events.EncodeName(checkpoint),
	}
}

// write makes one rank's sealed bytes durable and says so. A failure to
// write is a fact too; only a failure to say it stops the saver.
func (s *saver) write(ctx context.Context, c planner.Write) error {
	s.permits <- struct{}{}
	defer func() { <-s.permits }()
	attempt := s.lane.attempt
	w, err := s.writeData(ctx, c)
	if err != nil && ctx.Err() != nil {
		return nil // the attempt is over, not the disk
	}
	if s.state(c.Checkpoint).State == client.Aborted {
		s.sweep(ctx, c.Checkpoint) // these files may have come after the first sweep
		return nil
	}
	if err != nil {
		s.log.Error("write failed", "checkpoint", c.Checkpoint, "rank", c.Rank, "error", err)
		return s.lane.say(ctx, &events.WriteFailed{Attempt: attempt, Checkpoint: c.Checkpoint, Rank: c.Rank, Error: err.Error()})
	}
	done := &events.WriteCompleted{
		Attempt: attempt, Checkpoint: c.Checkpoint, Rank: c.Rank,
		IndexDigest: w.Index.String(), BytesWritten: w.BytesWritten,
	}
	for _, f := range w.Files {
		done.Files = append(done.Files, events.File{Name: f.Name, Size: f.Size})
	}
	return s.lane.say(ctx, done)
}

func (s *saver) writeData(ctx context.Context, c planner.Write) (storage.Written, error) {
	src, release, err := s.slots.open(c.Checkpoint, c.Rank, c.Items)
	if err != nil {
		return storage.Written{}, err
	}
	defer release()
	w := s.store.Data.Writer(s.ref(c.Checkpoint))
	if err := w.SetUp(ctx, c.Rank == 0); err != nil {
		return storage.Written{}, err
	}
	return w.WriteData(ctx, c.Rank, c.Items, src)
}

// commit is the crash law of a save: manifest, decision, receipt.
func (s *saver) commit(ctx context.Context, c planner.Commit) error {
	id := c.Manifest.Checkpoint
	w := s.store.Data.Writer(s.ref(id))
	_, err := w.Finish(ctx, c.Manifest, func(ctx context.Context, manifest plan.Digest) (storage.Decision, error) {
		r, err := s.lane.decide(ctx, &events.CheckpointCommitted{
			Attempt: c.Manifest.Attempt, Checkpoint: id, Manifest: manifest.String(), Bytes: c.Bytes,
		})
		return storage.Decision{Sequence: r.Sequence, Event: r.ID, Time: r.Time}, err
	})
	var unrecorded *storage.UnrecordedError
	switch {
	case errors.Is(err, errEnded):
		return nil // the log says how, and comes by here
	case errors.As(err, &unrecorded):
		s.log.Warn("the receipt is missing; it is written when the store is next opened", "checkpoint", id, "error", err)
		return nil
	case errors.Is(err, ErrFenced):
		return err
	case err != nil:
		// The files are not as their writers said: the save has failed, the
		// training has not.
		return s.abort(ctx, c.Manifest, err)
	}
	return nil
}

func (s *saver) abort(ctx context.Context, m plan.Manifest, cause error) error {
	s.log.Error("commit failed", "checkpoint", m.Checkpoint, "error", cause)
	_, err := s.lane.decide(ctx, &events.CheckpointAborted{
		Attempt: m.Attempt, Checkpoint: m.Checkpoint, Reason: "commit: " + cause.Error(),
	})
	if errors.Is(err, errEnded) {
		return nil
	}
	return err
}

// sweep removes what an aborted save has left. A failure costs disk space,
// not correctness: without a receipt nobody reads it.
func (s *saver) sweep(ctx context.Context, checkpoint string) {
	if err := s.store.Data.Remove(ctx, s.ref(checkpoint)); err != nil {
		s.log.Warn("leftovers of an aborted save stay on disk", "checkpoint", checkpoint, "error", err)
	}
}
