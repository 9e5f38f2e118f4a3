package replica

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/ckptstore/ckptstore/internal/httpkit"
	"github.com/ckptstore/ckptstore/internal/problem"
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

// readBuffers hold the blocks that are being sent.
var readBuffers = sync.Pool{New: func() any {
	b := make([]byte, staging.ReplicaBlock)
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
	buf := readBuffers.Get().(*[]byte)
	defer readBuffers.Put(buf)
	block, sum, err := of.Block(in.Block, *buf)
	if err != nil {
		k.refuse(w, problem.Wrap(problem.Damage, err))
		return
	}
	w.Header().Set(sumHeader, fmt.Sprintf("%08x", sum))
	w.Header().Set("Content-Length", strconv.Itoa(len(block)))
	_, _ = w.Write(block) // the caller compares the checksum
}

// Fetch copies slots of ranks for a checkpoint from another node, as far as it has them, and
// makes them a source of restores here. It does not repeat what fails, and ends if the bytes come
// slower than fetchRate: the files have the same bytes. It returns how many slots and bytes came.
func (k *Keeper) Fetch(ctx context.Context, from Partner, checkpoint string, ranks []int) (slots int, bytes int64) {
	began, limit := time.Now(), fetchGrace
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	late := time.AfterFunc(limit, func() { stop(errSlow) })
	defer late.Stop()
	for _, rank := range ranks {
		of := findRequest{Checkpoint: checkpoint, Rank: rank}
		found, err := k.findAt(ctx, from, of)
		n := found.Size
		if err == nil {
			limit += time.Duration(float64(n) / fetchRate * float64(time.Second))
			late.Reset(time.Until(began.Add(limit)))
			err = k.fetch(ctx, from, of, found)
		}
		if err != nil && ctx.Err() != nil {
			err = context.Cause(ctx)
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
func (k *Keeper) fetch(ctx context.Context, from Partner, of findRequest, found findAnswer) (err error) {
	in := beginRequest{Attempt: found.Attempt, Rank: of.Rank, Checkpoint: of.Checkpoint, Size: found.Size}
	r, err := k.allocate(ctx, in)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = r.Drop() // a file that cannot be removed stays until the job ends
		}
	}()
	if err := fetchBlocks(ctx, from, of, r); err != nil {
		return err
	}
	if err := r.Whole(in.part()); err != nil {
		return problem.Wrap(problem.Damage, err)
	}
	r.Offer()
	r.Give()
	return nil
}

// requests is how many blocks are requested at a time: one is sent while others are copied and
// compared.
const requests = 3

// fetchBlocks requests all blocks of a slot.
func fetchBlocks(ctx context.Context, from Partner, of findRequest, r *staging.Replica) error {
	g, ctx := errgroup.WithContext(ctx)
	var next atomic.Int64
	for range requests {
		g.Go(func() error {
			buf, of := make([]byte, staging.ReplicaBlock), of
			for {
				if of.Block = int(next.Add(1)) - 1; of.Block >= r.Blocks() {
					return nil
				}
				block := buf[:r.BlockSize(of.Block)]
				if err := from.ask(ctx, "read", of, func(reply *http.Response) error { return read(reply, r, of.Block, block) }); err != nil {
					return fmt.Errorf("block %d: %w", of.Block, err)
				}
			}
		})
	}
	return g.Wait()
}

// read stores a block that was answered.
func read(reply *http.Response, to *staging.Replica, n int, block []byte) error {
	if reply.StatusCode != http.StatusOK {
		return answer(reply, &nothing{})
	}
	defer func() { _ = reply.Body.Close() }()
	sum, err := strconv.ParseUint(reply.Header.Get(sumHeader), 16, 32)
	if err != nil {
		return fmt.Errorf("the answer has the checksum %q", reply.Header.Get(sumHeader))
	}
	if _, err := io.ReadFull(reply.Body, block); err != nil {
		return err
	}
	return problem.Wrap(problem.Damage, to.Put(n, block, uint32(sum)))
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
