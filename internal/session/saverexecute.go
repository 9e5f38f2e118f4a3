package session

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/session/heirs"
	"github.com/ckptstore/ckptstore/internal/session/retry"
	"github.com/ckptstore/ckptstore/planner"
)

// writes reports whether this process writes a rank in a save. The coordinating process
// writes all ranks of a save whose bytes are in files.
func (s *saver) writes(checkpoint string, rank int) bool {
	switch {
	case s.whole(checkpoint) != nil, s.held.Writes(checkpoint, rank):
		return true
	case !s.serves(rank):
		return false
	}
	return s.peer == nil || s.slots.Holds(checkpoint, rank)
}

// serves reports whether a rank is on this node.
func (s *saver) serves(rank int) bool { return s.local == nil || slices.Contains(s.local, rank) }

// execute runs a command of the coordinator, if it concerns this process: one process
// decides, and each writes and answers for its own ranks.
func (s *saver) execute(ctx context.Context, c planner.Command) error {
	switch c := c.(type) {
	case planner.Ask:
		if !s.serves(c.Rank) {
			if s.forward != nil {
				s.forward.Ask(c.Checkpoint, c.Rank)
			}
			return nil
		}
	case planner.Write:
		if !s.writes(c.Checkpoint, c.Rank) {
			return nil
		}
	case planner.Decide, planner.Publish, planner.Commit:
		if s.peer != nil {
			return s.askToAbort(ctx, c)
		}
	}
	switch c := c.(type) {
	case planner.Decide:
		if b, ok := c.Body.(*events.CheckpointBegun); ok {
			b.Bases = s.named(ctx, b.Checkpoint)
		}
		_, err := s.decisions.decide(ctx, c.Body)
		if errors.Is(err, errEnded) {
			return nil // the log holds the outcome; follow reads it
		}
		return err
	case planner.Publish:
		return s.publish(ctx, c.Body)
	case planner.Ask:
		return s.unsaid(ctx, s.decisions.attempt, c.Checkpoint, s.answer(ctx, c))
	case planner.Write:
		s.writing++
		s.fly(c.Checkpoint, 1)
		go func() {
			err := s.write(ctx, c)
			s.fly(c.Checkpoint, -1)
			s.written <- err
		}()
		return nil
	case planner.Commit:
		return s.commit(ctx, c)
	}
	return fmt.Errorf("unknown command %T", c)
}

// askToAbort passes the abort that a part requests to the coordinating process.
func (s *saver) askToAbort(ctx context.Context, c planner.Command) error {
	if d, ok := c.(planner.Decide); ok {
		if b, ok := d.Body.(*events.CheckpointAborted); ok {
			return s.abort(ctx, b.Attempt, b.Checkpoint, b.Reason, b.Ranks...)
		}
	}
	return nil
}

func (s *saver) publish(ctx context.Context, body events.Body) error {
	if g, ok := body.(*events.GlobalPlan); ok {
		layout, err := checkpoint.DecodeLayout(g.Layout.Inline)
		if err != nil {
			return err
		}
		w := s.writer(s.store.Data.Writer(s.ref(g.Checkpoint)))
		if layout, err = w.PrepareGlobalPlan(ctx, layout); err != nil {
			if errors.Is(err, syscall.ENOSPC) {
				s.full(g.Checkpoint)
			}
			return s.abort(ctx, g.Attempt, g.Checkpoint, "commit: "+err.Error())
		}
		b, err := s.store.Blobs.Put(ctx, checkpoint.EncodeLayout(layout))
		if err != nil {
			return s.unsaid(ctx, g.Attempt, g.Checkpoint, err)
		}
		g.Layout = b
		return s.unsaid(ctx, g.Attempt, g.Checkpoint, s.decisions.record(ctx, g))
	}
	return s.decisions.record(ctx, body)
}

// unsaid aborts a save if err refused one of its facts because the disk is nearly
// full: the log still takes decisions. It returns any other error.
func (s *saver) unsaid(ctx context.Context, attempt int, checkpoint string, err error) error {
	if !errors.Is(err, syscall.ENOSPC) {
		return err
	}
	s.full(checkpoint)
	return s.abort(ctx, attempt, checkpoint, err.Error())
}

