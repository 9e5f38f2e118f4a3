package replica

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/internal/httpkit"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/session/staging"
)

// Keeper holds the newest whole slots of each rank of another node, and the slots that are
// arriving. All methods may be called concurrently.
type Keeper struct {
	arenas *staging.Arenas
	memory staging.Memory
	log    *slog.Logger
	mux    *http.ServeMux

	mu      sync.Mutex
	attempt int
	ranks   map[int]*kept // that this node keeps
	arrive  map[uint64]*arrival
	last    uint64 // ID
	closed  bool
}

// kept is what the keeper has of one rank.
type kept struct {
	whole  *copied  // the newest one; nil: none
	former *copied  // the one before, until its memory is needed; nil: none
	next   *arrival // nil: none
	spare  *staging.Replica
	makes  bool // memory is being allocated
}

// of returns the whole replica of a save, or nil.
func (k *kept) of(checkpoint string) *copied {
	if k == nil {
		return nil
	}
	for _, c := range []*copied{k.whole, k.former} {
		if c != nil && c.Checkpoint == checkpoint {
			return c
		}
	}
	return nil
}

// copied is a whole replica.
type copied struct {
	beginRequest
	id uint64 // of its arrival
	*staging.Replica
}

// arrival is a replica that is being received.
type arrival struct {
	beginRequest
	id uint64

	mu      sync.Mutex // held while the memory is written
	replica *staging.Replica
	over    bool
}

// write writes to the memory of an arrival, unless it is over.
func (a *arrival) write(do func() error) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.over {
		return problem.Errorf(problem.Gone, "the slot of rank %d for %s is not expected any more", a.Rank, a.Checkpoint)
	}
	switch err := do(); {
	case errors.Is(err, syscall.ENOSPC):
		return problem.Wrap(problem.NoSpace, err)
	case len(problem.Kinds(err)) > 0:
		return err
	default:
		return problem.Wrap(problem.Damage, err)
	}
}

// begin begins the receipt of a block from a body of so many bytes. It returns nil for a block that has
// arrived: its answer was lost.
func (a *arrival) begin(n int, length int64) (block *staging.Receipt, err error) {
	err = a.write(func() error {
		size := a.replica.BlockSize(n)
		switch {
		case size == 0:
			return problem.Errorf(problem.Invalid, "there is no block %d", n)
		case a.replica.Has(n):
			return nil
		case length != size+sumSize:
			return fmt.Errorf("block %d has %d bytes with its checksum, want %d", n, length, size+sumSize)
		}
		block, err = a.replica.Block(n)
		return err
	})
	return block, err
}

// NewKeeper returns a keeper without ranks: see [Keeper.Keep]. Replicas and slots share the
// memory.
func NewKeeper(arenas *staging.Arenas, memory staging.Memory, log *slog.Logger) *Keeper {
	k := &Keeper{arenas: arenas, memory: memory, log: log, mux: http.NewServeMux(), ranks: map[int]*kept{}, arrive: map[uint64]*arrival{}}
	k.mux.HandleFunc("POST /v1/replicas/begin", k.onBegin)
	k.mux.HandleFunc("POST /v1/replicas/{id}/blocks/{n}", k.onBlock)
	k.mux.HandleFunc("POST /v1/replicas/{id}/whole", k.onWhole)
	k.mux.HandleFunc("POST /v1/replicas/find", k.onFind)
	k.mux.HandleFunc("POST /v1/replicas/read", k.onRead)
	return k
}

// ServeHTTP implements [http.Handler]. The caller has authenticated the request.
func (k *Keeper) ServeHTTP(w http.ResponseWriter, r *http.Request) { k.mux.ServeHTTP(w, r) }

// Keep makes the keeper accept the slots of ranks in an attempt, and of no others. It frees
// the replicas of other ranks; those of the same ranks stay until newer ones are whole.
func (k *Keeper) Keep(attempt int, ranks []int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.attempt = attempt
	former := k.ranks
	k.ranks = map[int]*kept{}
	for _, rank := range ranks {
		of := former[rank]
		if of == nil {
			of = &kept{}
		}
		delete(former, rank)
		k.stop(of)
		k.ranks[rank] = of
	}
	for _, of := range former {
		k.drop(of)
	}
}

// Close frees all replicas. Nothing is received any more.
func (k *Keeper) Close() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.closed = true
	for _, of := range k.ranks {
		k.drop(of)
	}
	clear(k.ranks)
}

// drop frees what the keeper has of a rank. The caller holds the lock.
func (k *Keeper) drop(of *kept) {
	k.stop(of)
	for _, c := range []*copied{of.whole, of.former} {
		if c != nil {
			_ = c.Drop() // a file that cannot be removed stays until the job ends
		}
	}
	if of.spare != nil {
		_ = of.spare.Drop()
	}
	of.whole, of.former, of.spare = nil, nil, nil
}

