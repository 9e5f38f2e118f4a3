package replica

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/httpkit"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/session/shm"
	"github.com/ckptstore/ckptstore/internal/session/staging"
)

// findRequest asks for the replica of a rank's part of a save, or for a block of it.
type findRequest struct {
	Checkpoint string `json:"checkpoint"`
	Rank       int    `json:"rank"`
	Block      int    `json:"block"`
}

// findAnswer describes a replica.
type findAnswer struct {
	Attempt int   `json:"attempt"`
	Size    int64 `json:"size"`
}

// held returns a whole replica for a request. release is called once.
func (k *Keeper) held(in findRequest) (r *staging.Replica, release func(), err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	of := k.ranks[in.Rank].of(in.Checkpoint)
	if of == nil {
		return nil, nil, problem.Errorf(problem.NotFound, "no whole replica of rank %d for %s is here", in.Rank, in.Checkpoint)
	}
	return of.Replica, of.Hold(), nil
}

func (k *Keeper) onFind(w http.ResponseWriter, r *http.Request) {
	bound(w, blockTimeout)
	in, err := httpkit.Request[findRequest](w, r, smallBody)
	var out findAnswer
	if err == nil {
		var of *staging.Replica
		var release func()
		if of, release, err = k.held(in); err == nil {
			out = findAnswer{of.Attempt, of.Size()}
			release()
		}
	}
	if err != nil {
		k.refuse(w, err)
		return
	}
	_ = httpkit.Reply(w, out) // the caller reads files
}

// piece is how many bytes of a block are copied, checked and sent at a time: they stay in the cache of a
// core, while a whole block would be read from memory in each of these steps.
const piece = 256 << 10

// pieces are buffers.
var pieces = sync.Pool{New: func() any {
	b := make([]byte, piece)
	return &b
}}

func (k *Keeper) onRead(w http.ResponseWriter, r *http.Request) {
	bound(w, blockTimeout)
	in, err := httpkit.Request[findRequest](w, r, smallBody)
	var of *staging.Replica
	var release func()
	if err == nil {
		of, release, err = k.held(in)
	}
	if err != nil {
		k.refuse(w, err)
		return
	}
	defer release()
	if of.BlockSize(in.Block) == 0 {
		k.refuse(w, problem.Errorf(problem.Invalid, "no block %d", in.Block))
		return
	}
	buf := pieces.Get().(*[]byte)
	defer pieces.Put(buf)
	w.Header().Set(sumHeader, fmt.Sprintf("%08x", of.Sum(in.Block)))
	w.Header().Set("Content-Length", strconv.FormatInt(of.BlockSize(in.Block), 10))
	if err := of.Send(in.Block, w, *buf); err != nil {
		k.log.Debug("block of a replica not sent", "block", in.Block, "error", err)
		panic(http.ErrAbortHandler) // the answer is incomplete
	}
}

// Fetch copies slots of ranks for a checkpoint from another node, as far as it has them, and
// makes them a source of restores here. It does not repeat what fails, and ends if the bytes come
// slower than fetchRate: the files have the same bytes. It returns how many slots and bytes came.
//
// Until hurry is closed, no rank waits for them: the copying yields to all other computation, and may take
// as long as it needs. A nil hurry counts as closed.
func (k *Keeper) Fetch(ctx context.Context, from Partner, checkpoint string, ranks []int, hurry <-chan struct{}) (slots int, bytes int64) {
	began := time.Now()
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	bound := &patience{limit: fetchGrace, late: func() { stop(errSlow) }}
	defer bound.end()
	if hurry == nil {
		bound.begin()
	} else {
		go func() {
			select {
			case <-hurry:
				bound.begin()
			case <-ctx.Done():
			}
		}()
	}
	for _, rank := range ranks {
		of := findRequest{Checkpoint: checkpoint, Rank: rank}
		found, err := k.findAt(ctx, from, of)
		n := found.Size
		if err == nil {
			bound.extend(time.Duration(float64(n) / fetchRate * float64(time.Second)))
			err = k.fetch(ctx, from, of, found, hurry)
		}
		if err != nil && ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		if errors.Is(err, context.Canceled) {
			break // it is not needed any more
		}
		if kinds := problem.Kinds(err); err != nil && (len(kinds) == 0 || kinds[0] != problem.NotFound) {
			k.log.Warn("replica not fetched; reading files instead", "checkpoint", checkpoint, "rank", rank, "from", from.Node, "error", err)
			break
		}
		if err == nil {
			slots++
			bytes += n
		}
	}
	if slots > 0 {
		k.log.Info("replicas fetched", "checkpoint", checkpoint, "slots", slots, "bytes", bytes, "from", from.Node, "took", time.Since(began).Round(time.Millisecond))
	}
	return slots, bytes
}

// Limits of all requests of one fetch: so many bytes in a second, after a pause.
const (
	fetchRate  = 100 << 20
	fetchGrace = 10 * time.Second
)

// patience is the bound on the time for which a rank waits for a fetch.
type patience struct {
	late func() // is called when it is over

	mu    sync.Mutex
	limit time.Duration
	since time.Time // when the rank began to wait; zero: none does yet
	timer *time.Timer
	over  bool // the fetch has ended
}

// begin starts the wait.
func (p *patience) begin() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.over {
		p.since, p.timer = time.Now(), time.AfterFunc(p.limit, p.late)
	}
}

