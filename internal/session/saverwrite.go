package session

import (
	"context"
	"errors"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/session/heirs"
	"github.com/ckptstore/ckptstore/planner"
)

// The writes of ranks, and the commit.

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
