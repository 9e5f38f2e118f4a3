package session

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/data/reuse"
	"github.com/ckptstore/ckptstore/internal/session/heirs"
	"github.com/ckptstore/ckptstore/internal/session/outbox"
	"github.com/ckptstore/ckptstore/internal/session/replica"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/internal/stragglers"
	"github.com/ckptstore/ckptstore/planner"
)

// saver is the coordinator's shell: it feeds the log to the state machine and
// executes its commands. Decisions and facts are appended one after the other;
// ranks are written in parallel.
type saver struct {
	decisions *decisionLog
	store     Store
	log       *slog.Logger
	now       func() time.Time     // stands still while the log does not answer
	coord     *planner.Coordinator // owned by the goroutine of run
	slots     *staging.Slots
	// put writes the bytes of one rank, by default from the slots.
	put    func(context.Context, planner.Write) (data.Written, error)
	alone  bool                    // no other process writes the files of the attempt
	wholes map[string]*data.Sealed // by ID, of saves whose bytes are in files
	// kept is called after each commit, before the waiting workers are answered.
	kept func()
	// costs is called with the size in bytes of each committed checkpoint.
	costs func(bytes int64)

	resume   string // reference or path that the attempt resumed from
	from     string // path of the checkpoint that is imported
	together bool   // the ranks of a save that this process writes decide together what they reuse
	local    []int  // ranks that this process writes; nil: all
	peer     Peer   // decides in place of this process; nil: this process decides
	// settled removes the files of an aborted save once no node writes them; nil: at
	// once.
	settled func(checkpoint string, sweep func())
	over    func(error) // told why the saves have ended, before ranks that wait: they may fail of it
	reuse   bases
	uploads uploads
	joined  *outbox.Joining // appends facts of local ranks; nil: they are appended one by one
	forward Forwarder
	feed    *feed // read in place of the log; nil: the log is read
	// replayed is the last event that an earlier coordinator of the living group has seen, and heard the
	// last event that all nodes have got from it; 0: there was none.
	replayed, heard uint64

	replicas *Replicas           // nil: no node keeps copies of slots
	held     *replica.Held       // replicas that this process writes
	heirs    *heirs.Finder       // nil, but in the coordinating process, if nodes keep copies
	place    int                 // of this node in the attempt
	losses   *inbox[loss]        // of nodes whose slots were copied
	replies  *inbox[placedReply] // to orders to write parts of lost nodes
	slow     *stragglers.Watch   // nil: the nodes are not compared

	drain   chan drain // once
	idle    chan struct{}
	written chan error
	writing int
	permits chan struct{}

	mu        sync.Mutex
	states    map[string]client.WaitReply    // of each save of the attempt
	moved     chan struct{}                  // closed when states or a field below changed
	part      map[string]map[int]bool        // ranks whose plan has been read, by ID; of saves that have ended only the local ones
	waits     map[rankSave]int               // callers that wait
	refused   map[rankSave]string            // why a rank has no part in a save
	lostRanks map[int]error                  // why the memory of ranks is lost
	plans     map[rankSave]*events.LocalPlan // in full, of open saves
	newest    string                         // newest save, by the first mention by any rank
	noRoom    map[string]bool                // saves that end, or ended, because the disk is full
	known     map[string]bool                // saves that were newest and have not ended
	uses      map[string]*reuse.Uses         // of open saves, by ID
	flying    map[string]int                 // writes of a save that have not ended, by ID
	underWay  map[string]openWrites          // contexts of open saves that are being written, by ID
	err       error                          // why the saver stopped

	fenced atomic.Bool // this process writes no more: another node may write in its place
}

// rankSave is one rank's part in a save.
type rankSave struct {
	checkpoint string
	rank       int
}

// drain asks a saver to finish the saves that were sealed when upTo was the
// trial's last event, and to abort the rest.
type drain struct {
	reason string
	upTo   uint64
}

// newSaver returns the shell of a coordinator that writes from slots.
func newSaver(l *decisionLog, store Store, coord *planner.Coordinator, log *slog.Logger, slots *staging.Slots) *saver {
	s := &saver{
		decisions: l, store: store, log: log, coord: coord, slots: slots,
		now:    func() time.Time { return l.now().Add(-store.calls.Silence()) },
		losses: newInbox[loss](), replies: newInbox[placedReply](), drain: make(chan drain, 1), idle: make(chan struct{}), written: make(chan error, 1),
		permits: make(chan struct{}, defaultWorkers()),
		states:  map[string]client.WaitReply{}, moved: make(chan struct{}), part: map[string]map[int]bool{}, waits: map[rankSave]int{}, refused: map[rankSave]string{}, lostRanks: map[int]error{}, plans: map[rankSave]*events.LocalPlan{},
		uses: map[string]*reuse.Uses{}, known: map[string]bool{}, noRoom: map[string]bool{}, flying: map[string]int{}, underWay: map[string]openWrites{},
	}
	s.put, s.kept, s.costs, s.over = s.writeData, func() {}, func(int64) {}, func(error) {}
	return s
}