// full records that a save ends for lack of disk space. Workers that train must
// not suffer from that.
func (s *saver) full(checkpoint string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.noRoom[checkpoint] = true
}

// keep stores the plan of a rank in full, until its save has ended.
func (s *saver) keep(p *events.LocalPlan) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.plans[rankSave{p.Checkpoint, p.Rank}] = p
}

// answer appends the full plan of a rank that was appended by its fingerprint
// only.
func (s *saver) answer(ctx context.Context, c planner.Ask) error {
	s.mu.Lock()
	p := s.plans[rankSave{c.Checkpoint, c.Rank}]
	s.mu.Unlock()
	if p == nil {
		return nil // the save has ended meanwhile, or belongs to another trainer and runs into its deadline
	}
	return s.recordPlan(ctx, p)
}

// recordPlan appends a rank's plan to the log.
func (s *saver) recordPlan(ctx context.Context, p *events.LocalPlan) error {
	said, err := s.claim(ctx, p)
	if err != nil {
		return err
	}
	return s.decisions.recordAs(ctx, s.decisions.trial, events.Rank(p.Rank), said)
}

// claim returns a rank's plan, with a claim check if the plan is too large for
// the log.
func (s *saver) claim(ctx context.Context, p *events.LocalPlan) (*events.LocalPlan, error) {
	if p.Plan.Size == 0 {
		return p, nil
	}
	said := *p
	var err error
	said.Plan, err = s.store.Blobs.Put(ctx, p.Plan.Inline)
	return &said, err
}

// recordAsRank appends facts of this rank, in order and durably.
func (s *rankServer) recordAsRank(ctx context.Context, bodies ...events.Body) error {
	for i, b := range bodies {
		if p, ok := b.(*events.LocalPlan); ok {
			said, err := s.saver.claim(ctx, p)
			if err != nil {
				return err
			}
			bodies[i] = said
		}
	}
	if s.saver.joined != nil {
		for _, b := range bodies {
			if err := s.saver.joined.Record(ctx, s.rank, b); err != nil {
				return err
			}
		}
		return nil
	}
	return s.decisions.recordAs(ctx, s.decisions.trial, events.Rank(s.rank), bodies...)
}

// lost ends a rank's part in a save after the log refused one of its facts.
func (s *rankServer) lost(checkpoint string, err error) {
	if s.work.Err() != nil {
		return // the attempt is over, and so is every open save
	}
	s.saver.log.Error("append failed; the rank's save has failed", "checkpoint", checkpoint, "rank", s.rank, "error", err)
	if errors.Is(err, syscall.ENOSPC) {
		s.saver.full(checkpoint)
	}
	s.saver.reject(checkpoint, s.rank, err.Error())
	s.slots.Abort(checkpoint, s.rank)
	if err := s.saver.refuse(s.work, s.Number, checkpoint, s.rank, err); err != nil {
		s.saver.log.Error("append of write.failed failed", "checkpoint", checkpoint, "rank", s.rank, "error", err)
	}
}

// reject ends a rank's part in a save before the log records it.
func (s *saver) reject(checkpoint string, rank int, why string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refused[rankSave{checkpoint, rank}] = why
	if s.moved != nil {
		close(s.moved)
		s.moved = make(chan struct{})
	}
}

// refuse appends that a rank cannot save, so that the others need not wait for
// it. It works even after the worker and the attempt have ended.
func (s *saver) refuse(ctx context.Context, attempt int, checkpoint string, rank int, cause error) error {
	ctx, cancel := s.store.calls.Timeout(context.WithoutCancel(ctx), retry.EndTimeout)
	defer cancel()
	text := Beginning(cause.Error(), MaxMessage)
	err := s.decisions.recordNow(ctx, s.decisions.trial, events.Rank(rank), &events.WriteFailed{
		Attempt: attempt, Checkpoint: checkpoint, Rank: rank, Error: text,
	})
	if errors.Is(err, syscall.ENOSPC) {
		return s.abort(ctx, attempt, checkpoint, fmt.Sprintf("rank %d could not save: %s", rank, text), rank)
	}
	return err
}

