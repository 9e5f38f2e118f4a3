package data

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/crc32c"
	"github.com/ckptstore/ckptstore/internal/data/reuse"
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
	_, _, header, err := layOut(x.Rank, items, reuse.Plan{})
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
	_, _, want, err := layOut(x.Rank, items, reuse.Plan{})
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
