package data

import (
	"context"
	"fmt"
	"io"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/object"
)

// framesOf are the parts of a file of size bytes that no chunk in order covers,
// with their checksums.
func framesOf(ctx context.Context, x *checkpoint.Index, n int, file io.ReaderAt) ([]checkpoint.Frame, error) {
	at := int64(0)
	out := []checkpoint.Frame{}
	fill := func(to int64) error {
		if to <= at {
			return nil
		}
		var sums blockSums
		if _, err := scan(ctx, file, at, to, func(window []byte, _ int64) error {
			sums.add(window)
			return nil
		}); err != nil {
			return fmt.Errorf("read the bytes from %d to %d of %s: %w", at, to, x.Files[n].Name, err)
		}
		out = append(out, checkpoint.Frame{Offset: at, Size: to - at, Sums: sums.end()})
		return nil
	}
	chunks := x.Extents(n)
	for _, c := range chunks {
		if err := fill(c.Offset); err != nil {
			return nil, err
		}
		at = max(at, c.Offset+c.Size)
	}
	return out, fill(x.Files[n].Size)
}

// digestEntry finds the digest and checksums of a chunk by reading it.
func digestEntry(ctx context.Context, e *checkpoint.Entry, file object.Object) error {
	d := newDigester(e.Item.Bytes)
	defer d.free()
	src, err := inOrder(e, file)
	if err == nil {
		_, err = scan(ctx, src, e.Offset, e.Offset+e.Item.Bytes, func(window []byte, _ int64) error {
			d.add(window)
			return nil
		})
	}
	if err != nil {
		return fmt.Errorf("read %q: %w", e.Item.Shard.FQN, err)
	}
	e.Digest, e.Sums = d.end()
	return nil
}

// checkFrames compares what lies between the chunks of a verbatim file with its
// checksums.
func (v *verifier) checkFrames(ctx context.Context, x *checkpoint.Index, n int, file object.Object) {
	name := x.Files[n].Name
	for _, f := range x.Frames[n] {
		_, err := scan(ctx, file, f.Offset, f.Offset+f.Size, func(window []byte, at int64) error {
			first := (at - f.Offset) / checkpoint.BlockSize
			damagedBlocks(window, f.Sums[first:], func(k int, got uint32) {
				block := first + int64(k)
				v.add(Finding{
					Kind: Corrupt, File: name, Block: -1, Offset: f.Offset + block*checkpoint.BlockSize,
					Problem: fmt.Sprintf("checksum of the bytes between tensors is %08x, want %08x", got, f.Sums[block]),
				})
			})
			return nil
		})
		if short := shortOf(err); short != nil && !short.ends() {
			v.add(Finding{Kind: Unreadable, File: name, Block: -1, Offset: short.at, Problem: short.err.Error()})
		}
		if err != nil {
			return // a file that is too short is a finding already
		}
	}
}
