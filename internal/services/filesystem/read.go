package filesystem

import (
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"sync"

	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/object"
)

const (
	pieceSize = 4 << 20 // unit of verification, in bytes
	ahead     = 12      // pieces that are verified ahead of the client
	verifiers = 4       // concurrent verifications of each reading
)

// reading is a committed file that a client reads by its path.
type reading struct {
	file   *data.VerbatimFile
	object object.Object
	here   *copied // in place of the object, where that is on another machine; nil: its path is one of this machine
	ctx    context.Context
	stop   context.CancelFunc

	permits chan struct{}
	busy    sync.WaitGroup

	mu     sync.Mutex
	closed bool
	pieces []*piece // nil: not requested yet
}

// piece is a part of a file that is being verified, or was.
type piece struct {
	done chan struct{}
	err  error
}

type openReply struct {
	Read uint64 `json:"read"`
	Path string `json:"path"` // of the file, or of a copy that has the verified bytes
	Size int64  `json:"size"`
}

// open begins the reading of a file.
func (h *Handler) open(ctx context.Context, in pathRequest) (openReply, error) {
	p, err := parse(in.Path)
	if err != nil {
		return openReply{}, err
	}
	p, all, err := h.readable(ctx, p)
	if err != nil {
		return openReply{}, err
	}
	f, _, err := h.find(ctx, p, all)
	if err != nil {
		return openReply{}, err
	}
	object, err := f.file.Open(context.WithoutCancel(ctx))
	if err != nil {
		return openReply{}, fmt.Errorf("open %s%s: %w", scheme, p.text, err)
	}
	r := &reading{
		file: f.file, object: object, permits: make(chan struct{}, verifiers),
		pieces: make([]*piece, (f.size()+pieceSize-1)/pieceSize),
	}
	r.ctx, r.stop = context.WithCancel(context.WithoutCancel(ctx))
	path := f.file.Path
	if far, is := object.(ranger); is {
		if r.here, err = h.memory.copyOf(f.file, far); err != nil {
			r.close()
			return openReply{}, fmt.Errorf("open %s%s: %w", scheme, p.text, err)
		}
		path = r.here.file.Name()
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	id, err := h.number()
	var c *client
	if err == nil {
		c, err = h.clientOf(ctx)
	}
	if err != nil {
		r.close()
		return openReply{}, err
	}
	h.reads[id] = r
	if c != nil {
		c.reads[id] = r
	}
	return openReply{Read: id, Path: path, Size: f.size()}, nil
}

type verifyRequest struct {
	Read   uint64 `json:"read"`
	Offset int64  `json:"offset"`
	Length int64  `json:"length"`
	// Sums asks for the checksums of at least these bytes, for a caller that
	// verifies its own reads.
	Sums bool `json:"sums,omitempty"`
}

// Limits of the checksums in a reply: bytes after the requested ones, and runs.
const (
	sumsAhead = 64 << 20
	maxRuns   = 4096
)

type verifyReply struct {
	From int64 `json:"from"` // start of the verified bytes around the requested ones
	To   int64 `json:"to"`
	// Runs replace the verification if the caller asked for checksums and the
	// file has them: from From to To.
	Runs []run `json:"runs,omitempty"`
}

// run is a range of a file with the CRC-32C of each of its blocks.
type run struct {
	Offset int64  `json:"offset"` // in the file, of the first block
	Size   int64  `json:"size"`
	Sums   []byte `json:"sums"` // of each block of 64 KiB from Offset, u32 LE
}

// verify returns once the bytes were compared with their checksums.
func (h *Handler) verify(ctx context.Context, in verifyRequest) (verifyReply, error) {
	h.mu.Lock()
	r := h.reads[in.Read]
	h.mu.Unlock()
	if r == nil {
		return verifyReply{}, conflict("no reading %d: the file was closed, or the trainer or agent has ended", in.Read)
	}
	if in.Offset < 0 || in.Length < 0 || in.Offset > r.file.Size || in.Length > r.file.Size-in.Offset {
		return verifyReply{}, refused("%d bytes at %d do not lie in the %d bytes of the file", in.Length, in.Offset, r.file.Size)
	}
	if in.Length == 0 {
		return verifyReply{From: in.Offset, To: in.Offset}, nil
	}
	if in.Sums && r.here == nil {
		if reply := r.sums(in.Offset, in.Offset+in.Length); reply.Runs != nil {
			return reply, nil
		}
	}
	first, last := int(in.Offset/pieceSize), int((in.Offset+in.Length-1)/pieceSize)
	all, err := r.ask(first, last)
	if err != nil {
		return verifyReply{}, err
	}
	for _, p := range all {
		select {
		case <-p.done:
		case <-ctx.Done():
			return verifyReply{}, ctx.Err()
		}
		if p.err != nil {
			return verifyReply{}, fmt.Errorf("read %s: %w", r.file.Name, p.err)
		}
	}
	lo, hi := r.around(first, last)
	return verifyReply{From: lo * pieceSize, To: min(hi*pieceSize, r.file.Size)}, nil
}

// sums returns the checksums of a range and of some bytes after it.
func (r *reading) sums(from, to int64) verifyReply {
	out := verifyReply{From: from, To: from}
	for blocks := range r.file.Sums(from, to+sumsAhead) {
		if len(out.Runs) >= maxRuns && out.To >= to {
			break
		}
		if out.Runs == nil {
			out.From = min(from, blocks.Offset)
		}
		sums := make([]byte, 0, 4*len(blocks.Sums))
		for _, sum := range blocks.Sums {
			sums = binary.LittleEndian.AppendUint32(sums, sum)
		}
		out.Runs = append(out.Runs, run{Offset: blocks.Offset, Size: blocks.Size, Sums: sums})
		out.To = blocks.Offset + blocks.Size
	}
	return out
}

// ask starts the verification of pieces and of some after them, and returns the
// former.
func (r *reading) ask(first, last int) ([]*piece, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, conflict("the file was closed")
	}
	for i := first; i <= min(last+ahead, len(r.pieces)-1); i++ {
		if r.pieces[i] != nil {
			continue
		}
		p := &piece{done: make(chan struct{})}
		r.pieces[i] = p
		r.busy.Add(1)
		go func() {
			defer r.busy.Done()
			defer close(p.done)
			select {
			case r.permits <- struct{}{}:
				p.err = r.verified(int64(i)*pieceSize, min(int64(i+1)*pieceSize, r.file.Size))
				<-r.permits
			case <-r.ctx.Done():
				p.err = r.ctx.Err()
			}
		}()
	}
	return slices.Clone(r.pieces[first : last+1]), nil
}

