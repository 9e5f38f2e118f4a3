package data

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sort"
	"sync"
	"sync/atomic"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data/blocks"
)

// Several nodes that load the same blocks read each block from the files once: one of them
// reads it, verifies it, and passes it on. Each receiver verifies it by the index, as if it came
// from the file, so a node that passes on other bytes does no harm. What does not come is read
// from the files.
//
//	blocks of a rank   │ 0 1 2 3 │ 4 │ 5 6 7 8 9 │ ...    numbered over all chunks of its index
//	chunks             └── a ────┘ b └──── c ────┘

// BlockRange is a run of blocks of what a rank has saved, from Lo to before Hi. The blocks of
// all chunks of a rank's index are numbered in the order of its entries.
type BlockRange struct {
	Rank int   `json:"rank"`
	Lo   int64 `json:"lo"`
	Hi   int64 `json:"hi"`
}

// PassedBlocks are verified blocks of one chunk. All are whole, except the last one of the chunk.
type PassedBlocks struct {
	Rank  int
	Block int64 // number of the first one
	Data  []byte
}

// Passing describes which blocks of a load this node reads for other nodes, and which other
// nodes read for it. Blocks in neither are read from the files.
type Passing struct {
	// Own are read first, and Out is called for them, concurrently. Each call concerns blocks of
	// one range. Out keeps nothing of the data. Read is called when all are read.
	Own  []BlockRange
	Out  func(ctx context.Context, blocks PassedBlocks) error
	Read func()
	// In are awaited: Receive calls take for those that come, possibly concurrently, and returns
	// when no more will. An error of take means that its caller sends other bytes than the
	// checkpoint's.
	In      []BlockRange
	Receive func(ctx context.Context, take func(PassedBlocks) error)
}

// first returns the numbers of the first block of each entry of the rank, and that of the block
// after the last.
func (x *rankIndex) first() []int64 {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.starts == nil {
		x.starts = make([]int64, len(x.index.Entries)+1)
		for i, e := range x.index.Entries {
			x.starts[i+1] = x.starts[i] + checkpoint.Blocks(e.Item.Bytes)
		}
	}
	return x.starts
}

// passable reports whether other nodes can verify the blocks of a chunk.
func (c *chunkRead) passable() bool {
	return !c.index.Adopted() && c.entry.Learned() && c.entry.Strides == nil
}

// BlocksOf returns, for each read, the blocks that it needs, rising and with a gap between any
// two. It has none for a read of a chunk that is not passed on between nodes.
func (r *FileReader) BlocksOf(ctx context.Context, wants []checkpoint.Want, reads []checkpoint.Read) ([][]BlockRange, error) {
	out, err := r.blocksOf(ctx, wants, reads)
	return out, r.wrap("load", err)
}

func (r *FileReader) blocksOf(ctx context.Context, wants []checkpoint.Want, reads []checkpoint.Read) ([][]BlockRange, error) {
	if err := r.readable(ctx); err != nil {
		return nil, err
	}
	chunks := r.chunks()
	chunks.loadAhead(ctx, reads)
	_, of, err := chunks.resolve(ctx, wants, reads, nowhere{})
	if err != nil {
		return nil, err
	}
	out := make([][]BlockRange, len(reads))
	for n, c := range of {
		if !c.passable() {
			continue
		}
		region := reads[n].Region
		if wants[reads[n].Want].Value {
			region = c.box
		}
		if region.Empty() {
			continue
		}
		from := c.rank.first()[c.at]
		for _, b := range blocks.Touched(c.box, region, int64(c.size)) {
			out[n] = append(out[n], BlockRange{Rank: c.index.Rank, Lo: from + b.Lo, Hi: from + b.Hi})
		}
	}
	return out, nil
}

// nowhere is a destination without buffers.
type nowhere struct{}

// Want implements [Destination].
func (nowhere) Want(int) []byte { return nil }

// ReadPassed is [FileReader.ReadData] for a load that several nodes share. It returns how many
// bytes came from the files, and how many from other nodes.
func (r *FileReader) ReadPassed(ctx context.Context, wants []checkpoint.Want, reads []checkpoint.Read, dst Destination, p Passing) (files, passed int64, err error) {
	files, passed, err = r.readPassed(ctx, wants, reads, dst, p)
	return files, passed, r.wrap("load", err)
}

func (r *FileReader) readPassed(ctx context.Context, wants []checkpoint.Want, reads []checkpoint.Read, dst Destination, p Passing) (files, passed int64, err error) {
	if err := r.readable(ctx); err != nil {
		return 0, 0, err
	}
	from := r.chunks()
	from.loadAhead(ctx, reads)
	chunks, _, err := from.resolve(ctx, wants, reads, dst)
	if err != nil {
		return 0, 0, err
	}
	own, rest, in := divide(ctx, chunks, p)
	receiving, stop := context.WithCancel(ctx)
	defer stop()
	received := make(chan struct{})
	go func() {
		defer close(received)
		if len(in.chunks) > 0 {
			p.Receive(receiving, in.take)
		}
	}()
	files, err = from.readChunks(ctx, own)
	if err == nil {
		p.Read()
		var n int64
		n, err = from.readChunks(ctx, rest)
		files += n
	}
	if err != nil {
		stop()
	}
	<-received
	if err != nil {
		return files, in.bytes.Load(), err
	}
	n, err := from.readChunks(ctx, in.missing())
	return files + n, in.bytes.Load(), err
}

