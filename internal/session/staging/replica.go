package staging

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"runtime"

	"github.com/zeebo/blake3"
	"golang.org/x/sync/errgroup"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/crc32c"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/session/shm"
)

// replicaUse is the use of an arena as the copy of a slot of another node. The next owner of
// the directory frees such files.
const replicaUse = "peer"

// ReplicaBlock is the unit in which replicas are received, in bytes.
const ReplicaBlock = 4 << 20

// Replica is a copy of a sealed slot of another node. It exists so that the save of that slot
// can be finished after the node is lost. A replica is filled block by block, then checked, and
// then read. Before it is whole, its methods may be called concurrently only for different blocks, and
// [Replica.Digests] next to them.
type Replica struct {
	Header
	Local checkpoint.Local // the rank's plan, with as many items as the header has spans

	arenas *Arenas
	arena  *Arena
	size   int64
	sums   []uint32 // CRC-32C of each block that was received
	have   []bool
	// receipts has the last receipt of each block; nil: there was none, or the block has arrived.
	receipts []*Receipt
}

// NewReplica allocates the memory for a copy of a rank's slot of size bytes.
func (a *Arenas) NewReplica(ctx context.Context, rank int, size int64) (*Replica, error) {
	if size < slotFixed {
		return nil, fmt.Errorf("%w: %d bytes", errNoSlot, size)
	}
	f, err := a.Take(ctx, rank, replicaUse, size)
	if err != nil {
		return nil, err
	}
	r := &Replica{arenas: a, arena: f}
	r.begin(size)
	return r, nil
}

// NewBareReplica is [Arenas.NewReplica] without memory: each block gets its memory when
// [Replica.Receive] stores it.
func (a *Arenas) NewBareReplica(rank int, size int64) (*Replica, error) {
	if size < slotFixed {
		return nil, fmt.Errorf("%w: %d bytes", errNoSlot, size)
	}
	f, err := a.takeBare(rank, replicaUse, size)
	if err != nil {
		return nil, err
	}
	r := &Replica{arenas: a, arena: f}
	r.begin(size)
	return r, nil
}

// Reset makes the memory of a replica available for another slot of size bytes. It reports false
// if the memory is being read, or too small.
func (r *Replica) Reset(size int64) bool {
	if size < slotFixed || size > int64(len(r.arena.data)) || !r.arenas.overwrite(r.arena) {
		return false
	}
	r.begin(size)
	return true
}

func (r *Replica) begin(size int64) {
	_ = object.Readable(func() { clear(r.arena.data[:slotFixed]) }) // otherwise the first block fails
	n := int((size + ReplicaBlock - 1) / ReplicaBlock)
	r.Header, r.Local, r.size = Header{}, checkpoint.Local{}, size
	r.sums, r.have, r.receipts = make([]uint32, n), make([]bool, n), make([]*Receipt, n)
}

// Blocks returns the number of blocks.
func (r *Replica) Blocks() int { return len(r.have) }

// BlockSize returns the size of a block in bytes, or 0 if there is no such block.
func (r *Replica) BlockSize(n int) int64 {
	if n < 0 || n >= len(r.have) {
		return 0
	}
	return min(ReplicaBlock, r.size-int64(n)*ReplicaBlock)
}

// Receipt receives one block of a replica, piece by piece.
type Receipt struct {
	of   *Replica
	n    int
	at   int64 // in the slot, of what has not arrived
	left int64 // bytes that have not arrived
	sum  uint32
}

// Block begins the receipt of a block, which is missing until it has arrived. A later receipt of the same
// block ends this one.
func (r *Replica) Block(n int) (*Receipt, error) {
	size := r.BlockSize(n)
	if size == 0 {
		return nil, fmt.Errorf("there is no block %d", n)
	}
	b := &Receipt{of: r, n: n, at: int64(n) * ReplicaBlock, left: size}
	r.have[n], r.receipts[n] = false, b
	return b, nil
}

// Left returns how many bytes have not arrived.
func (b *Receipt) Left() int64 { return b.left }

