package data

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/format/safetensors"
	"github.com/ckptstore/ckptstore/internal/object"
	"golang.org/x/sync/errgroup"
)

// data checks one data file of an index: its size and header at once, each
// chunk in a goroutine of its own. The file is open until the last is done.
func (v *verifier) data(ctx context.Context, g *errgroup.Group, x *checkpoint.Index, n int) {
	name := x.Files[n].Name
	shared := &sharedFile{path: v.files.path(x, n), users: 1, opener: func(ctx context.Context) (object.Object, error) { return v.files.open(ctx, x, n) }}
	defer shared.done()
	file, err := shared.open(ctx)
	if err != nil {
		v.breaks(x)
		v.findError(name, err)
		return
	}
	info, err := file.Stat()
	if err != nil {
		v.findError(name, err)
		return
	}
	v.count(1, 0, 0)
	size, want := info.Size, x.Files[n].Size
	if size < want {
		v.add(Finding{
			Kind: Truncated, File: name, Block: -1, Offset: size,
			Problem: fmt.Sprintf("the file has %d bytes, %d were written", size, want),
		})
	} else if size > want {
		v.add(Finding{
			Kind: Corrupt, File: name, Block: -1, Offset: want,
			Problem: fmt.Sprintf("the file has %d bytes, %d were written", size, want),
		})
	}
	if x.Verbatim() {
		if !v.quick {
			v.checkFrames(ctx, x, n, file)
		}
	} else if !x.Adopted() {
		if !v.sizes {
			v.header(x, n, file, size)
		}
	} else if err := unchanged(x, n, info); err != nil {
		// Where its chunks lie now, nobody knows.
		v.breaks(x)
		if size == want {
			v.find(Mismatch, name, "%v", err)
		}
		return
	}
	if v.quick {
		return
	}
	known := info.ID != (object.FileID{})
	for i := range x.Entries {
		e := &x.Entries[i]
		if e.File != n {
			continue
		}
		shared.mu.Lock()
		shared.users++
		shared.mu.Unlock()
		g.Go(func() error {
			defer shared.done()
			if !known || !e.Learned() {
				return v.chunk(ctx, x, name, file, e, nil)
			}
			return v.chunkOnce(ctx, x, name, file, e, chunkPlace{info.ID, e.Offset, e.Item.Bytes, e.Digest})
		})
	}
}

// uncheckable counts a chunk that could be compared with nothing.
func (v *verifier) uncheckable() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.report.Unknown++
}

// header checks what other readers of the file see. A rank's own file has the
// one header that its items give, byte for byte.
func (v *verifier) header(x *checkpoint.Index, n int, file object.Object, size int64) {
	name := x.Files[n].Name
	if n > 0 && checkpoint.IsLink(name) {
		v.linkHeader(x, n, file, size)
		return
	}
	var items []checkpoint.Item
	first := int64(math.MaxInt64)
	for _, i := range x.Own() {
		items = append(items, x.Entries[i].Item)
		first = min(first, x.Entries[i].Offset)
	}
	_, _, want, err := layOut(x.Rank, items, reuse{})
	if err != nil || n > 0 || name != checkpoint.DataFile(x.Rank) || len(items) > 0 && first != int64(len(want)) {
		v.find(Mismatch, name, "the index does not describe a file of this version (%v)", err)
		return
	}
	got := make([]byte, min(int64(len(want)), size))
	if k, err := file.ReadAt(got, 0); k < len(got) {
		v.findError(name, err)
		return
	}
	if bytes.Equal(got, want) {
		return
	}
	at := 0
	for at < len(got) && got[at] == want[at] {
		at++
	}
	if at == len(got) {
		return // cut off, which is a finding already
	}
	problem := "the header is not the one that was written"
	if _, err := safetensors.Parse(file, size); err != nil {
		problem += ": " + err.Error()
	}
	v.add(Finding{Kind: Corrupt, File: name, Block: -1, Offset: int64(at), Problem: problem})
}

// chunkOnce is chunk, unless a verification beside this one has come first to
// the same bytes: then what it has found is what this one finds.
func (v *verifier) chunkOnce(ctx context.Context, x *checkpoint.Index, name string, file object.Object, e *checkpoint.Entry, at chunkPlace) error {
	seen, mine := v.together.claim(at)
	if mine {
		err := v.chunk(ctx, x, name, file, e, seen)
		seen.read = err == nil
		close(seen.done)
		return err
	}
	select {
	case <-seen.done:
	case <-ctx.Done():
		return ctx.Err()
	}
	if !seen.read {
		return v.chunk(ctx, x, name, file, e, nil)
	}
	for _, f := range seen.findings {
		v.breaks(x)
		f.File, f.FQN, f.Chunk = name, e.Item.Shard.FQN, e.BoxString()
		v.add(f)
	}
	v.reused(e.Item.Bytes)
	return nil
}

