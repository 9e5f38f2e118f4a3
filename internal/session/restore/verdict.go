package restore

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
)

// verdict is the outcome of a load whose ranks verify their part while they copy
// it. The load is complete when every rank has found its part intact, and has
// failed for all ranks when one has not. No rank continues before that is known.
//
//	rank 0   load ──▶ where ── copy, verify ──▶ loaded ─────────┐ complete, or
//	rank 1   load ──▶ where ── copy, verify ────────▶ loaded ───┘ what is damaged
type verdict struct {
	r     *restore
	got   Report
	since time.Time // when the ranks could begin to copy

	// Guarded by the loader's lock.
	missing map[int]bool  // ranks that have not reported their result
	ended   bool          // err is known or being determined
	over    chan struct{} // closed when err is known
	err     error
}

// newVerdict returns the verdict of a load if any of its ranks verifies
// something, or nil. All ranks of the load wait for it.
func newVerdict(r *restore, got Report) *verdict {
	checks := slices.ContainsFunc(r.ranks, func(of restoreRank) bool {
		return slices.ContainsFunc(of.spots, func(s spot) bool { return s.check != nil })
	})
	if !checks {
		return nil
	}
	v := &verdict{r: r, got: got, since: time.Now(), missing: map[int]bool{}, over: make(chan struct{})}
	for _, rank := range r.part {
		v.missing[rank] = true
	}
	return v
}

// judge records the result of a rank and waits for the verdict on all ranks.
func (l *Loader) judge(ctx context.Context, v *verdict, rank int, said client.LoadedRequest, limit time.Duration) error {
	wait, cancel := l.cfg.bounded(ctx, limit)
	defer cancel()
	l.mu.Lock()
	delete(v.missing, rank)
	decide := !v.ended && (said.Damaged != "" || said.Failed != "" || len(v.missing) == 0)
	v.ended = v.ended || decide
	l.mu.Unlock()
	if decide {
		l.decide(v, rank, said, limit)
	}
	select {
	case <-v.over:
		return v.err
	case <-wait.Done():
	}
	l.mu.Lock()
	absent, decide := slices.Sorted(maps.Keys(v.missing)), !v.ended
	v.ended = true
	l.mu.Unlock()
	if decide { // for the other ranks too, including later ones
		l.fail(v, fmt.Errorf("load %d is a collective, and ranks %v have not confirmed their part: %w", v.r.n, absent, wait.Err()))
		return v.err
	}
	if l.cfg.Coordinator != nil { // it limits the wait for the other nodes
		select {
		case <-v.over:
			return v.err
		case <-ctx.Done():
		}
	}
	return fmt.Errorf("load %d: its outcome is not known yet: %w", v.r.n, wait.Err())
}

// decide appends that a load is complete, or why it failed. If a rank reports
// damage, decide verifies it in the files.
func (l *Loader) decide(v *verdict, rank int, said client.LoadedRequest, limit time.Duration) {
	switch {
	case said.Damaged != "":
		ctx, cancel := l.cfg.bounded(l.cfg.Work, limit)
		defer cancel()
		err := v.r.look(ctx)
		if err == nil {
			l.cfg.Arenas.Doubt(v.r.ckpt.ID) // the next load takes it from the files
			err = &ConflictError{fmt.Errorf("load %d of %s: the copy of rank %d is damaged (%s), the checkpoint is not: load it again", v.r.n, v.r.ckpt.ID, rank, said.Damaged)}
		}
		l.fail(v, unreadable(v.r.ckpt, err))
	case said.Failed != "":
		l.fail(v, &ConflictError{fmt.Errorf("load %d is a collective, and rank %d has not loaded its part: %s", v.r.n, rank, said.Failed)})
	default:
		v.got.Check = events.Seconds(time.Since(v.since))
		v.end(v.r.complete(l.cfg.Work, v.got))
	}
}

// fail appends the failure and then reports it to all ranks.
func (l *Loader) fail(v *verdict, err error) {
	v.end(errors.Join(err, v.r.fail([]error{err}, err)))
}

// end publishes the verdict.
func (v *verdict) end(err error) {
	v.err = err
	close(v.over)
}

// giveUp fails a verdict that can no longer be completed by the ranks. The caller
// holds the lock.
func (l *Loader) giveUp(v *verdict, why error) {
	if v.ended {
		return
	}
	v.ended = true
	err := &ConflictError{fmt.Errorf("load %d is a collective: %w", v.r.n, why)}
	if l.closed {
		v.end(err) // the log has the end of the attempt
		return
	}
	l.running.Go(func() { l.fail(v, err) })
}

// look verifies in the files the data that ranks have verified where they copied
// it.
func (r *restore) look(ctx context.Context) error {
	var wants []checkpoint.Want
	var reads []checkpoint.Read
	for rank := range r.ranks {
		of := &r.ranks[rank]
		for _, read := range of.reads {
			if of.spot(read.Want).check != nil {
				read.Want += len(wants)
				reads = append(reads, read)
			}
		}
		wants = append(wants, of.wants...)
	}
	_, err := r.reader.ReadData(ctx, wants, reads, make(loadTarget, len(wants)))
	return err
}

// Loaded takes arena and slots back from a rank. If ranks verify the load, it
// returns when the verdict is known; it waits up to limit for the others.
func (l *Loader) Loaded(ctx context.Context, rank int, req client.LoadedRequest, limit time.Duration) error {
	l.mu.Lock()
	by := loan{rank, req.Load}
	lent, ok := l.lent[by]
	if !ok {
		l.mu.Unlock()
		return &MisuseError{fmt.Errorf("rank %d has no load %d to give back", rank, req.Load)}
	}
	delete(l.lent, by)
	if lent.arena != nil {
		l.cfg.Arenas.Give(lent.arena)
		lent.arena = nil
	}
	l.undo(lent)
	v := lent.verdict
	l.mu.Unlock()
	if v == nil {
		return nil
	}
	return l.judge(ctx, v, rank, req, limit)
}