// Store stores the next bytes, [Receipt.Left] at most. If shared memory is full, it returns ENOSPC.
//
// The bytes are written to the file, not copied to its mapping: the kernel then neither clears a page that
// is overwritten at once nor takes a fault for it. For memory that was never used, on a kernel of version
// 6.18, a write takes 0.45 ms of CPU for each MB, where the first touch takes 0.6 and the copy 0.12. The
// first read of the mapping then takes 0.1 more.
func (b *Receipt) Store(piece []byte) error {
	if b.of.receipts[b.n] != b {
		return fmt.Errorf("block %d is received again", b.n)
	}
	if int64(len(piece)) > b.left {
		return fmt.Errorf("%d bytes for the last %d of block %d", len(piece), b.left, b.n)
	}
	b.sum = crc32c.Update(b.sum, piece)
	if _, err := b.of.arena.file.WriteAt(piece, b.at); err != nil {
		return b.of.arena.unreserved(b.of.size, err)
	}
	b.at, b.left = b.at+int64(len(piece)), b.left-int64(len(piece))
	return nil
}

// End marks the block as arrived, if its bytes have the checksum of their sender.
func (b *Receipt) End(sum uint32) error {
	switch {
	case b.of.receipts[b.n] != b:
		return fmt.Errorf("block %d is received again", b.n)
	case b.left > 0:
		return fmt.Errorf("%d bytes of block %d are missing", b.left, b.n)
	case b.sum != sum:
		return fmt.Errorf("block %d has the CRC-32C %08x, want %08x", b.n, b.sum, sum)
	}
	b.of.sums[b.n], b.of.have[b.n], b.of.receipts[b.n] = sum, true, nil
	return nil
}

// Has reports whether a block has arrived.
func (r *Replica) Has(n int) bool { return n >= 0 && n < len(r.have) && r.have[n] }

// Receive receives a block that is being read, in pieces of the size of buf, which stay in the cache.
func (r *Replica) Receive(n int, from io.Reader, buf []byte, sum uint32) error {
	b, err := r.Block(n)
	for err == nil && b.left > 0 {
		piece := buf[:min(int64(len(buf)), b.left)]
		if _, err = io.ReadFull(from, piece); err == nil {
			err = b.Store(piece)
		}
	}
	if err != nil {
		return err
	}
	return b.End(sum)
}

// digestPiece is how many bytes are digested before it is seen that they are needed now.
const digestPiece = 1 << 20

// Digests computes the digests of the items in the order of the plan, while blocks are received:
// arrived waits until the first bytes of the replica have all been. See [shm.Unhurried] for hurry.
func (r *Replica) Digests(ctx context.Context, arrived func(ctx context.Context, bytes int64) error, hurry <-chan struct{}) ([]checkpoint.Digest, error) {
	if err := arrived(ctx, slotFixed); err != nil {
		return nil, err
	}
	read := func(use func()) error {
		if !object.Readable(use) {
			return object.ErrUnreadable
		}
		return nil
	}
	var head int64
	if err := read(func() { head = int64(binary.LittleEndian.Uint64(r.arena.data[32:])) }); err != nil {
		return nil, err
	}
	if head < slotFixed || head > r.size {
		return nil, fmt.Errorf("%w: its data begins at %d of %d bytes", errNoSlot, head, r.size)
	}
	if err := arrived(ctx, head); err != nil {
		return nil, err
	}
	var h Header
	var bad error
	if err := read(func() { h, _, bad = readHeader(r.arena.data[:r.size]) }); err != nil {
		return nil, err
	}
	if bad != nil {
		return nil, bad
	}
	out := make([]checkpoint.Digest, len(h.Spans))
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(runtime.GOMAXPROCS(0))
	for i, at := range h.Spans {
		if err := arrived(ctx, at.Offset+at.Size); err != nil {
			return nil, errors.Join(err, g.Wait())
		}
		g.Go(func() error {
			rest := r.arena.data[at.Offset:][:at.Size]
			if hurry == nil || at.Size <= digestPiece {
				return read(func() { out[i] = checkpoint.Sum(rest) })
			}
			h := blake3.New()
			err := shm.Unhurried(hurry, func(until <-chan struct{}) error {
				return read(func() {
					for len(rest) > 0 && !shm.Closed(until) && ctx.Err() == nil {
						n := min(len(rest), digestPiece)
						_, _ = h.Write(rest[:n]) // never fails
						rest = rest[n:]
					}
				})
			})
			h.Sum(out[i][:0])
			return errors.Join(err, ctx.Err())
		})
	}
	return out, g.Wait()
}

// Missing returns the first block that was not received, or -1.
func (r *Replica) Missing() int {
	for n, have := range r.have {
		if !have {
			return n
		}
	}
	return -1
}