// writer returns own or the job's storage, which writes all but saves of whole
// files.
func (s *saver) writer(own *data.FileWriter) data.Writer {
	if s.whole(own.Location().Ref.Checkpoint) != nil {
		return own
	}
	return s.store.writer(own)
}

// finisher returns the writer that wrote what m names: own or the job's storage.
// It decides by the files, because a saver that takes over cannot otherwise
// recognize a save of whole files.
func (s *saver) finisher(ctx context.Context, own *data.FileWriter, m checkpoint.Manifest) (data.Writer, error) {
	if s.store.Storage == nil {
		return own, nil
	}
	if kept, err := own.Kept(ctx, m); kept || err != nil {
		return own, err
	}
	return s.store.writer(own), nil
}

func (s *saver) ref(id string) checkpoint.Ref {
	return checkpoint.RefOf(s.decisions.run, s.decisions.trial, id)
}

// write makes one rank's sealed bytes durable and appends the result. A failed
// write is a fact too; only a failed append stops the saver.
func (s *saver) write(ctx context.Context, c planner.Write) error {
	s.permits <- struct{}{}
	attempt := s.decisions.attempt
	seal, sealed := s.slots.Times(c.Checkpoint, c.Rank) // before the write frees the slot
	began := time.Now()
	w, err := s.putOf(s.whileOpen(ctx, c.Checkpoint), c)
	whole := time.Since(began)
	<-s.permits
	if u := s.usesOf(c.Checkpoint); u != nil && s.serves(c.Rank) {
		u.Done(c.Rank)
	}
	if s.fenced.Load() {
		return nil // another node writes it
	}
	if err != nil && ctx.Err() != nil {
		return nil // the attempt is over; the disk is not at fault
	}
	if s.state(c.Checkpoint, c.Rank).State == client.Aborted {
		if s.peer == nil {
			s.sweep(ctx, c.Checkpoint) // these files may be newer than the first sweep
		}
		return nil
	}
	if err != nil {
		s.log.Error("write failed", "checkpoint", c.Checkpoint, "rank", c.Rank, "error", err)
		if s.held.Writes(c.Checkpoint, c.Rank) && !errors.Is(err, syscall.ENOSPC) {
			s.held.Forgo(c.Checkpoint, c.Rank)
			s.reply(heirs.Reply{Checkpoint: c.Checkpoint, Without: []int{c.Rank}, Why: Beginning(err.Error(), MaxMessage)})
			return nil // another node may have a replica that can be written
		}
		failed := &events.WriteFailed{Attempt: attempt, Checkpoint: c.Checkpoint, Rank: c.Rank, Error: Beginning(err.Error(), MaxMessage)}
		if errors.Is(err, syscall.ENOSPC) {
			s.full(c.Checkpoint)
		}
		return s.unsaid(ctx, attempt, c.Checkpoint, s.decisions.recordNow(ctx, s.decisions.trial, s.decisions.node, failed))
	}
	done := &events.WriteCompleted{
		Attempt: attempt, Checkpoint: c.Checkpoint, Rank: c.Rank,
		IndexDigest: w.Index.String(), BytesWritten: w.BytesWritten, BytesReused: w.BytesReused,
		Write: events.Seconds(whole),
	}
	if sealed {
		done.Queued = events.Seconds(began.Sub(seal.Sealed))
	}
	if took := w.Took; took != nil { // the write includes what happened around the measured parts
		done.Digest, done.Sync, done.Write = events.Seconds(took.Digest), events.Seconds(took.Sync), events.Seconds(whole-took.Digest-took.Sync)
	}
	for _, f := range w.Files {
		done.Files = append(done.Files, events.File{Name: f.Name, Size: f.Size, From: nameOf(f.From)})
	}
	return s.unsaid(ctx, attempt, c.Checkpoint, s.recordOf(ctx, c.Rank, done))
}