// verified compares bytes of the file with their checksums. Those of a copy are fetched first.
func (r *reading) verified(from, to int64) error {
	if r.here != nil {
		return r.here.fetch(r.ctx, from, to)
	}
	_, _, err := r.file.Verify(r.ctx, r.object, from, to)
	return err
}

// around extends a range of pieces to the verified ones before and after it.
func (r *reading) around(first, last int) (lo, hi int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	good := func(i int) bool {
		if i < 0 || i >= len(r.pieces) || r.pieces[i] == nil {
			return false
		}
		select {
		case <-r.pieces[i].done:
			return r.pieces[i].err == nil
		default:
			return false
		}
	}
	for good(first - 1) {
		first--
	}
	for good(last + 1) {
		last++
	}
	return int64(first), int64(last + 1)
}

// close ends the reading. It does not wait for the disk.
func (r *reading) close() {
	r.mu.Lock()
	first := !r.closed
	r.closed = true
	r.mu.Unlock()
	if !first {
		return
	}
	r.stop()
	go func() {
		r.busy.Wait()
		_ = r.object.Close() // nothing was written to it
		if r.here != nil {
			r.here.discard()
		}
	}()
}

type doneRequest struct {
	Read uint64 `json:"read"`
}

// done ends a reading.
func (h *Handler) done(_ context.Context, in doneRequest) (empty, error) {
	h.mu.Lock()
	r := h.reads[in.Read]
	h.mu.Unlock()
	if r != nil {
		h.release(in.Read)
		r.close()
	}
	return empty{}, nil
}
