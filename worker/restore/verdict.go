package restore

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/planner/plan"
	"github.com/ckptstore/ckptstore/worker/client"
)

// verdict is what becomes of a load of which ranks verify their part while they copy
// it: it is complete when each of them has found it in order, and of no use to any
// when one has not. None goes on before that is known.
//
//	rank 0   load ──▶ where ── copy, verify ──▶ loaded ─────────┐ complete, or
//	rank 1   load ──▶ where ── copy, verify ────────▶ loaded ───┘ what is damaged
type verdict struct {
	r     *restore
	plans []*events.LoadPlan
	done  *events.RestoreCompleted

	// Under the lock of the loader.
	missing map[int]bool  // ranks that have not said what they have found
	ended   bool          // somebody finds out err, or it is known
	over    chan struct{} // closed when err is known
	err     error
}

// newVerdict is that of the ranks that verify something; nil if none does.
func newVerdict(r *restore, plans []*events.LoadPlan, done *events.RestoreCompleted) *verdict {
	v := &verdict{r: r, plans: plans, done: done, missing: map[int]bool{}, over: make(chan struct{})}
	for rank := range r.ranks {
		if slices.ContainsFunc(r.ranks[rank].spots, func(s spot) bool { return s.check != nil }) {
			v.missing[rank] = true
		}
	}
	if len(v.missing) == 0 {
		return nil
	}
	return v
}

// judge notes what a rank has found, and returns when it is known what all have.
func (l *Loader) judge(ctx context.Context, v *verdict, rank int, damaged string, limit time.Duration) error {
	l.mu.Lock()
	delete(v.missing, rank)
	decide := !v.ended && (damaged != "" || len(v.missing) == 0)
	v.ended = v.ended || decide
	l.mu.Unlock()
	if decide {
		l.decide(v, rank, damaged)
	}
	bounded := l.cfg.Limit
	if bounded == nil {
		bounded = context.WithTimeout
	}
	wait, cancel := bounded(ctx, limit)
	defer cancel()
	select {
	case <-v.over:
		return v.err
	case <-wait.Done():
		l.mu.Lock()
		defer l.mu.Unlock()
		return fmt.Errorf("load %d is a collective, and ranks %v have not said that theirs is in order: %w", v.r.n, slices.Sorted(maps.Keys(v.missing)), wait.Err())
	}
}

// decide tells the log that a load is complete, or looks at what a rank says is
// damaged, and tells it that.
func (l *Loader) decide(v *verdict, rank int, damaged string) {
	if damaged == "" {
		v.end(l.cfg.Log.Completed(l.cfg.Work, v.plans, v.done))
		return
	}
	err := v.r.look(l.cfg.Work)
	if err == nil {
		l.cfg.Arenas.Doubt(v.r.ranks[rank].lent()) // the next load takes it from the files
		err = fmt.Errorf("load %d of %s: what rank %d has copied is not what was committed (%s), and the checkpoint is: load it again", v.r.n, v.r.ckpt.ID, rank, damaged)
	}
	err = unreadable(v.r.ckpt, err)
	failed := l.cfg.Log.Failed(l.cfg.Work, &events.RestoreFailed{Attempt: l.cfg.Attempt, Load: v.r.n, Checkpoint: v.r.ckpt.ID, Error: err.Error()})
	v.end(&ConflictError{errors.Join(err, failed)})
}

// end makes it known.
func (v *verdict) end(err error) {
	v.err = err
	close(v.over)
}

// giveUp ends what no rank's word can end any more. The caller holds the lock.
func (v *verdict) giveUp(err error) {
	if !v.ended {
		v.ended = true
		v.end(&ConflictError{err})
	}
}

// look verifies in the files what ranks have verified where they have copied it.
func (r *restore) look(ctx context.Context) error {
	var wants []plan.Want
	var reads []plan.Read
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

// Loaded takes arena and slots back from a rank, and returns when what the ranks have
// verified, if they have, is known to be what was committed. It waits for the others as
// long as limit.
func (l *Loader) Loaded(ctx context.Context, rank int, req client.LoadedRequest, limit time.Duration) error {
	l.mu.Lock()
	by := loan{rank, req.Load, req.Arena}
	lent, ok := l.lent[by]
	if !ok {
		l.mu.Unlock()
		return &MisuseError{fmt.Errorf("rank %d has no load %d in %q to give back", rank, req.Load, req.Arena)}
	}
	delete(l.lent, by)
	if lent.arena != nil {
		l.cfg.Arenas.Give(lent.arena)
		lent.arena = nil
	}
	l.undo(lent)
	v := lent.verdict
	verifies := v != nil && v.missing[rank]
	l.mu.Unlock()
	if !verifies {
		return nil
	}
	return l.judge(ctx, v, rank, req.Damaged, limit)
}
