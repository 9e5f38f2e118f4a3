package restore

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/projections"
)

// restore is the reading of one load: its checkpoint, and the part of each rank.
type restore struct {
	l       *Loader
	key     Key
	n       int   // number of the load
	part    []int // the participants on this node
	ckpt    projections.Checkpoint
	planner *planner.Loader
	reader  data.Reader
	unread  []string
	ranks   []restoreRank    // of the attempt; ranks that do not participate here want nothing
	files   map[string]int64 // sizes of the checkpoint's lent files, by path
	verdict *verdict         // of ranks that verify what they copy; nil: no rank does
	took    *float64         // seconds of the resolution; nil: another process has resolved it
	opened  time.Time        // when the checkpoint was open
	shared  *shared          // blocks that other nodes read too; nil: none
	decided bool             // the outcome of the load has been reported for all nodes
}

// restoreRank holds the wants of one rank and their places.
type restoreRank struct {
	items   []client.Item
	wants   []checkpoint.Want
	of      []int // item of each want
	planned planner.Loaded
	reads   []checkpoint.Read
	sizes   []int64 // of the wants
	offsets []int64 // in the arena
	size    int64
	arena   *staging.Arena

	verifies bool   // the rank verifies what it copies
	spots    []spot // by want; nil: none is lent
	shared   []bool // by want: other nodes read some of its blocks too; nil: of no want
}

// run reads a load for all ranks. On return nothing writes to their arenas.
func (l *Loader) run(ctx context.Context, ld *load) []answer {
	r := &restore{l: l, key: l.key(ld.of, ld.ranks), n: ld.n, part: ld.local, ranks: make([]restoreRank, l.cfg.World)}
	for _, rank := range r.part {
		r.ranks[rank].items = ld.asked[rank].Items
	}
	begun, err := r.begin(ctx, ld)
	if !begun {
		return r.refused(&ConflictError{err})
	}
	var errs []error
	if err == nil {
		errs, err = r.plan(ctx, ld.asked)
	}
	if err == nil {
		err = r.prepare(ctx)
	}
	if err == nil {
		err = r.readBeside(ctx)
	}
	if err == nil {
		return r.answers()
	}
	if errs == nil {
		if !r.decided {
			err = unreadable(r.ckpt, err)
		}
		errs = slices.Repeat([]error{err}, len(r.ranks))
	}
	err = r.fail(errs, err)
	out := make([]answer, len(r.ranks))
	for rank := range r.ranks {
		if a := r.ranks[rank].arena; a != nil {
			err = errors.Join(err, l.cfg.Arenas.Drop(a))
		}
		if lent := r.ranks[rank].lent(); len(lent) > 0 {
			l.cfg.Arenas.Release(lent)
		}
	}
	for rank := range out {
		out[rank].err = errors.Join(errs[rank], err)
	}
	return out
}

// joined joins the errors without duplicates.
func joined(errs []error) error {
	var out []error
	for _, err := range errs {
		if !slices.Contains(out, err) {
			out = append(out, err)
		}
	}
	return errors.Join(out...)
}

// refused answers all ranks with an error.
func (r *restore) refused(err error) []answer {
	return slices.Repeat([]answer{{err: err}}, len(r.ranks))
}

// begin opens the checkpoint of the load. begun reports that the log has the load.
func (r *restore) begin(ctx context.Context, ld *load) (begun bool, err error) {
	var at resolution
	if r.l.cfg.Coordinator != nil {
		begun = true
		at, err = r.l.adopt(ctx, ld.reply)
	} else {
		at, err = r.l.cfg.resolve(ctx, ld.n, ld.asks(), ld.fqns())
	}
	r.ckpt, r.reader, r.unread = at.ckpt, at.reader, at.unread
	if err != nil {
		return begun, err
	}
	if r.opened = time.Now(); r.l.cfg.Coordinator == nil {
		r.took = events.Seconds(at.took)
	}
	r.planner = planner.NewLoader(at.manifest.Layout)
	for _, rank := range r.part {
		r.ranks[rank].verifies = at.verifies
	}
	return true, nil
}