// divide splits the wanted blocks of chunks into those that this node reads for others, those
// that it reads for itself, and those that it awaits. Ranges of own blocks stay apart, because
// their readers differ.
func divide(ctx context.Context, chunks []*chunkRead, p Passing) (own, rest []*chunkRead, in *awaited) {
	mine, others := byRank(p.Own), byRank(p.In)
	in = &awaited{chunks: map[int][]*awaitedChunk{}}
	for _, c := range chunks {
		if !c.passable() {
			rest = append(rest, c)
			continue
		}
		starts := c.rank.first()
		lo, hi := starts[c.at], starts[c.at+1]
		read, wait := blocks.Clip(mine[c.index.Rank], lo, hi), blocks.Clip(others[c.index.Rank], lo, hi)
		if len(read) > 0 {
			part := *c
			part.blocks = read
			part.passOn = func(window []byte, first int64) error {
				return p.Out(ctx, PassedBlocks{Rank: c.index.Rank, Block: lo + first, Data: window})
			}
			own = append(own, &part)
		}
		if wait = blocks.Intersect(wait, c.blocks); len(wait) > 0 {
			a := &awaitedChunk{chunkRead: c, first: lo, end: hi, waiting: wait}
			in.chunks[c.index.Rank] = append(in.chunks[c.index.Rank], a)
		}
		if left := blocks.Subtract(c.blocks, blocks.Merge(append(slices.Clone(read), wait...))); len(left) > 0 {
			part := *c
			part.blocks = left
			rest = append(rest, &part)
		}
	}
	for _, of := range in.chunks {
		slices.SortFunc(of, func(a, b *awaitedChunk) int { return int(a.first - b.first) })
	}
	return own, rest, in
}

// byRank returns ranges by their ranks, rising.
func byRank(ranges []BlockRange) map[int][]blocks.Range {
	out := map[int][]blocks.Range{}
	for _, r := range ranges {
		out[r.Rank] = append(out[r.Rank], blocks.Range{Lo: r.Lo, Hi: r.Hi})
	}
	for _, of := range out {
		slices.SortFunc(of, func(a, b blocks.Range) int { return int(a.Lo - b.Lo) })
	}
	return out
}

// awaited are the chunks with blocks that other nodes read, by rank.
type awaited struct {
	chunks map[int][]*awaitedChunk // in the order of their blocks
	bytes  atomic.Int64            // that have come
}

// awaitedChunk is a chunk with blocks that other nodes read.
type awaitedChunk struct {
	*chunkRead
	first, end int64 // numbers of its blocks

	mu      sync.Mutex
	waiting []blocks.Range // that have not come
	damaged []blocks.Range // that came with other bytes
}

// errNotAwaited reports blocks that another node should not have sent.
var errNotAwaited = errors.New("these blocks are not awaited")

// take verifies blocks that another node has read, and copies their wanted parts.
func (a *awaited) take(p PassedBlocks) error {
	of := a.chunks[p.Rank]
	i := sort.Search(len(of), func(i int) bool { return of[i].end > p.Block })
	if i == len(of) || p.Block < of[i].first {
		return fmt.Errorf("block %d of rank %d: %w", p.Block, p.Rank, errNotAwaited)
	}
	c, size := of[i], int64(len(p.Data))
	b := blocks.Range{Lo: p.Block - c.first, Hi: p.Block - c.first + checkpoint.Blocks(size)}
	if size == 0 || b.Hi > c.end-c.first || size != min(b.Hi*checkpoint.BlockSize, c.entry.Item.Bytes)-b.Lo*checkpoint.BlockSize {
		return fmt.Errorf("block %d of rank %d: %d bytes: %w", p.Block, p.Rank, size, errNotAwaited)
	}
	if !c.claim(b) {
		return fmt.Errorf("block %d of rank %d: %w", p.Block, p.Rank, errNotAwaited)
	}
	err := c.verify("bytes that another node has passed on", b.Lo, p.Data)
	if err == nil {
		err = c.place(p.Data, b.Lo)
	}
	if err != nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.damaged = append(c.damaged, b)
		return err
	}
	a.bytes.Add(size)
	return nil
}

// claim takes blocks out of those that are awaited, if all of them are.
func (c *awaitedChunk) claim(b blocks.Range) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(blocks.Subtract([]blocks.Range{b}, c.waiting)) > 0 {
		return false
	}
	c.waiting = blocks.Subtract(c.waiting, []blocks.Range{b})
	return true
}

// missing returns what has not come, in the order of the files.
func (a *awaited) missing() (chunks []*chunkRead) {
	for _, of := range a.chunks {
		for _, c := range of {
			c.mu.Lock()
			if left := blocks.Merge(append(c.damaged, c.waiting...)); len(left) > 0 {
				part := *c.chunkRead
				part.blocks = left
				chunks = append(chunks, &part)
			}
			c.mu.Unlock()
		}
	}
	sortByPlace(chunks)
	return chunks
}