// chunk checks the checksum of every block of a chunk, and its digest. Those
// that are not known are filled in, if the chunk is as its record says. What it
// finds it leaves in seen as well, if that is not nil.
func (v *verifier) chunk(ctx context.Context, x *checkpoint.Index, name string, file object.Object, e *checkpoint.Entry, seen *seenChunk) error {
	if err := v.together.acquire(ctx); err != nil {
		return err
	}
	defer v.together.release()
	found := func(kind Kind, block, offset int64, problem string) {
		f := Finding{
			Kind: kind, File: name, FQN: e.Item.Shard.FQN, Chunk: e.BoxString(),
			Block: int(block), Offset: offset, Problem: problem,
		}
		v.breaks(x)
		v.add(f)
		if seen != nil {
			seen.findings = append(seen.findings, f)
		}
	}
	src, err := inOrder(e, file)
	if err != nil {
		found(Unreadable, -1, e.Offset, err.Error())
		return nil
	}
	if !e.Learned() {
		return v.learnChunk(ctx, file, src, e, found)
	}
	hash, damaged := newHasher(), false
	defer hash.free()
	if ok, err := v.scanChunk(ctx, src, e, found, func(window []byte, at int64) {
		hash.add(window)
		first := at / checkpoint.BlockSize
		damagedBlocks(window, e.Sums[first:], func(k int, got uint32) {
			damaged = true
			block := first + int64(k)
			found(Corrupt, block, e.Offset+block*checkpoint.BlockSize,
				fmt.Sprintf("checksum of the block is %08x, want %08x", got, e.Sums[block]))
		})
	}); !ok {
		return err
	}
	if got := hash.digest(); got != e.Digest && !damaged {
		found(Corrupt, -1, e.Offset, fmt.Sprintf("digest of the chunk is %s, want %s", got, e.Digest))
	}
	return nil
}

// learnChunk takes the digest and checksums of a chunk of which they are not known, if
// the chunk is as its record says.
func (v *verifier) learnChunk(ctx context.Context, file object.Object, src io.ReaderAt, e *checkpoint.Entry, found foundFunc) error {
	d, rec := newDigester(e.Item.Bytes), recordSum{Record: e.Record}
	defer d.free()
	if ok, err := v.scanChunk(ctx, src, e, found, func(window []byte, at int64) {
		d.add(window)
		if e.Strides == nil {
			rec.add(window, e.Offset+at)
		}
	}); !ok {
		return err
	}
	problem, checked, err := "", e.Record != nil, error(nil)
	if e.Item.Value {
		problem, checked = archiveProblem(file, e)
	} else {
		problem, err = rec.problem(ctx, file)
	}
	if !checked {
		v.uncheckable()
	}
	if err != nil {
		return err
	}
	if problem != "" {
		found(Corrupt, -1, e.Offset, problem)
		return nil
	}
	e.Digest, e.Sums = d.end()
	return nil
}

// scanChunk scans a chunk at the pace of the verification and counts it. It is not ok
// if the chunk is not there as a whole, which is a finding, or if err says so.
func (v *verifier) scanChunk(ctx context.Context, src io.ReaderAt, e *checkpoint.Entry, found foundFunc, visit func(window []byte, at int64)) (ok bool, err error) {
	_, err = scan(ctx, src, e.Offset, e.Offset+e.Item.Bytes, func(window []byte, at int64) error {
		visit(window, at-e.Offset)
		v.count(0, 0, int64(len(window)))
		if v.pace == nil {
			return nil
		}
		return v.pace(ctx, int64(len(window)))
	})
	if short := shortOf(err); short != nil {
		kind, problem := Truncated, "the file ends here"
		if !short.ends() {
			kind, problem = Unreadable, short.err.Error()
		}
		found(kind, (short.at-e.Offset)/checkpoint.BlockSize, short.at, problem)
		return false, nil
	}
	if err != nil {
		return false, err
	}
	v.count(0, 1, 0)
	return true, nil
}

// foundFunc adds a finding about a chunk; offset is that in the file.
type foundFunc func(kind Kind, block, offset int64, problem string)