// stop ends the arrival of a rank's next replica, and keeps its memory. The caller holds the
// lock.
func (k *Keeper) stop(of *kept) {
	a := of.next
	if a == nil {
		return
	}
	of.next = nil
	delete(k.arrive, a.id)
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.over {
		a.over, of.spare = true, a.replica
	}
}

// Hold returns the whole replica of a rank's part of a save. It stays mapped and unchanged until
// release, also if newer ones come. Its bytes are those of its arrival if [staging.Replica.Verify]
// finds so.
func (k *Keeper) Hold(checkpoint string, rank int) (r *staging.Replica, release func(), err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	of := k.ranks[rank].of(checkpoint)
	if of == nil {
		return nil, nil, fmt.Errorf("this node has no whole replica of rank %d for %s", rank, checkpoint)
	}
	return of.Replica, of.Hold(), nil
}

// Has returns the description of the whole replica of a rank's part of a save.
func (k *Keeper) Has(checkpoint string, rank int) (part staging.Part, ok bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	of := k.ranks[rank].of(checkpoint)
	if of == nil {
		return part, false
	}
	return of.Part, true
}

// refuse answers with an error.
func (k *Keeper) refuse(w http.ResponseWriter, err error) {
	k.log.Debug("request for a replica refused", "error", err)
	httpkit.Refuse(w, err)
}

// bound limits the time that a request may take to arrive and its answer to leave.
func bound(w http.ResponseWriter, answer time.Duration) {
	control := http.NewResponseController(w)
	_ = control.SetReadDeadline(time.Now().Add(blockTimeout)) // best effort
	_ = control.SetWriteDeadline(time.Now().Add(answer + blockTimeout))
}

func (k *Keeper) onBegin(w http.ResponseWriter, r *http.Request) {
	bound(w, beginTimeout)
	in, err := httpkit.Request[beginRequest](w, r, smallBody)
	var out beginAnswer
	if err == nil {
		// The read deadline would end the context of the request. The body is read, and the
		// memory may take longer.
		_ = http.NewResponseController(w).SetReadDeadline(time.Time{})
		ctx, cancel := context.WithTimeout(r.Context(), beginTimeout)
		out.ID, err = k.begin(ctx, in)
		cancel()
	}
	if err != nil {
		k.refuse(w, err)
		return
	}
	_ = httpkit.Reply(w, out) // the sender repeats the request
}

// begin makes room for a slot. A repeated announcement continues the arrival.
func (k *Keeper) begin(ctx context.Context, in beginRequest) (uint64, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	of, err := k.admit(in)
	if err != nil {
		return 0, err
	}
	if of.next != nil && of.next.beginRequest == in {
		return of.next.id, nil
	}
	k.stop(of)
	replica := of.spare
	if replica == nil && of.former != nil {
		replica, of.former = of.former.Replica, nil
	}
	if replica != nil && !replica.Reset(in.Size) {
		_ = replica.Drop() // a file that cannot be removed stays until the job ends
		replica = nil
	}
	of.spare = nil
	if replica == nil {
		of.makes = true
		k.mu.Unlock() // to touch memory for the first time takes long
		replica, err = k.allocate(ctx, in)
		k.mu.Lock()
		of.makes = false
		if err != nil {
			return 0, err
		}
		if now, err := k.admit(in); err != nil || now != of {
			_ = replica.Drop()
			return 0, cmp.Or(err, gone(in))
		}
	}
	k.last++
	a := &arrival{beginRequest: in, id: k.last, replica: replica}
	of.next, k.arrive[a.id] = a, a
	return a.id, nil
}

// gone refuses a slot of another attempt.
func gone(in beginRequest) error {
	return problem.Errorf(problem.Gone, "replicas of attempt %d are not kept here", in.Attempt)
}

// admit returns what the keeper has of a rank whose slot is announced. The caller holds the
// lock.
func (k *Keeper) admit(in beginRequest) (*kept, error) {
	of := k.ranks[in.Rank]
	switch {
	case k.closed || in.Attempt != k.attempt:
		return nil, gone(in)
	case of == nil:
		return nil, problem.Errorf(problem.Denied, "replicas of rank %d are not kept here in attempt %d", in.Rank, in.Attempt)
	case in.Size < 0 || in.Size > maxSlot || in.Checkpoint == "":
		return nil, problem.Errorf(problem.Invalid, "a slot of %d bytes for %q", in.Size, in.Checkpoint)
	case of.makes:
		return nil, problem.Errorf(problem.Unavailable, "memory for rank %d is being allocated", in.Rank)
	case of.whole != nil && !of.whole.older(in), of.next != nil && of.next.beginRequest != in && !of.next.older(in):
		return nil, problem.Errorf(problem.Conflict, "a newer slot of rank %d is here", in.Rank)
	}
	return of, nil
}

// older reports whether a slot is older than another one of its rank.
func (b beginRequest) older(than beginRequest) bool {
	return b.Attempt < than.Attempt || b.Attempt == than.Attempt && b.Order < than.Order
}

