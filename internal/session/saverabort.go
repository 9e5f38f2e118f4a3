package session

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/session/retry"
	"github.com/ckptstore/ckptstore/planner"
)

// Saves that cannot be finished, and the removal of their files.

// askToAbort passes the abort that a part requests to the coordinating process.
func (s *saver) askToAbort(ctx context.Context, c planner.Command) error {
	if d, ok := c.(planner.Decide); ok {
		if b, ok := d.Body.(*events.CheckpointAborted); ok {
			return s.abort(ctx, b.Attempt, b.Checkpoint, b.Reason, b.Ranks...)
		}
	}
	return nil
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