// openWrites is the context of a save's writes.
type openWrites struct {
	ctx  context.Context
	stop context.CancelFunc
}

// whileOpen returns a context that ends with a save: an object store that does not answer can
// keep a write of an aborted save for minutes.
func (s *saver) whileOpen(ctx context.Context, checkpoint string) context.Context {
	s.mu.Lock()
	defer s.mu.Unlock()
	if w, ok := s.underWay[checkpoint]; ok {
		return w.ctx
	}
	ctx, stop := context.WithCancel(ctx)
	if order(s.states[checkpoint].State) >= order(client.Committed) || s.fenced.Load() {
		stop()
		return ctx
	}
	s.underWay[checkpoint] = openWrites{ctx, stop}
	return ctx
}

// recordOf durably appends the fact that the files of a rank are durable.
func (s *saver) recordOf(ctx context.Context, rank int, done *events.WriteCompleted) error {
	if s.joined != nil && s.whole(done.Checkpoint) == nil && s.serves(rank) {
		return s.joined.Record(ctx, rank, done)
	}
	return s.decisions.record(ctx, done)
}

func (s *saver) writeData(ctx context.Context, c planner.Write) (data.Written, error) {
	if s.held.Writes(c.Checkpoint, c.Rank) {
		return s.writeReplica(ctx, c)
	}
	src, release, err := s.slots.Open(c.Checkpoint, c.Rank, c.Items)
	if err != nil {
		return data.Written{}, err
	}
	w, err := s.writeFrom(ctx, c, src)
	var digests []data.ChunkDigest
	if err == nil && s.store.Storage == nil { // other storages do not reveal what their files hold
		var derr error
		digests, derr = s.store.Data.ChunkDigests(ctx, s.ref(c.Checkpoint), checkpoint.RankIndex{Rank: c.Rank, Index: w.Index})
		if derr != nil {
			s.log.Warn("checkpoint in shared memory not available to restores", "checkpoint", c.Checkpoint, "rank", c.Rank, "error", derr)
		}
	}
	release(digests)
	return w, err
}

// writeFrom makes the bytes of one rank durable.
func (s *saver) writeFrom(ctx context.Context, c planner.Write, src data.Source) (data.Written, error) {
	own := s.reusing(ctx, c.Checkpoint).Resuming(uploadsOf{s, c.Checkpoint})
	if s.alone {
		own.Alone()
	}
	if u := s.usesOf(c.Checkpoint); u != nil {
		own.Together(u)
	}
	w := s.writer(own)
	if err := w.SetUp(ctx, c.Rank == 0); err != nil {
		return data.Written{}, err
	}
	return w.WriteData(ctx, c.Rank, c.Items, src)
}

// commit commits a save in crash-safe order: manifest, decision, receipt.
func (s *saver) commit(ctx context.Context, c planner.Commit) error {
	id := c.Manifest.Checkpoint
	w, err := s.finisher(ctx, s.store.Data.Writer(s.ref(id)), c.Manifest)
	if err != nil {
		return s.abort(ctx, c.Manifest.Attempt, id, "commit: "+err.Error())
	}
	limited, cancel := s.store.calls.Timeout(ctx, s.store.limit) // all saves of the job wait for it
	defer cancel()
	began := time.Now()
	_, err = w.Finish(limited, c.Manifest, func(_ context.Context, manifest checkpoint.Digest) (checkpoint.Decision, error) {
		r, err := s.decisions.decide(ctx, &events.CheckpointCommitted{
			Attempt: c.Manifest.Attempt, Checkpoint: id, Manifest: manifest.String(), Bytes: c.Bytes, ManifestTook: events.Seconds(time.Since(began)),
		})
		return checkpoint.Decision{Sequence: r.Sequence, Event: r.ID, Time: r.Time}, err
	})
	var unrecorded *data.UnrecordedError
	switch {
	case errors.Is(err, errEnded):
		return nil // the log holds the outcome; follow reads it
	case errors.As(err, &unrecorded):
		s.log.Warn("receipt missing; it is written when the store is next opened", "checkpoint", id, "error", err)
		return nil
	case errors.Is(err, ErrFenced):
		return err
	case err != nil:
		// The files differ from their writers' reports: the save has failed, but
		// the training has not.
		if errors.Is(err, syscall.ENOSPC) {
			s.full(id)
		}
		return s.abort(ctx, c.Manifest.Attempt, id, "commit: "+err.Error())
	}
	return nil
}