// onCommit sets the functions that are called for each commit; nil leaves them.
func (s *saver) onCommit(kept func(), costs func(bytes int64)) {
	if kept != nil {
		s.kept = kept
	}
	if costs != nil {
		s.costs = costs
	}
}

// run follows the log from a sequence until ctx ends, the attempt is fenced, or,
// after a drain, no save is open. It decides nothing before it has folded the
// event at known: a coordinator that takes over must know what the dead one did.
func (s *saver) run(ctx context.Context, from, known uint64) error {
	err := s.follow(ctx, from, known)
	if s.feed != nil {
		s.feed.end()
	}
	s.over(err)
	why := cmpErr(err, errors.New("the trainer no longer takes saves"))
	if errors.Is(err, context.Canceled) && ctx.Err() != nil {
		why = context.Cause(ctx)
	}
	s.mu.Lock()
	s.err = why
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
	tail, tailErr := s.tail(ctx, from, known)
	defer func() {
		stop()
		for range tail { // the reader ends with the context
		}
		for ; s.writing > 0; s.writing-- {
			if err := <-s.written; err != nil {
				s.log.Warn("write failed after the attempt", "error", err)
			}
		}
	}()
	timer := time.NewTimer(0)
	defer timer.Stop()
	var draining *drain // until it is passed to the coordinator
	var lost []loss     // whose events are not all read
	drained, seen := false, from-1
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case of, ok := <-tail:
			if !ok {
				return <-tailErr
			}
			if err := s.obey(ctx, of); err != nil {
				return err
			}
			seen = max(seen, of.event.Sequence)
		case err := <-s.written:
			s.writing--
			if err != nil {
				return err
			}
		case d := <-s.drain:
			draining = &d
		case <-s.losses.came:
			lost = append(lost, s.losses.take()...)
		case <-s.replies.came:
		case <-timer.C:
		}
		if seen < known {
			continue
		}
		for len(lost) > 0 && seen >= lost[0].upTo {
			if err := s.adoptFrom(ctx, lost[0]); err != nil {
				return err
			}
			lost = lost[1:]
		}
		for _, reply := range s.replies.take() {
			if err := s.heedReply(ctx, reply); err != nil {
				return err
			}
		}
		ask, err := s.askLate(ctx)
		if err != nil {
			return err
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
			// Not earlier: the saves that the ranks had sealed by then must have
			// begun.
			s.coord.Drain(draining.reason)
			draining, drained = nil, true
			timer.Reset(0)
			continue
		}
		if drained && s.writing == 0 && len(s.coord.Open()) == 0 && len(lost) == 0 {
			return nil
		}
		if next.IsZero() || !ask.IsZero() && ask.Before(next) {
			next = ask
		}
		if !next.IsZero() {
			timer.Reset(max(0, next.Sub(s.now())))
		}
	}
}

