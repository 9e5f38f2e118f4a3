package restore

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/planner"
)

// plan finds the reads of every rank. If one rank's wants cannot be satisfied,
// nothing is read: that rank gets the reason, and the others learn which rank it
// is. errs are the errors by rank, and others is that of all other ranks.
func (r *restore) plan(ctx context.Context, requests map[int]client.LoadRequest) (errs []error, others error) {
	errs = make([]error, len(r.ranks))
	var all []error
	for _, rank := range r.part {
		req := requests[rank]
		if err := r.planRank(ctx, rank, planner.LoadOptions{Partial: req.Partial, StrictDType: req.StrictDType, SameKind: req.SameKind}); err != nil {
			err = fmt.Errorf("rank %d: load %s: %w", rank, r.ckpt.ID, err)
			errs[rank] = &MisuseError{err}
			all = append(all, err)
		}
	}
	if len(all) == 0 {
		return nil, nil
	}
	others = error(&ConflictError{fmt.Errorf("load %d is a collective, and cannot be served to all ranks: %w", r.n, errors.Join(all...))})
	for rank := range errs {
		if errs[rank] == nil {
			errs[rank] = others
		}
	}
	return errs, others
}

// planRank plans the reads of a rank. It leaves out optional values that the
// checkpoint has only for other ranks.
func (r *restore) planRank(ctx context.Context, rank int, o planner.LoadOptions) (err error) {
	of := &r.ranks[rank]
	for i, it := range of.items {
		w := checkpoint.Want{Value: it.Value, Shard: it.Shard(), Rank: rank}
		if it.Rank != nil {
			w.Rank = *it.Rank
		}
		if !it.Optional || !r.planner.Lacks(w) {
			of.wants, of.of = append(of.wants, w), append(of.of, i)
		}
	}
	if of.planned, err = r.planner.LoadWith(of.wants, o); err != nil {
		return err
	}
	of.sizes = make([]int64, len(of.wants))
	for i, w := range of.wants {
		if !of.absent(i) {
			of.sizes[i] = r.planner.Size(w)
		}
	}
	of.offsets, of.size = staging.Place(of.sizes)
	return ctx.Err()
}

// absent reports whether a want is left out.
func (of *restoreRank) absent(want int) bool {
	_, absent := slices.BinarySearch(of.planned.Absent, want)
	return absent
}

// prepare passes the reads of all ranks to the storage's planning steps.
func (r *restore) prepare(ctx context.Context) error {
	reads := make([][]checkpoint.Read, len(r.ranks))
	for rank := range r.ranks {
		var err error
		if reads[rank], err = r.reader.PrepareLocalPlan(ctx, r.ranks[rank].planned.Reads); err != nil {
			return fmt.Errorf("reads of rank %d: %w", rank, err)
		}
	}
	reads, err := r.reader.PrepareGlobalPlan(ctx, reads)
	if err != nil {
		return err
	}
	for rank := range r.ranks {
		r.ranks[rank].reads = reads[rank]
	}
	return nil
}
