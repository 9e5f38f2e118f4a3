package api

import (
	"context"
	"sync"

	"github.com/ckptstore/ckptstore/internal/answer"
)

// Timeline are the counts of a log's events by family, along the log.
type Timeline struct {
	Sequence uint64 `json:"sequence"` // of the last event that is counted
	Width    uint64 `json:"width"`    // events of a column; the last column may have fewer
	// From is the first event of the first column. An answer reads a part of a long log, from its end
	// backwards, and the server keeps the counts: ask again until From is 1.
	From     uint64           `json:"from"`
	Families map[string][]int `json:"families"` // a count for each column, by family
}

// OfTimeline is how many columns the timeline has.
type OfTimeline struct {
	Moment
	Columns int `query:"columns" minimum:"1" maximum:"1000" default:"120" doc:"Most columns"`
}

// blockEvents is how many events a block of a census has. The counts of a block fit into bytes.
const blockEvents = 100

// census has the counts of events by family in the blocks of a log that were read. Block n has the
// events from n*blockEvents+1 on. A block that is full never changes, so it is read once.
type census struct {
	turn chan struct{} // held while the log is read
	most uint64        // blocks that are read for an answer

	mu     sync.Mutex
	known  []bool             // by block
	counts map[string][]uint8 // by family and block
}

func newCensus() *census {
	return &census{turn: make(chan struct{}, 1), most: mostRead / blockEvents, counts: map[string][]uint8{}}
}

// has reports whether a block is known.
func (c *census) has(block uint64) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return block < uint64(len(c.known)) && c.known[block]
}

// put adds the counts of a block.
func (c *census) put(block uint64, of map[string]int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if n := int(block) + 1 - len(c.known); n > 0 {
		c.known = append(c.known, make([]bool, n)...)
	}
	c.known[block] = true
	for family, count := range of {
		all := c.counts[family]
		if n := int(block) + 1 - len(all); n > 0 {
			all = append(all, make([]uint8, n)...)
		}
		all[block] = uint8(count)
		c.counts[family] = all
	}
}

// column returns the sums of blocks by family.
func (c *census) column(from, until uint64) map[string]int {
	c.mu.Lock()
	defer c.mu.Unlock()
	sums := map[string]int{}
	for family, all := range c.counts {
		for _, n := range all[min(from, uint64(len(all))):min(until, uint64(len(all)))] {
			sums[family] += int(n)
		}
	}
	return sums
}

// read counts the events of the log from a sequence on, in blocks.
func (h *Handler) read(ctx context.Context, from, until uint64, visit func(block uint64, of map[string]int)) error {
	block, of := (from-1)/blockEvents, map[string]int{}
	for r, err := range h.store.Log.Read(ctx, from, until) {
		if err != nil {
			return err
		}
		for at := (r.Sequence - 1) / blockEvents; block < at; block++ {
			visit(block, of)
			of = map[string]int{}
		}
		of[r.Kind.Family()]++
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	for ; block <= (until-1)/blockEvents; block++ {
		visit(block, of)
		of = map[string]int{}
	}
	return nil
}

// fill reads the unknown blocks before a given one, the last ones first, until it has read as many
// events as an answer may read. It returns the first block from which on all are known.
func (h *Handler) fill(ctx context.Context, below uint64) (uint64, error) {
	select {
	case h.census.turn <- struct{}{}:
		defer func() { <-h.census.turn }()
	case <-ctx.Done():
		return 0, context.Cause(ctx)
	}
	for left := h.census.most; ; {
		for below > 0 && h.census.has(below-1) {
			below--
		}
		if below == 0 || left == 0 {
			return below, nil
		}
		first := below
		for ; first > 0 && left > 0 && !h.census.has(first-1); first-- {
			left--
		}
		if err := h.read(ctx, first*blockEvents+1, below*blockEvents, h.census.put); err != nil {
			return 0, err
		}
	}
}

func (h *Handler) timeline(ctx context.Context, from *at, in *OfTimeline) (Timeline, error) {
	out := Timeline{Sequence: from.Sequence, Families: map[string][]int{}}
	if err := h.needsLog(); err != nil {
		return out, err
	}
	if in.AsOf > from.Sequence {
		return out, answer.PastEnd("as-of", in.AsOf, from.Sequence)
	}
	if in.AsOf > 0 {
		out.Sequence = in.AsOf
	}
	full := out.Sequence / blockEvents
	known, err := h.fill(ctx, full)
	if err != nil {
		return out, err
	}
	rest := map[string]int{} // of the last block, which is not full
	if full*blockEvents < out.Sequence {
		if err := h.read(ctx, full*blockEvents+1, out.Sequence, func(_ uint64, of map[string]int) { rest = of }); err != nil {
			return out, err
		}
	}
	wide := uint64(1) // blocks of a column
	for (out.Sequence+wide*blockEvents-1)/(wide*blockEvents) > uint64(in.Columns) {
		wide *= 2
	}
	out.Width = wide * blockEvents
	first, last := (known+wide-1)/wide, (out.Sequence+out.Width-1)/out.Width
	out.From = first*out.Width + 1
	for column := first; column < last; column++ {
		sums := h.census.column(column*wide, min(full, (column+1)*wide))
		if column == last-1 {
			for family, n := range rest {
				sums[family] += n
			}
		}
		for family, n := range sums {
			if out.Families[family] == nil {
				out.Families[family] = make([]int, last-first)
			}
			out.Families[family][column-first] = n
		}
	}
	from.final = in.AsOf > 0 && out.From == 1
	return out, nil
}

// moment implements [asked]: counts need no views.
func (in OfTimeline) moment() (uint64, bool, error) { return 0, false, nil }
