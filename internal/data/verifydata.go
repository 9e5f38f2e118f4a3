package data

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"math"
	"slices"
	"sync"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/crc32c"
	"github.com/ckptstore/ckptstore/internal/data/scan"
	"github.com/ckptstore/ckptstore/internal/format/safetensors"
	"github.com/ckptstore/ckptstore/internal/object"
	"golang.org/x/sync/errgroup"
)

// data checks one data file of an index: its size and header immediately, each chunk in a
// goroutine of its own, or of a file whose reads are requests each stretch of chunks. The file
// is open until the last is done.
func (v *verifier) data(ctx context.Context, g *errgroup.Group, x *checkpoint.Index, n int) {
	name := findingName(x.Files[n])
	shared := &sharedFile{path: v.files.path(x, n), users: 1, opener: func(ctx context.Context) (object.Object, error) { return v.files.open(ctx, x, n) }}
	defer shared.done()
	file, err := shared.open(ctx)
	if err != nil {
		v.breaks(x)
		v.findError(name, err)
		return
	}
	stretches := v.stretches(file, x, n)
	first := file
	if len(stretches) > 0 && len(stretches[0].entries) > 0 && !v.quick {
		// The first stream tells the size, and begins with the header.
		var stop func()
		if first, stop, err = scan.Play(file, 0, stretches[0].end); err != nil {
			v.breaks(x)
			v.findError(name, err)
			return
		}
		stretches[0].on, stretches[0].stop = first, stop
		defer func() {
			if len(stretches) > 0 && stretches[0].stop != nil {
				stretches[0].stop()
			}
		}()
	}
	info, err := first.Stat()
	if err != nil {
		v.breaks(x)
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
	attested := v.quick && !v.sizes && !x.Verbatim() && !x.Adopted() && v.attested(x, n, info)
	if v.quick && !attested && n == 0 { // others are those of earlier checkpoints
		v.bySize(size)
	}
	if x.Verbatim() {
		if !v.quick {
			v.checkFrames(ctx, x, n, file)
		}
	} else if !x.Adopted() {
		if !v.sizes && !attested {
			v.header(x, n, first, size)
		}
	} else if err := unchanged(x, n, info); err != nil {
		// The places of its chunks are unknown now.
		v.breaks(x)
		if size == want {
			v.find(Mismatch, name, "%v", err)
		}
		return
	}
	if v.quick {
		return
	}
	for _, s := range stretches {
		shared.again()
		g.Go(func() error {
			defer shared.done()
			return v.stretch(ctx, x, name, file, s)
		})
	}
	if stretches != nil {
		stretches = nil // their goroutines stop the streams
		return
	}
	known := info.ID != ""
	for i := range x.Entries {
		e := &x.Entries[i]
		if e.File != n {
			continue
		}
		shared.again()
		g.Go(func() error {
			defer shared.done()
			if !known || !e.Learned() {
				return v.chunk(ctx, x, name, file, e, nil)
			}
			return v.chunkOnce(ctx, x, name, file, e, chunkPlace{info.ID, e.Offset, e.Item.Bytes, e.Digest})
		})
	}
}

// attested compares the checksum that a server attests for a rank's own file with those of the
// index. It reports whether that settles the file: if not, its header is read.
func (v *verifier) attested(x *checkpoint.Index, n int, info object.Info) bool {
	if n > 0 || !info.Attested || info.Size != x.Files[n].Size {
		return false
	}
	want, ok := fileSum(x)
	if !ok {
		return false
	}
	if want != info.Sum {
		v.add(Finding{
			Kind: Corrupt, File: findingName(x.Files[n]), Block: -1, Offset: -1,
			Problem: fmt.Sprintf("the server keeps the checksum %08x, the index gives %08x: verify without --quick finds the tensors", info.Sum, want),
		})
		return true
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.report.Attested += info.Size
	return true
}

// bySize counts a file whose checksum was not compared.
func (v *verifier) bySize(size int64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.report.BySize += size
}

// fileSum returns the CRC-32C of the rank's own file, from its header, which follows from the
// items, and from the sums of its blocks.
func fileSum(x *checkpoint.Index) (sum uint32, ok bool) {
	var items []checkpoint.Item
	var own []*checkpoint.Entry
	for _, i := range x.Own() {
		items = append(items, x.Entries[i].Item)
		own = append(own, &x.Entries[i])
	}
	_, _, header, err := layOut(x.Rank, items, reuse{})
	if err != nil {
		return 0, false
	}
	slices.SortStableFunc(own, func(a, b *checkpoint.Entry) int { return cmp.Compare(a.Offset, b.Offset) })
	sum = crc32c.Checksum(header)
	at := int64(len(header))
	for _, e := range own {
		if e.Offset != at || int64(len(e.Sums)) != checkpoint.Blocks(e.Item.Bytes) {
			return 0, false
		}
		for left, block := e.Item.Bytes, 0; left > 0; block++ {
			size := min(left, checkpoint.BlockSize)
			sum = crc32c.Combine(sum, e.Sums[block], size)
			left -= size
		}
		at += e.Item.Bytes
	}
	return sum, at == x.Files[0].Size
}

// stretch is a run of a file that has some chunks, and is read as one stream.
type stretch struct {
	entries []*checkpoint.Entry // in the order of the file
	end     int64
	on      object.Object // the stream, if it has begun
	stop    func()
}

// stretchSpans is how many spans a stretch has: files are verified next to each other, so
// their streams may be longer than those of a load, which waits for the last.
const stretchSpans = 4

// stretches returns the stretches of a file whose reads are requests: chunks next to each
// other, up to the span of its backend together, and larger ones alone. For another file it
// returns nil.
func (v *verifier) stretches(file object.Object, x *checkpoint.Index, n int) []*stretch {
	if _, far := file.(object.Ranger); !far || x.Adopted() {
		return nil
	}
	span := stretchSpans * v.root.b.Reading().Span
	var entries []*checkpoint.Entry
	for i := range x.Entries {
		if x.Entries[i].File == n {
			entries = append(entries, &x.Entries[i])
		}
	}
	slices.SortStableFunc(entries, func(a, b *checkpoint.Entry) int { return cmp.Compare(a.Offset, b.Offset) })
	out := []*stretch{{}}
	from := int64(0) // of the last; the first begins with the header
	for _, e := range entries {
		last, end := out[len(out)-1], e.Offset+e.Item.Bytes
		// Tied chunks lie at the same place, in front of the end of a stream: each has a
		// stream of its own.
		// Of a file of another checkpoint, the first chunks may be of no use here.
		if (len(last.entries) > 0 || e.Offset > span) && (end-from > span || e.Offset < last.end || e.Offset-last.end > span/gapShare) {
			last, from = &stretch{}, e.Offset
			out = append(out, last)
		}
		last.entries, last.end = append(last.entries, e), end
	}
	return out
}

// stretch checks the chunks of a stretch, one after the other.
func (v *verifier) stretch(ctx context.Context, x *checkpoint.Index, name string, file object.Object, s *stretch) error {
	if s.stop != nil {
		defer s.stop()
	} else if len(s.entries) > 0 {
		on, stop, err := scan.Play(file, s.entries[0].Offset, s.end)
		if err != nil {
			v.breaks(x)
			v.findError(name, err)
			return nil
		}
		defer stop()
		s.on = on
	}
	for _, e := range s.entries {
		if err := v.chunk(ctx, x, name, s.on, e, nil); err != nil {
			return err
		}
	}
	return nil
}

// uncheckable counts a chunk that could not be compared.
func (v *verifier) uncheckable() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.report.Unknown++
}

// header checks what other readers of the file see. A rank's own file has exactly the header
// that its items give, byte for byte.
func (v *verifier) header(x *checkpoint.Index, n int, file object.Object, size int64) {
	name := x.Files[n].Name
	if n > 0 && (checkpoint.IsLink(name) || x.Files[n].From != checkpoint.Ref{}) {
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
	problem := "the header differs from the written one"
	if _, err := safetensors.Parse(file, size); err != nil {
		problem += ": " + err.Error()
	}
	v.add(Finding{Kind: Corrupt, File: name, Block: -1, Offset: int64(at), Problem: problem})
}

// chunkOnce checks a chunk, unless a parallel verification came to the same bytes first: then
// it takes over the findings of that verification.
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

// chunk checks the checksum of every block of a chunk, and its digest. It fills in unknown
// ones, if the chunk matches its record. It also stores its findings in seen, if that is not
// nil.
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
	src, err := scan.InOrder(e, file)
	if err != nil {
		found(Unreadable, -1, e.Offset, err.Error())
		return nil
	}
	if !e.Learned() {
		return v.learnChunk(ctx, file, src, e, found)
	}
	hash, damaged := scan.NewHasher(), false
	defer hash.Free()
	if ok, err := v.scanChunk(ctx, src, e, found, func(window []byte, at int64) {
		hash.Add(window)
		first := at / checkpoint.BlockSize
		scan.DamagedBlocks(window, e.Sums[first:], func(k int, got uint32) {
			damaged = true
			block := first + int64(k)
			found(Corrupt, block, e.Offset+block*checkpoint.BlockSize,
				fmt.Sprintf("checksum of the block is %08x, want %08x", got, e.Sums[block]))
		})
	}); !ok {
		return err
	}
	if got := hash.Digest(); got != e.Digest && !damaged {
		found(Corrupt, -1, e.Offset, fmt.Sprintf("digest of the chunk is %s, want %s", got, e.Digest))
	}
	return nil
}

// learnChunk computes the unknown digest and checksums of a chunk, if the chunk matches its
// record.
func (v *verifier) learnChunk(ctx context.Context, file object.Object, src io.ReaderAt, e *checkpoint.Entry, found foundFunc) error {
	d, rec := scan.NewDigester(e.Item.Bytes), recordSum{Record: e.Record}
	defer d.Free()
	if ok, err := v.scanChunk(ctx, src, e, found, func(window []byte, at int64) {
		d.Add(window)
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
	e.Digest, e.Sums = d.End()
	return nil
}

// scanChunk scans a chunk at the pace of the verification and counts it. ok is false if the
// chunk is incomplete, which is a finding, or if err is set.
func (v *verifier) scanChunk(ctx context.Context, src io.ReaderAt, e *checkpoint.Entry, found foundFunc, visit func(window []byte, at int64)) (ok bool, err error) {
	_, err = scan.Windows(ctx, src, e.Offset, e.Offset+e.Item.Bytes, func(window []byte, at int64) error {
		visit(window, at-e.Offset)
		v.count(0, 0, int64(len(window)))
		if v.pace == nil {
			return nil
		}
		return v.pace(ctx, int64(len(window)))
	})
	if short := scan.ShortOf(err); short != nil {
		kind, problem := Truncated, "the file ends here"
		if !short.Ends() {
			kind, problem = Unreadable, short.Err.Error()
		}
		found(kind, (short.At-e.Offset)/checkpoint.BlockSize, short.At, problem)
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

// linkHeader checks that the header of a linked or named file and the index agree about the
// reused chunks. The file's other contents belong to another checkpoint.
func (v *verifier) linkHeader(x *checkpoint.Index, n int, file object.Object, size int64) {
	name := findingName(x.Files[n])
	h, err := safetensors.Parse(file, size)
	if err != nil {
		if size == x.Files[n].Size {
			v.find(Corrupt, name, "%v", err)
		}
		return // cut off, which is a finding already
	}
	at := make(map[string]safetensors.Tensor, len(h.Tensors))
	for _, t := range h.Tensors {
		at[t.Name] = t
	}
	for i := range x.Entries {
		e := &x.Entries[i]
		if e.File != n {
			continue
		}
		if t, ok := at[e.Key]; !ok || h.DataStart+t.Start != e.Offset || t.End-t.Start != e.Item.Bytes {
			v.add(Finding{
				Kind: Corrupt, File: name, FQN: e.Item.Shard.FQN, Chunk: e.BoxString(), Block: -1, Offset: e.Offset,
				Problem: fmt.Sprintf("the header does not place the chunk %q here", e.Key),
			})
		}
	}
}

// checkFrames compares the bytes between the chunks of a verbatim file with their checksums.
func (v *verifier) checkFrames(ctx context.Context, x *checkpoint.Index, n int, file object.Object) {
	name := x.Files[n].Name
	for _, f := range x.Frames[n] {
		_, err := scan.Windows(ctx, file, f.Offset, f.Offset+f.Size, func(window []byte, at int64) error {
			first := (at - f.Offset) / checkpoint.BlockSize
			scan.DamagedBlocks(window, f.Sums[first:], func(k int, got uint32) {
				block := first + int64(k)
				v.add(Finding{
					Kind: Corrupt, File: name, Block: -1, Offset: f.Offset + block*checkpoint.BlockSize,
					Problem: fmt.Sprintf("checksum of the bytes between tensors is %08x, want %08x", got, f.Sums[block]),
				})
			})
			return nil
		})
		if short := scan.ShortOf(err); short != nil && !short.Ends() {
			v.add(Finding{Kind: Unreadable, File: name, Block: -1, Offset: short.At, Problem: short.Err.Error()})
		}
		if err != nil {
			return // a file that is too short gave a finding already
		}
	}
}

// Together is the shared state of parallel verifications: the number of chunks read at a
// time, and the chunks that were read already. A file that is linked into several checkpoints
// is then read once, and its damage is a finding of each. A Together is for one round: it
// reads nothing twice.
type Together struct {
	reading chan struct{} // its capacity is the number of chunks read at a time

	mu   sync.Mutex
	seen map[chunkPlace]*seenChunk
}

// NewTogether begins a round of verifications of a root's checkpoints.
func (r *Root) NewTogether() *Together { return newTogether(r.readers()) }

func newTogether(reading int) *Together {
	return &Together{reading: make(chan struct{}, reading), seen: map[chunkPlace]*seenChunk{}}
}

// Each calls do for 0 to n-1, a few at a time, until a call fails.
func (t *Together) Each(ctx context.Context, n int, do func(ctx context.Context, i int) error) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(readers())
	for i := range n {
		if ctx.Err() != nil {
			break
		}
		g.Go(func() error { return do(ctx, i) })
	}
	return g.Wait()
}

// acquire waits until another chunk may be read.
func (t *Together) acquire(ctx context.Context) error {
	select {
	case t.reading <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (t *Together) release() { <-t.reading }

// chunkPlace is a range of bytes in a file and their expected digest.
type chunkPlace struct {
	file         string
	offset, size int64
	digest       checkpoint.Digest
}

// seenChunk holds the findings of the first verification that read a place.
type seenChunk struct {
	done     chan struct{} // closed when the rest is set
	read     bool          // to the end; otherwise nothing is known
	findings []Finding
}

// claim returns the state of a place. mine is true for the first caller, which must read the
// place and close done.
func (t *Together) claim(at chunkPlace) (c *seenChunk, mine bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c = t.seen[at]; c != nil {
		return c, false
	}
	c = &seenChunk{done: make(chan struct{})}
	t.seen[at] = c
	return c, true
}