// abort ends a save that cannot be finished. ranks are the ranks that caused it.
func (s *saver) abort(ctx context.Context, attempt int, checkpoint, reason string, ranks ...int) error {
	s.log.Error("save aborted", "checkpoint", checkpoint, "reason", reason)
	if s.peer != nil {
		return s.peer.Abort(ctx, checkpoint, reason, ranks)
	}
	_, err := s.decisions.decide(ctx, &events.CheckpointAborted{
		Attempt: attempt, Checkpoint: checkpoint, Reason: Beginning(reason, MaxMessage), Ranks: ranks,
	})
	if errors.Is(err, errEnded) {
		return nil
	}
	return err
}

// sweepTimeout bounds the removal of files that are no longer needed.
const sweepTimeout = 30 * time.Second

// sweep removes the files and uploads of an aborted save. A failure costs disk space, not
// correctness: files without a receipt are never read.
func (s *saver) sweep(ctx context.Context, checkpoint string) {
	ctx, cancel := context.WithTimeout(ctx, sweepTimeout)
	defer cancel()
	s.discard(ctx, checkpoint)
	if err := s.store.Data.Remove(ctx, s.ref(checkpoint)); err != nil {
		s.log.Warn("files of an aborted save not removed", "checkpoint", checkpoint, "error", err)
	}
}

// fly counts the writes of a save that have not ended.
func (s *saver) fly(checkpoint string, by int) {
	s.mu.Lock()
	s.flying[checkpoint] += by
	ended := s.flying[checkpoint] == 0
	if ended {
		delete(s.flying, checkpoint)
	}
	aborted := s.states[checkpoint].State == client.Aborted
	s.mu.Unlock()
	if ended && by < 0 && aborted && s.peer != nil {
		s.peer.Settled(checkpoint)
	}
}

// clear removes the files of an aborted save when no node writes them any more.
func (s *saver) clear(ctx context.Context, checkpoint string) {
	switch {
	case s.peer != nil:
		s.uploads.remove(checkpoint) // the coordinating process discards them
		s.mu.Lock()
		flying := s.flying[checkpoint] > 0
		s.mu.Unlock()
		if !flying { // otherwise its last write settles it
			s.peer.Settled(checkpoint)
		}
	case s.settled != nil:
		s.settled(checkpoint, func() { s.sweep(context.WithoutCancel(ctx), checkpoint) })
	default:
		s.sweep(ctx, checkpoint)
	}
}

// lose fails the open saves in which ranks take part whose memory is lost, and those whose
// plans of these ranks it reads later.
func (s *saver) lose(ctx context.Context, ranks []int, why error) error {
	return s.fail(ctx, s.losing(ranks, why))
}

// losing notes that the memory of ranks is lost, and returns their parts of open saves.
func (s *saver) losing(ranks []int, why error) (open []rankSave) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, rank := range ranks {
		s.lostRanks[rank] = why
	}
	for id, part := range s.part {
		if order(s.states[id].State) >= order(client.Committed) {
			continue
		}
		for _, rank := range ranks {
			if part[rank] {
				open = append(open, rankSave{id, rank})
			}
		}
	}
	return open
}

// fail records that ranks whose memory is lost cannot finish saves.
func (s *saver) fail(ctx context.Context, open []rankSave) error {
	for _, of := range open {
		s.mu.Lock()
		why := s.lostRanks[of.rank]
		s.mu.Unlock()
		// A rank whose files are written is not at fault: the coordinator ignores what
		// fails after that.
		if err := s.refuse(ctx, s.decisions.attempt, of.checkpoint, of.rank, why); err != nil {
			return err
		}
	}
	return nil
}
