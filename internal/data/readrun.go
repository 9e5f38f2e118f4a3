package data

import (
	"context"
	"runtime"
	"sync"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data/blocks"
	"github.com/ckptstore/ckptstore/internal/data/scan"
	"github.com/ckptstore/ckptstore/internal/object"
)

const (
	taskBlocks = 64                  // read by one goroutine in one go: 4 MiB
	smallPart  = scan.WindowSize / 4 // bytes of a part that is read together with its neighbours
	gapShare   = 16                  // at most 1/gapShare of a combined read is unwanted
)

// run is one read of a goroutine: some blocks of a large chunk, or several small chunks next
// to each other in a file.
//
//	file   │ a │ b │░░│ c │           large            │ d │
//	runs   └── one read ──┘└ 4 MiB ─┘└ 4 MiB ─┘└ rest ─┘└──┘
type run struct {
	file  *sharedFile
	parts []part
}

// part is some blocks of a chunk.
type part struct {
	chunk  *chunkRead
	blocks blocks.Range
}

// from and to return the range of a part in the file, in bytes.
func (p part) from() int64 { return p.chunk.entry.Offset + p.blocks.Lo*checkpoint.BlockSize }

func (p part) to() int64 {
	return p.chunk.entry.Offset + min(p.blocks.Hi*checkpoint.BlockSize, p.chunk.entry.Item.Bytes)
}

// coalesce plans the reads of chunks, in the order of their files. It is a pure function. A
// block is in one part only. The gaps between parts that are read together are at most
// 1/[gapShare] of them.
func coalesce(chunks []*chunkRead, by reach) []run {
	var runs []run
	wanted := int64(0) // bytes of the last run
	for _, c := range chunks {
		if c.entry.Strides != nil {
			// Strided chunks are read as a whole.
			if len(c.blocks) > 0 {
				runs, wanted = append(runs, run{parts: []part{{c, c.blocks[0]}}}), scan.WindowSize
			}
			continue
		}
		for _, b := range c.blocks {
			for lo := b.Lo; lo < b.Hi; {
				p := part{c, blocks.Range{Lo: lo, Hi: min(lo+by.task, b.Hi)}}
				n := len(runs) - 1
				if n >= 0 && by.fill {
					p.blocks.Hi = runs[n].fill(p, by)
				}
				size := p.to() - p.from()
				if n >= 0 && runs[n].takes(p, size, wanted, by) {
					runs[n].parts = append(runs[n].parts, p)
					wanted += size
				} else {
					p.blocks.Hi = min(lo+by.task, b.Hi)
					runs, wanted = append(runs, run{parts: []part{p}}), p.to()-p.from()
				}
				lo = p.blocks.Hi
			}
		}
	}
	return runs
}

// takes reports whether a part is read together with the parts of a run, of which wanted
// bytes are wanted.
func (r *run) takes(p part, size, wanted int64, by reach) bool {
	first, last := r.parts[0], r.parts[len(r.parts)-1]
	if first.chunk.path != p.chunk.path || first.chunk.entry.Strides != nil || size > by.small || last.to()-last.from() > by.small {
		return false
	}
	all := p.to() - first.from()
	return p.from() >= last.to() && all <= by.most && all-wanted-size <= (wanted+size)/gapShare
}

// fill returns the end of as many blocks of a part as the run has space for; that of the
// part, if it has none.
func (r *run) fill(p part, by reach) int64 {
	end := r.parts[0].from() + by.most
	if n := (end - p.from()) / checkpoint.BlockSize; p.to() > end && n > 0 {
		return p.blocks.Lo + n
	}
	return p.blocks.Hi
}