// extend adds to the bound.
func (p *patience) extend(by time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.limit += by
	if p.timer != nil {
		p.timer.Reset(time.Until(p.since.Add(p.limit)))
	}
}

// end ends the wait.
func (p *patience) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.over = true; p.timer != nil {
		p.timer.Stop()
	}
}

// errSlow ends a fetch.
var errSlow = errors.New("the replicas come too slowly")

// findAt asks another node for a slot.
func (k *Keeper) findAt(ctx context.Context, from Partner, of findRequest) (found findAnswer, err error) {
	err = from.ask(ctx, "find", of, func(reply *http.Response) error { return answer(reply, &found) })
	if err == nil && (found.Size < 0 || found.Size > maxSlot) {
		err = problem.Errorf(problem.Foreign, "a slot of %d bytes", found.Size)
	}
	return found, err
}

// fetch copies one slot.
func (k *Keeper) fetch(ctx context.Context, from Partner, of findRequest, found findAnswer, hurry <-chan struct{}) (err error) {
	in := beginRequest{Attempt: found.Attempt, Rank: of.Rank, Checkpoint: of.Checkpoint, Size: found.Size}
	if err := k.fits(in); err != nil {
		return err
	}
	r, err := k.arenas.NewBareReplica(in.Rank, in.Size)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = r.Drop() // a file that cannot be removed stays until the job ends
		}
	}()
	came := &progress{total: r.Blocks(), blocks: make(chan int, r.Blocks()), have: make([]bool, r.Blocks())}
	g, receiving := errgroup.WithContext(ctx)
	var digests []checkpoint.Digest
	g.Go(func() error { return fetchBlocks(receiving, from, of, r, came.blocks, hurry) })
	g.Go(func() (err error) {
		digests, err = r.Digests(receiving, came.until, hurry)
		return problem.Wrap(problem.Damage, err)
	})
	if err := g.Wait(); err != nil {
		return err
	}
	if err := r.Whole(in.part()); err != nil {
		return problem.Wrap(problem.Damage, err)
	}
	r.Offer(digests)
	r.Give()
	return nil
}

// progress follows the blocks of a slot as they arrive, for one goroutine.
type progress struct {
	total  int
	blocks chan int // that have arrived
	have   []bool
	first  int // blocks that have all arrived
}

// until waits until the first bytes of the slot have all arrived.
func (p *progress) until(ctx context.Context, bytes int64) error {
	for p.first < p.total && int64(p.first)*staging.ReplicaBlock < bytes {
		select {
		case n := <-p.blocks:
			p.have[n] = true
		case <-ctx.Done():
			return ctx.Err()
		}
		for p.first < p.total && p.have[p.first] {
			p.first++
		}
	}
	return nil
}

// requests is how many blocks are requested at a time: one is sent while others are copied and
// compared.
const requests = 3

// fetchBlocks requests all blocks of a slot, and passes on which have arrived: the transfer, the memory and
// the digests overlap. A profile of both ends over loopback has, in milliseconds of CPU for each MB: new
// memory 0.5 (0.7 by first touch and copy: see [staging.Replica.Receive]), BLAKE3 0.6 with the first reads
// of the mapping, AES-GCM 0.3 on each side, the other copies 0.4, and sockets 0.4. So no single part is left
// to save. Larger pages would take less for the memory, but /dev/shm has none unless it is mounted for them,
// and the kernel then refuses MADV_COLLAPSE too. So a fetch is best over before a rank waits for it: see
// [Keeper.Fetch] for hurry.
func fetchBlocks(ctx context.Context, from Partner, of findRequest, r *staging.Replica, came chan<- int, hurry <-chan struct{}) error {
	g, ctx := errgroup.WithContext(ctx)
	var next atomic.Int64
	for range requests {
		g.Go(func() error {
			buf, of := pieces.Get().(*[]byte), of
			defer pieces.Put(buf)
			return shm.Unhurried(hurry, func(until <-chan struct{}) error {
				for !shm.Closed(until) {
					if of.Block = int(next.Add(1)) - 1; of.Block >= r.Blocks() {
						return nil
					}
					err := from.ask(ctx, "read", of, func(reply *http.Response) error { return read(reply, r, of.Block, *buf) })
					if err != nil {
						return fmt.Errorf("block %d: %w", of.Block, err)
					}
					came <- of.Block // it has room for all
				}
				return nil
			})
		})
	}
	return g.Wait()
}

// read stores a block that was answered.
func read(reply *http.Response, to *staging.Replica, n int, buf []byte) error {
	if reply.StatusCode != http.StatusOK {
		return answer(reply, &nothing{})
	}
	defer func() { _ = reply.Body.Close() }()
	sum, err := strconv.ParseUint(reply.Header.Get(sumHeader), 16, 32)
	if err != nil {
		return fmt.Errorf("the answer has the checksum %q", reply.Header.Get(sumHeader))
	}
	return problem.Wrap(problem.Damage, to.Receive(n, reply.Body, buf, uint32(sum)))
}

// ask sends one request and passes on its answer.
func (p Partner) ask(ctx context.Context, path string, in any, take func(*http.Response) error) error {
	body, err := json.Marshal(in)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, blockTimeout)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, p.URL+"/v1/replicas/"+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	reply, err := p.Client.Do(r)
	if err != nil {
		return err
	}
	return take(reply)
}