// tail reads the events of the trial in the background and resolves the blobs
// that the coordinator needs. A fact that can no longer be read keeps its save
// from being committed until the deadline. After the trial's events up to known
// comes an event without a kind and with that sequence: the trial's last event
// may be far before it.
func (s *saver) tail(ctx context.Context, from, known uint64) (<-chan fed, <-chan error) {
	out, failed := make(chan fed, 64), make(chan error, 1)
	give := func(of fed) error {
		select {
		case out <- of:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	read := func(from, until uint64) error {
		for r, err := range s.store.Log.ReadTrial(ctx, s.decisions.agg, from, until) {
			if err == nil && s.forward != nil && forwarded[r.Kind] && r.Sequence > s.heard {
				s.forward.Event(Forwarded{s.decisions.attempt, r.Sequence, events.Encode(r.Event)})
			}
			if err == nil {
				r, err = resolveBlobs(ctx, s.store.Blobs, r)
			}
			if err == nil {
				err = give(fed{event: r})
			}
			if err != nil {
				return err
			}
		}
		return ctx.Err()
	}
	go func() {
		defer close(out)
		if s.feed != nil {
			failed <- s.tailFeed(ctx, known, give)
			return
		}
		var err error
		if known > from { // otherwise it is the first event
			if err = read(from, known); err == nil {
				err = give(fed{event: events.Recorded{Sequence: known}})
			}
			from = known + 1
		}
		if err == nil {
			err = read(from, 0)
		}
		failed <- cmpErr(err, errors.New("the log ended"))
	}()
	return out, failed
}

// tailFeed passes on what the feed gets.
func (s *saver) tailFeed(ctx context.Context, known uint64, give func(fed) error) error {
	if err := give(fed{event: events.Recorded{Sequence: known}}); err != nil {
		return err
	}
	blobs := &lastBlobs{Blobs: s.store.Blobs}
	for {
		queue, err := s.feed.next(ctx)
		if err != nil {
			return err
		}
		for _, of := range queue {
			if of.event.Kind == (events.GlobalPlan{}).Kind() {
				of.event, err = resolveBlobs(ctx, blobs, of.event)
			}
			if err == nil {
				err = give(of)
			}
			if err != nil {
				return err
			}
		}
	}
}

// obey folds an event, answers a question, or confirms a mark.
func (s *saver) obey(ctx context.Context, of fed) error {
	switch {
	case of.ask != nil:
		return s.execute(ctx, *of.ask)
	case of.adopt != nil:
		s.adopt(*of.adopt)
	case of.folded != nil:
		close(of.folded)
	case of.event.Kind != "":
		return s.apply(ctx, of.event)
	}
	return nil
}

// apply folds one event and wakes the callers that wait for its checkpoint.
func (s *saver) apply(ctx context.Context, r events.Recorded) error {
	if err := s.coord.Apply(r); err != nil {
		return err
	}
	if r.Scope.Run != s.decisions.run || r.Scope.Trial != s.decisions.trial {
		return nil
	}
	body, err := r.Body()
	if err != nil {
		return err
	}
	switch b := body.(type) {
	case *events.LocalPlan:
		return s.fail(ctx, s.take(b.Attempt, b.Checkpoint, b.Rank))
	case *events.NodePlan:
		return s.fail(ctx, s.take(b.Attempt, b.Checkpoint, events.RanksIn(b.Ranks)...))
	case *events.GlobalPlan:
		s.disagree(b)
	case *events.CheckpointBegun:
		if b.Attempt == s.decisions.attempt {
			s.asked(b.Checkpoint)
		}
		s.share(b)
		s.reuse.begin(b)
		s.move(b.Checkpoint, client.WaitReply{State: client.Begun})
	case *events.WriteStarted:
		if b.Attempt == s.decisions.attempt {
			s.uploads.begin(b)
		}
		if s.peer == nil && s.state(b.Checkpoint, b.Rank).State == client.Aborted {
			s.sweep(ctx, b.Checkpoint) // it was recorded after the first sweep
		}
	case *events.WriteSealed:
		s.slow.Sealed(b)
	case *events.NodeSeal:
		for seal := range b.Each() {
			s.slow.Sealed(seal)
		}
	case *events.ReplicaNode:
		if b.Attempt == s.decisions.attempt && order(s.state(b.Checkpoint, -1).State) < order(client.Committed) {
			s.heirs.Copied(b)
		}
	case *events.WriteCompleted:
		s.uploads.end(b.Checkpoint, b.Rank)
	case *events.NodeWrite:
		s.uploads.end(b.Checkpoint, events.RanksIn(b.Ranks)...)
	case *events.CheckpointStaged:
		if r.Sequence <= s.replayed {
			s.slow.Replayed(b.Checkpoint)
		} else if facts := logSlow(s.log, s.slow.Saved(b.Checkpoint)); len(facts) > 0 {
			if err := s.decisions.measured(ctx, facts...); err != nil {
				s.log.Warn("speed of a node not recorded", "error", err)
			}
		}
		s.move(b.Checkpoint, client.WaitReply{State: client.Staged})
	case *events.NodeSlow:
		if r.Sequence <= s.replayed {
			s.slow.Recorded(b)
		}
	case *events.CheckpointCommitted:
		s.reuse.end(b.Checkpoint)
		s.uploads.remove(b.Checkpoint)
		if r.Sequence > s.replayed {
			s.log.Info("checkpoint committed", "checkpoint", b.Checkpoint, "bytes", b.Bytes)
			s.kept()
			s.costs(b.Bytes)
		}
		s.move(b.Checkpoint, client.WaitReply{State: client.Committed})
	case *events.CheckpointAborted:
		s.slow.Aborted(b.Checkpoint)
		s.reuse.end(b.Checkpoint)
		level := slog.LevelWarn
		if r.Sequence <= s.replayed {
			level = slog.LevelDebug
		}
		s.log.Log(ctx, level, "checkpoint aborted", "checkpoint", b.Checkpoint, "reason", b.Reason, "ranks", b.Ranks)
		reason := b.Reason
		if len(b.Ranks) > 0 {
			reason = fmt.Sprintf("%s (ranks %v)", b.Reason, b.Ranks)
		}
		// In this order: a rank that takes a slot too late sees the state, or its
		// slot is freed here.
		s.move(b.Checkpoint, client.WaitReply{State: client.Aborted, Reason: reason})
		s.slots.Abort(b.Checkpoint)
		s.clear(ctx, b.Checkpoint)
	}
	return nil
}

// logSlow logs and returns facts about the speed of nodes.
func logSlow(log *slog.Logger, facts []events.Body) []events.Body {
	for _, f := range facts {
		switch b, _ := f.(*events.NodeSlow); {
		case b == nil:
		case b.Over:
			log.Info("node is no longer slow", "node", b.Node, "by", b.By, "seconds", b.Seconds, "others", b.Others)
		default:
			log.Warn("node is slow", "node", b.Node, "by", b.By, "seconds", b.Seconds, "others", b.Others)
		}
	}
	return facts
}

// defaultWorkers returns how many ranks are written at the same time.
func defaultWorkers() int { return runtime.GOMAXPROCS(0) + 2 }