// read reads, verifies and copies, a window at a time. It returns the number of bytes read
// from the file.
func (r *run) read(ctx context.Context) (int64, error) {
	first := r.parts[0]
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	file, err := r.file.open(ctx)
	if err != nil {
		return 0, first.chunk.missing(r.file.path, err)
	}
	if first.chunk.entry.Strides != nil {
		return first.chunk.readStrided(ctx, r.file.path, file)
	}
	if len(r.parts) == 1 {
		return first.chunk.readBlocks(ctx, r.file.path, file, first.blocks)
	}
	if _, far := file.(object.Ranger); far {
		return r.readStream(ctx, file)
	}
	buf := scan.Buffers.Get().(*[]byte)
	defer scan.Buffers.Put(buf)
	all := (*buf)[:r.parts[len(r.parts)-1].to()-first.from()]
	n, err := file.ReadAt(all, first.from())
	for _, p := range r.parts {
		lo, hi := p.from()-first.from(), p.to()-first.from()
		if int64(n) < hi {
			return int64(n), p.chunk.short(r.file.path, max(int64(n)-lo, 0)+p.blocks.Lo*checkpoint.BlockSize, err)
		}
		if err := p.chunk.take(r.file.path, all[lo:hi], p.blocks.Lo); err != nil {
			return int64(n), err
		}
	}
	return int64(n), nil
}

// readStream reads the parts from one stream.
func (r *run) readStream(ctx context.Context, file object.Object) (total int64, err error) {
	first, last := r.parts[0], r.parts[len(r.parts)-1]
	src, stop, err := scan.Play(file, first.from(), last.to())
	if err != nil {
		return 0, first.chunk.missing(r.file.path, err)
	}
	defer stop()
	for _, p := range r.parts {
		n, err := p.chunk.readBlocks(ctx, r.file.path, src, p.blocks)
		total += n
		if err != nil {
			return total, err
		}
	}
	return last.to() - first.from(), nil
}

// sharedFile is a file that is open from its first user to its last. Since users come in the
// order of the files, few are open at a time.
type sharedFile struct {
	path   string
	opener func(context.Context) (object.Object, error)
	check  func(object.Info) error // of the open file; nil: none

	mu    sync.Mutex
	users int
	file  object.Object
}

func (f *sharedFile) open(ctx context.Context) (object.Object, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.file == nil {
		file, err := f.opener(ctx)
		if err != nil {
			return nil, err
		}
		if f.check != nil {
			info, err := file.Stat()
			if err == nil {
				err = f.check(info)
			}
			if err != nil {
				_ = file.Close() // nothing was written to it
				return nil, err
			}
		}
		f.file = file
	}
	return f.file, nil
}

// again adds a user, possibly after the file was closed.
func (f *sharedFile) again() *sharedFile {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.users++
	return f
}

// done closes the file after its last user. Nothing was written to it, so an error of Close
// does not matter.
func (f *sharedFile) done() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.users--; f.users == 0 && f.file != nil {
		_ = f.file.Close()
		f.file = nil
	}
}

// reach is how much is read at once.
type reach struct {
	task  int64 // blocks read by one goroutine in one go
	small int64 // bytes of a part that is read together with its neighbours
	most  int64 // bytes of parts that are read together
	fill  bool  // parts are cut so that together they have most bytes
}

// near is the reach for files whose reads are no requests.
var near = reach{task: taskBlocks, small: smallPart, most: scan.WindowSize}

// reachOf returns the reach for a backend: where each read is a request, requests of a span.
func reachOf(r object.Reading) reach {
	if r.Span == 0 {
		return near
	}
	span := max(r.Span/checkpoint.BlockSize, 1)
	return reach{task: span, small: span * checkpoint.BlockSize, most: span * checkpoint.BlockSize, fill: true}
}

// readers returns the number of runs read at a time: some wait for the disk, or all for the
// network.
func (r *Root) readers() int {
	if depth := r.b.Reading().Depth; depth > 0 {
		return depth
	}
	return readers()
}

// readers returns the number of runs read at a time where that is a matter of cores: some
// wait for the disk.
func readers() int { return runtime.GOMAXPROCS(0) + 2 }