// Whole reads the description of a replica whose blocks have all been received. It returns an
// error unless they are the complete slot of that part of a save.
func (r *Replica) Whole(of Part) (err error) {
	if !object.Readable(func() { err = r.readWhole(of) }) {
		err = object.ErrUnreadable
	}
	return err
}

func (r *Replica) readWhole(of Part) error {
	if n := r.Missing(); n >= 0 {
		return fmt.Errorf("block %d of %d is missing", n, len(r.have))
	}
	h, complete, err := readHeader(r.arena.data[:r.size])
	if err != nil {
		return err
	}
	of.Fingerprint = h.Fingerprint
	if !complete || h.Part != of {
		return fmt.Errorf("%w: not a complete one of rank %d for %s in attempt %d", errNoSlot, of.Rank, of.Checkpoint, of.Attempt)
	}
	local, err := checkpoint.DecodeLocal(h.Plan)
	if err == nil && (len(local.Items) != len(h.Spans) || local.Rank != h.Rank) {
		err = errors.New("the plan is not that of the description")
	}
	for i := range h.Spans {
		if err == nil && h.Spans[i].Size != local.Items[i].Bytes {
			err = fmt.Errorf("item %d has %d bytes, its plan has %d", i, h.Spans[i].Size, local.Items[i].Bytes)
		}
	}
	if err != nil {
		return fmt.Errorf("%w: %w", errNoSlot, err)
	}
	r.Header, r.Local = h, local
	return nil
}

// Verify reads the replica's bytes and compares them with the checksums of their arrival.
func (r *Replica) Verify() (err error) {
	if !object.Readable(func() { err = r.verify() }) {
		err = object.ErrUnreadable
	}
	return err
}

func (r *Replica) verify() error {
	for n, sum := range r.sums {
		at := int64(n) * ReplicaBlock
		if got := crc32c.Checksum(r.arena.data[at : at+r.BlockSize(n)]); got != sum {
			return fmt.Errorf("block %d of %s has the CRC-32C %08x, it arrived with %08x", n, r.arena.path, got, sum)
		}
	}
	return nil
}

// Source returns the bytes of items in the replica.
func (r *Replica) Source(items []checkpoint.Item) (data.Source, error) {
	at := make(map[string]Span, len(r.Spans))
	for i, it := range r.Local.Items {
		at[Key(it)] = r.Spans[i]
	}
	return source(r.arena.data, at, r.Rank, items)
}

// Hold keeps the replica's memory mapped, also after [Replica.Drop], until release.
func (r *Replica) Hold() (release func()) {
	held := []*Arena{r.arena}
	r.arenas.Retain(held)
	return func() { r.arenas.Release(held) }
}

// Offer makes a whole replica a source of restores: see [Arenas.Hold]. Its digests are not
// those of its sender, but computed from its bytes: these, by [Replica.Digests], or by the restore if
// they are nil.
func (r *Replica) Offer(digests []checkpoint.Digest) {
	if len(digests) != len(r.Spans) {
		digests = nil
	}
	r.arenas.keep(r.arena, keptOf(r.Checkpoint, r.Rank, r.Local.Items, r.Spans, digests))
}

// Sum returns the checksum of a block on its arrival. The caller holds the replica.
func (r *Replica) Sum(n int) uint32 { return r.sums[n] }

// Send writes a block, in pieces of the size of buf. The caller holds the replica.
func (r *Replica) Send(n int, to io.Writer, buf []byte) error {
	block := r.arena.data[int64(n)*ReplicaBlock:][:r.BlockSize(n)]
	for len(block) > 0 {
		piece := buf[:min(len(buf), len(block))]
		if !object.Readable(func() { copy(piece, block) }) {
			return object.ErrUnreadable
		}
		if _, err := to.Write(piece); err != nil {
			return err
		}
		block = block[len(piece):]
	}
	return nil
}

// Size returns the size of the slot in bytes.
func (r *Replica) Size() int64 { return r.size }

// Give makes the replica's memory available for another use of its rank. Until then its content
// is a source of restores.
func (r *Replica) Give() { r.arenas.Give(r.arena) }

// Drop frees the replica's memory, once nothing holds it.
func (r *Replica) Drop() error { return r.arenas.Drop(r.arena) }

// Room returns how many bytes of shared memory all slots and replicas may use, and how many
// they use.
func (a *Arenas) Room(m Memory) (most, used int64, err error) {
	used = a.held()
	most, err = m.resolve(a.dir.Path(), used)
	return most, used, err
}
