package worker

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/planner/plan"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/storage"
	"github.com/ckptstore/ckptstore/worker/client"
	"github.com/ckptstore/ckptstore/worker/staging"
)

// restore is the reading of one load: what it was resolved to, and the part of
// each rank.
type restore struct {
	l        *loader
	n        int   // of the load
	part     []int // the ranks that take part
	ckpt     projections.Checkpoint
	manifest plan.Manifest
	planner  *planner.Loader
	reader   storage.Reader
	unread   []string
	ranks    []restoreRank    // of the attempt; those that take no part want nothing
	files    map[string]int64 // those of the checkpoint that are lent, and their sizes
}

// restoreRank is what one rank wants, and where it goes.
type restoreRank struct {
	items   []client.Item
	wants   []plan.Want
	of      []int // the item of each want
	planned planner.Loaded
	reads   []plan.Read
	sizes   []int64 // of the wants
	offsets []int64 // in the arena
	size    int64
	arena   *staging.Arena

	slots bool   // it can read several files
	spots []spot // by want; nil: none is lent
}

// run reads a load for all ranks. On return nothing writes to their arenas.
func (l *loader) run(ctx context.Context, ld *load) []answer {
	r := &restore{l: l, n: ld.n, part: ld.ranks, ranks: make([]restoreRank, l.g.cfg.NProc)}
	for rank := range r.ranks {
		r.ranks[rank].slots = true // no memory is made for who wants nothing
	}
	for _, rank := range r.part {
		r.ranks[rank].items, r.ranks[rank].slots = ld.asked[rank].Items, ld.slots[rank]
	}
	if err := r.resolve(ctx, ld.asked); err != nil {
		return r.failed(&problem{http.StatusConflict, err})
	}
	errs := r.plan(ctx, ld.asked)
	if errs == nil {
		err := r.prepare(ctx)
		if err == nil {
			err = r.readBeside(ctx)
		}
		if err == nil {
			return r.answers()
		}
		errs = slices.Repeat([]error{unreadable(r.ckpt, err)}, len(r.ranks))
	}
	text := beginning(joined(errs).Error(), maxMessage)
	err := l.g.lane.say(l.g.work, &events.RestoreFailed{Attempt: l.g.attempt, Load: ld.n, Checkpoint: r.ckpt.ID, Error: text})
	out := make([]answer, len(r.ranks))
	for rank := range r.ranks {
		if a := r.ranks[rank].arena; a != nil {
			err = errors.Join(err, l.arenas.Drop(a))
		}
		if lent := r.ranks[rank].lent(); len(lent) > 0 {
			l.arenas.Release(lent)
		}
	}
	for rank := range out {
		out[rank].err = errors.Join(errs[rank], err)
	}
	return out
}

// joined is every error once.
func joined(errs []error) error {
	var out []error
	for _, err := range errs {
		if !slices.Contains(out, err) {
			out = append(out, err)
		}
	}
	return errors.Join(out...)
}

// failed answers all ranks with an error.
func (r *restore) failed(err error) []answer {
	return slices.Repeat([]answer{{err: err}}, len(r.ranks))
}

// resolve decides, once for all ranks, which checkpoint a load reads.
func (r *restore) resolve(ctx context.Context, requests map[int]client.LoadRequest) error {
	first := r.part[0]
	ref := requests[first].Ref
	asked := map[string]bool{}
	strict := false
	for _, rank := range r.part {
		req := requests[rank]
		if req.Ref != ref {
			return fmt.Errorf("load %d: rank %d asks for %q and rank %d for %q", r.n, first, ref, rank, req.Ref)
		}
		strict = strict || req.Strict
		for _, it := range req.Items {
			asked[it.FQN] = true
		}
	}
	g := r.l.g
	if ref == "" {
		ref = g.resume
	}
	if ref == "" {
		return fmt.Errorf("load %d: there is nothing to resume from; check the context's resume field, or name a checkpoint", r.n)
	}
	reader, c, err := r.l.reader(ctx, ref)
	if err != nil {
		return err
	}
	m, err := reader.ReadMetadata(ctx)
	if err != nil {
		return unreadable(c, err)
	}
	if err := reader.SetUp(ctx, m, true); err != nil {
		return err
	}
	r.ckpt, r.manifest, r.reader = c, m, reader
	r.planner = planner.NewLoader(m.Layout)
	r.unread = planner.Unread(m.Layout, asked)
	if strict && len(r.unread) > 0 {
		return fmt.Errorf("load %d of %s: %w", r.n, c.ID, &planner.UnreadError{FQNs: r.unread})
	}
	_, err = g.lane.decide(ctx, &events.RestoreBegun{Attempt: g.attempt, Load: r.n, Checkpoint: c.ID, From: r.from(), WorldSize: g.cfg.NProc})
	return err
}