// read reads the wants of all ranks, except those that a rank takes from a slot
// or verifies itself. It reads each block once, and then reports the load.
func (r *restore) read(ctx context.Context, held staging.Copies, lent Report) error {
	var wants []checkpoint.Want
	var all, reads []checkpoint.Read
	var dst loadTarget
	checked := int64(0) // bytes of files that ranks verify
	for rank := range r.ranks {
		of := &r.ranks[rank]
		base := len(wants)
		wants = append(wants, of.wants...)
		all = append(all, of.reads...)
		for _, read := range of.reads {
			if at := of.spot(read.Want); at.check != nil && at.arena == nil {
				checked += of.sizes[read.Want]
			} else if at.arena == nil {
				read.Want += base
				reads = append(reads, read)
			}
		}
		for i := range of.wants {
			dst = append(dst, of.target(i))
		}
	}
	own, peers := held.BySource()
	slots, rest, err := r.fromSlots(ctx, own, wants, reads, dst)
	copied := int64(0)
	if err == nil {
		copied, rest, err = r.fromSlots(ctx, peers, wants, rest, dst)
	}
	if err != nil {
		return err
	}
	files, passed := int64(0), int64(0)
	if own, ok := r.reader.(*data.FileReader); ok && r.shared != nil {
		files, passed, err = own.ReadPassed(ctx, wants, rest, dst, r.shared.passing())
	} else if len(rest) > 0 {
		files, err = r.reader.ReadData(ctx, wants, rest, dst)
	}
	if err != nil {
		return err
	}
	return r.record(ctx, all, Report{Slots: lent.Slots + slots, Peers: lent.Peers + copied, Passed: passed, Files: files + checked})
}

// record reports the reads of every rank and the completion of the load: at once, or
// after the ranks that verify their copies have confirmed them.
func (r *restore) record(ctx context.Context, reads []checkpoint.Read, got Report) error {
	for _, rank := range r.part {
		of := r.ranks[rank]
		got.Parts = append(got.Parts, Part{Rank: rank, Reads: len(of.reads), Bytes: r.planner.Stored(of.reads)})
	}
	got.Wanted = got.Parts[0].Bytes
	if len(got.Parts) > 1 { // reads of several ranks are stored once
		got.Wanted = r.planner.Stored(reads)
	}
	got.Resolve, got.Read = r.took, events.Seconds(time.Since(r.opened))
	if r.verdict = newVerdict(r, got); r.verdict != nil {
		return nil
	}
	return r.complete(ctx, got)
}

// answers returns the answer of each rank, with the places of its items.
func (r *restore) answers() []answer {
	out := make([]answer, len(r.ranks))
	for rank := range r.ranks {
		out[rank] = r.answer(rank, &r.ranks[rank])
	}
	return out
}

// answer returns the answer of a rank.
func (r *restore) answer(rank int, of *restoreRank) answer {
	out := answer{arena: of.arena, slots: of.lent(), verdict: r.verdict, by: loan{rank: rank, load: r.n}}
	reply := client.LoadReply{
		Checkpoint: r.ckpt.ID, Step: r.ckpt.Step, Load: r.n, Arenas: []client.LoadArena{}, Unread: r.unread,
		In: make([]int, len(of.items)), Offsets: make([]int64, len(of.items)), Sizes: make([]int64, len(of.items)),
	}
	number := map[spot]int{} // a file's spot has only its path
	name := func(s spot, path string, size int64) {
		number[s] = len(reply.Arenas)
		reply.Arenas = append(reply.Arenas, client.LoadArena{Path: path, Size: size})
	}
	for _, a := range out.slots {
		name(spot{arena: a}, a.Path(), int64(len(a.Data())))
	}
	for _, path := range of.lentFiles() {
		name(spot{file: path}, path, r.files[path])
	}
	if of.arena != nil {
		name(spot{arena: of.arena}, of.arena.Path(), of.size)
	}
	for item := range reply.Sizes {
		reply.Sizes[item] = -1
	}
	for i, item := range of.of {
		if of.absent(i) {
			continue
		}
		at := of.spot(i)
		if !at.lent() {
			at = spot{arena: of.arena, off: of.offsets[i]}
		}
		reply.In[item], reply.Offsets[item], reply.Sizes[item] = number[spot{arena: at.arena, file: at.file}], at.off, of.sizes[i]
		if at.check != nil {
			if reply.Checks == nil {
				reply.Checks = &client.Checks{}
			}
			reply.Checks.Add(item, at.check.Before, at.check.After, at.check.Sums)
		}
	}
	out.reply = reply
	return out
}

// loadTarget holds the buffers of the wants of all ranks.
type loadTarget [][]byte

// Want implements data.Destination.
func (t loadTarget) Want(i int) []byte { return t[i] }
