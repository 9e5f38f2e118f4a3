package scan

import (
	"context"
	"io"
	"sync"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/crc32c"
	"github.com/zeebo/blake3"
)

// hashers are pooled because each has 10 KB, and many chunks of a checkpoint are small.
var hashers = sync.Pool{New: func() any { return blake3.New() }}

// DamagedBlock compares the blocks of a window with sums, the checksums from its first
// block on. It returns the first block that has another checksum, and that checksum;
// -1 if all are right.
func DamagedBlock(window []byte, sums []uint32) (block int, got uint32) {
	for block := 0; len(window) > 0; block++ {
		n := min(checkpoint.BlockSize, len(window))
		if got := crc32c.Checksum(window[:n]); got != sums[block] {
			return block, got
		}
		window = window[n:]
	}
	return -1, 0
}

// DamagedBlocks calls found for every block of a window that has another checksum.
func DamagedBlocks(window []byte, sums []uint32, found func(block int, got uint32)) {
	for first := 0; len(window) > 0; {
		block, got := DamagedBlock(window, sums[first:])
		if block < 0 {
			return
		}
		found(first+block, got)
		first += block + 1
		window = window[min((block+1)*checkpoint.BlockSize, len(window)):]
	}
}

// Digest returns the digest of the bytes of src from lo to hi.
func Digest(ctx context.Context, src io.ReaderAt, lo, hi int64) (checkpoint.Digest, error) {
	d := NewHasher()
	defer d.Free()
	_, err := Windows(ctx, src, lo, hi, d.window)
	return d.Digest(), err
}

// DigestBytes returns the digest of bytes in memory.
func DigestBytes(ctx context.Context, data []byte) (checkpoint.Digest, error) {
	d := NewHasher()
	defer d.Free()
	err := Bytes(ctx, data, d.window)
	return d.Digest(), err
}

// Hasher takes a BLAKE3 digest. It comes from a pool and must be freed.
type Hasher struct{ *blake3.Hasher }

// NewHasher returns a hasher from the pool.
func NewHasher() Hasher {
	h := hashers.Get().(*blake3.Hasher)
	h.Reset()
	return Hasher{h}
}

// Free returns the hasher to the pool.
func (h Hasher) Free() { hashers.Put(h.Hasher) }

// Add takes the next bytes.
func (h Hasher) Add(p []byte) { _, _ = h.Write(p) } // never fails

// window is a visit of a scan.
func (h Hasher) window(p []byte, _ int64) error {
	h.Add(p)
	return nil
}

// Digest returns the digest of all that was added.
func (h Hasher) Digest() (out checkpoint.Digest) {
	h.Sum(out[:0])
	return out
}

// Digester takes the digest of a chunk and the checksum of each of its blocks, in one pass.
type Digester struct {
	Hasher
	BlockSums
}

// NewDigester returns a Digester for size bytes; 0 if that is not known. It must be freed.
func NewDigester(size int64) *Digester {
	return &Digester{NewHasher(), BlockSums{sums: make([]uint32, 0, checkpoint.Blocks(size))}}
}

// Begin makes the Digester ready for another chunk.
func (d *Digester) Begin(size int64) {
	d.Reset()
	d.BlockSums = BlockSums{sums: make([]uint32, 0, checkpoint.Blocks(size))}
}

// Add takes the next bytes. Both passes go over a step that is still in the cache.
func (d *Digester) Add(p []byte) {
	for len(p) > 0 {
		step := p[:min(len(p), StepSize)]
		d.Hasher.Add(step)
		d.BlockSums.Add(step)
		p = p[len(step):]
	}
}

// End returns digest and checksums of all that was added.
func (d *Digester) End() (checkpoint.Digest, []uint32) { return d.Digest(), d.BlockSums.End() }

// BlockSums takes the checksum of each block of a run of bytes.
type BlockSums struct {
	sums []uint32
	crc  uint32
	n    int // bytes of the present block
}

// Add takes the next bytes.
func (b *BlockSums) Add(p []byte) {
	for len(p) > 0 {
		n := min(len(p), checkpoint.BlockSize-b.n)
		b.crc = crc32c.Update(b.crc, p[:n])
		b.n += n
		p = p[n:]
		if b.n == checkpoint.BlockSize {
			b.cut()
		}
	}
}

func (b *BlockSums) cut() {
	b.sums = append(b.sums, b.crc)
	b.crc, b.n = 0, 0
}

// End returns all checksums, with that of a shorter last block.
func (b *BlockSums) End() []uint32 {
	if b.n > 0 {
		b.cut()
	}
	return b.sums
}