// allocate takes memory for a slot, if the bound on the memory of slots and replicas allows it.
func (k *Keeper) allocate(ctx context.Context, in beginRequest) (*staging.Replica, error) {
	if err := k.fits(in); err != nil {
		return nil, err
	}
	return k.arenas.NewReplica(ctx, in.Rank, in.Size)
}

// fits returns an error unless the bound on the memory of slots and replicas allows a slot.
func (k *Keeper) fits(in beginRequest) error {
	most, used, err := k.arenas.Room(k.memory)
	if err == nil && used+in.Size > most {
		err = problem.Errorf(problem.NoSpace, "%d bytes of slots and replicas, and %d more for rank %d, exceed %d bytes; raise --staging-memory, or leave --replicas out", used, in.Size, in.Rank, most)
	}
	return err
}

// find returns the arrival that a request concerns, or an error.
func (k *Keeper) find(r *http.Request) (*arrival, error) {
	id, err := strconv.ParseUint(r.PathValue("id"), 10, 64)
	k.mu.Lock()
	defer k.mu.Unlock()
	if a := k.arrive[id]; a != nil && err == nil {
		return a, nil
	}
	return nil, problem.Errorf(problem.Gone, "no slot %q is expected; announce it again", r.PathValue("id"))
}

func (k *Keeper) onBlock(w http.ResponseWriter, r *http.Request) {
	bound(w, blockTimeout)
	if err := k.block(w, r); err != nil {
		k.refuse(w, err)
		return
	}
	_ = httpkit.Reply(w, nothing{}) // the sender repeats the request
}

// block receives one block with its checksum. The block is missing, and not part of a replica, unless
// all of it has arrived unchanged.
func (k *Keeper) block(w http.ResponseWriter, r *http.Request) error {
	a, err := k.find(r)
	if err != nil {
		return err
	}
	n, err := strconv.Atoi(r.PathValue("n"))
	if err != nil {
		return problem.Errorf(problem.Invalid, "block %q", r.PathValue("n"))
	}
	buf := pieces.Get().(*[]byte)
	defer pieces.Put(buf)
	body := http.MaxBytesReader(w, r.Body, staging.ReplicaBlock+sumSize)
	block, err := a.begin(n, r.ContentLength)
	if block == nil || err != nil {
		_, _ = io.Copy(io.Discard, body) // the sender reads the answer after that
		return err
	}
	for left := block.Left(); left > 0; left = block.Left() {
		piece := (*buf)[:min(int64(len(*buf)), left)]
		if _, err := io.ReadFull(body, piece); err != nil {
			return problem.Wrap(problem.Damage, fmt.Errorf("read block %d: %w", n, err))
		}
		if err := a.write(func() error { return block.Store(piece) }); err != nil {
			return err
		}
	}
	sum := (*buf)[:sumSize]
	if _, err := io.ReadFull(body, sum); err != nil {
		return problem.Wrap(problem.Damage, fmt.Errorf("read the checksum of block %d: %w", n, err))
	}
	return a.write(func() error { return block.End(binary.LittleEndian.Uint32(sum)) })
}

func (k *Keeper) onWhole(w http.ResponseWriter, r *http.Request) {
	bound(w, blockTimeout)
	a, err := k.find(r)
	switch {
	case err == nil:
		err = k.whole(a)
	case k.isWhole(r.PathValue("id")):
		err = nil // the answer was lost
	}
	if err != nil {
		k.refuse(w, err)
		return
	}
	_ = httpkit.Reply(w, nothing{}) // the sender repeats the request
}

// isWhole reports whether an arrival has become a replica that is still here.
func (k *Keeper) isWhole(id string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, of := range k.ranks {
		for _, c := range []*copied{of.whole, of.former} {
			if c != nil && strconv.FormatUint(c.id, 10) == id {
				return true
			}
		}
	}
	return false
}

// whole checks a slot whose blocks were all received, and makes it the rank's replica.
func (k *Keeper) whole(a *arrival) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	of := k.ranks[a.Rank]
	if of == nil || of.next != a {
		if c := of.of(a.Checkpoint); c != nil && c.id == a.id {
			return nil // the answer was lost
		}
		return problem.Errorf(problem.Gone, "the slot of rank %d for %s is not expected any more", a.Rank, a.Checkpoint)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.replica.Whole(a.part()); err != nil {
		return problem.Wrap(problem.Damage, fmt.Errorf("the slot of rank %d for %s: %w", a.Rank, a.Checkpoint, err))
	}
	a.over = true
	a.replica.Offer(nil)
	of.next, of.former, of.whole = nil, of.whole, &copied{a.beginRequest, a.id, a.replica}
	delete(k.arrive, a.id)
	k.log.Debug("replica kept", "rank", a.Rank, "checkpoint", a.Checkpoint)
	return nil
}