// plan finds what every rank reads. When one of them wants what cannot be had,
// nothing is read for any: that rank is told what, and the others who it is.
func (r *restore) plan(ctx context.Context, requests map[int]client.LoadRequest) []error {
	errs := make([]error, len(r.ranks))
	var all []error
	for _, rank := range r.part {
		req := requests[rank]
		if err := r.planRank(ctx, rank, planner.LoadOptions{Partial: req.Partial, StrictDType: req.StrictDType, SameKind: req.SameKind}); err != nil {
			err = fmt.Errorf("rank %d: load %s: %w", rank, r.ckpt.ID, err)
			errs[rank] = &problem{http.StatusBadRequest, err}
			all = append(all, err)
		}
	}
	if len(all) == 0 {
		return nil
	}
	others := error(&problem{http.StatusConflict, fmt.Errorf("load %d is a collective, and cannot be served to all ranks: %w", r.n, errors.Join(all...))})
	for rank := range errs {
		if errs[rank] == nil {
			errs[rank] = others
		}
	}
	return errs
}

// planRank plans the reads of a rank. Optional values that the checkpoint has
// of other ranks only are left out.
func (r *restore) planRank(ctx context.Context, rank int, o planner.LoadOptions) (err error) {
	of := &r.ranks[rank]
	for i, it := range of.items {
		w := plan.Want{Value: it.Value, Shard: shard(it), Rank: rank}
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

// prepare has the storage look at the reads of all ranks.
func (r *restore) prepare(ctx context.Context) error {
	reads := make([][]plan.Read, len(r.ranks))
	for rank := range r.ranks {
		reads[rank] = r.ranks[rank].planned.Reads
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

// read reads what all ranks want and no slot that is lent to them has, in one
// go, each block once, and says so.
func (r *restore) read(ctx context.Context, held staging.Copies, lent int64) error {
	var wants []plan.Want
	var all, reads []plan.Read
	var dst loadTarget
	for rank := range r.ranks {
		of := &r.ranks[rank]
		base := len(wants)
		wants = append(wants, of.wants...)
		all = append(all, of.reads...)
		for _, read := range of.reads {
			if of.spot(read.Want).arena == nil {
				read.Want += base
				reads = append(reads, read)
			}
		}
		for i := range of.wants {
			dst = append(dst, of.target(i))
		}
	}
	slots, rest, err := r.fromSlots(ctx, held, wants, reads, dst)
	slots += lent
	if err != nil {
		return err
	}
	files := int64(0)
	if len(rest) > 0 {
		if files, err = r.reader.ReadData(ctx, wants, rest, dst); err != nil {
			return err
		}
	}
	return r.say(ctx, all, slots, files)
}

// say tells the log what every rank has got, and that the load is complete.
func (r *restore) say(ctx context.Context, reads []plan.Read, slots, files int64) error {
	g := r.l.g
	facts := make([]events.Fact, 0, len(r.ranks)+1)
	add := func(actor events.Actor, body events.Body) error {
		f, err := g.lane.fact(g.lane.trial, actor, body)
		facts = append(facts, f)
		return err
	}
	var errs []error
	for _, rank := range r.part {
		of := r.ranks[rank]
		errs = append(errs, add(events.Rank(rank), &events.LoadPlan{
			Attempt: g.attempt, Load: r.n, Checkpoint: r.ckpt.ID, Rank: rank, Reads: len(of.reads), Bytes: r.planner.Stored(of.reads),
		}))
	}
	errs = append(errs, add(g.lane.node, &events.RestoreCompleted{
		Attempt: g.attempt, Load: r.n, Checkpoint: r.ckpt.ID, Tier: tierOf(slots, files), Bytes: slots + files, Slots: slots,
		Wanted: r.planner.Stored(reads), Unread: r.unread,
	}))
	if err := errors.Join(errs...); err != nil {
		return err
	}
	_, err := g.lane.log.Append(ctx, facts...)
	return err
}

// answers says where each rank finds its items.
func (r *restore) answers() []answer {
	out := make([]answer, len(r.ranks))
	for rank := range r.ranks {
		if of := &r.ranks[rank]; of.slots {
			out[rank] = r.answer(rank, of)
		} else {
			out[rank] = r.oneArena(rank, of)
		}
	}
	return out
}

// oneArena is the answer to a rank that reads all from one file.
func (r *restore) oneArena(rank int, of *restoreRank) answer {
	reply := client.OneArenaReply{
		Checkpoint: r.ckpt.ID, Step: r.ckpt.Step, Arena: of.arena.Path(), Size: of.size, Unread: r.unread,
		Offsets: make([]int64, len(of.items)), Sizes: slices.Repeat([]int64{-1}, len(of.items)),
	}
	for i, item := range of.of {
		if !of.absent(i) {
			reply.Offsets[item], reply.Sizes[item] = of.offsets[i], of.sizes[i]
		}
	}
	return answer{reply: reply, arena: of.arena, by: loan{rank: rank, path: of.arena.Path()}}
}

// loadTarget is the buffers of the wants of all ranks.
type loadTarget [][]byte

// Want implements storage.Destination.
func (t loadTarget) Want(i int) []byte { return t[i] }
