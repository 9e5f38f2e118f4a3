package reading

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"slices"
	"strings"
	"sync"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/httpkit"
	"github.com/ckptstore/ckptstore/internal/peer"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/tensor"
)

// Request is the body of read.
type Request struct {
	Ref string `json:"ref"`
	// Items are boxes and values, as in a load. A value that each rank saved for
	// itself is that of Rank.
	Items []client.Item `json:"items"`
	// Partial leaves out the items whose key the checkpoint lacks.
	Partial bool `json:"partial,omitempty"`
	// StrictDType makes it an error if an item has another dtype than was saved,
	// instead of converting it.
	StrictDType bool `json:"strict_dtype,omitempty"`
	// Verifies reports that the caller verifies its copies, by the checks of the
	// reply.
	Verifies bool `json:"verifies,omitempty"`
}

// Reply locates the bytes: item i has Sizes[i] bytes at Offsets[i] of the file
// Arenas[In[i]]. The size of an omitted item is -1. The files stay until done.
type Reply struct {
	Checkpoint string             `json:"checkpoint"`
	Step       int64              `json:"step"`
	Read       uint64             `json:"read"`
	Arenas     []client.LoadArena `json:"arenas"`
	In         []int              `json:"in"`
	Offsets    []int64            `json:"offsets"`
	Sizes      []int64            `json:"sizes"`
	Checks     *client.Checks     `json:"checks,omitempty"`
}

// Done is the body of done.
type Done struct {
	Read uint64 `json:"read"`
}

// read is memory that a caller copies from.
type read struct {
	file  *file
	owner *owner // nil: the caller is unknown
}

// owner is a process that has reads.
type owner struct {
	pid   int
	stop  func()
	reads int
}

// wanted is a planned read.
type wanted struct {
	source  *source
	wants   []checkpoint.Want
	of      []int // item of each want
	planned planner.Loaded
	reads   []checkpoint.Read
	spots   map[int]data.Spot // by want: place in the checkpoint's files to copy from
	checked map[int]bool      // by want: the caller verifies it
	sizes   []int64           // by item; -1: omitted
	offsets []int64           // by item, in memory
	size    int64             // of the memory
}

// align is the alignment of items, in bytes.
const align = 64

// plan plans the reads of a request. The error names everything that is missing.
func (s *source) plan(req Request) (*wanted, error) {
	w := &wanted{source: s, sizes: slices.Repeat([]int64{-1}, len(req.Items)), offsets: make([]int64, len(req.Items))}
	if req.Verifies {
		w.checked = map[int]bool{}
	}
	var errs []error
	for i, it := range req.Items {
		switch want, err := s.want(it); {
		case err != nil:
			errs = append(errs, err)
		case !it.Optional || !s.loader.Lacks(want):
			w.wants, w.of = append(w.wants, want), append(w.of, i)
		}
	}
	var err error
	w.planned, err = s.loader.LoadWith(w.wants, planner.LoadOptions{Partial: req.Partial, StrictDType: req.StrictDType})
	if err = errors.Join(append(errs, err)...); err != nil {
		return nil, problem.Errorf(problem.Invalid, "read %s: %w", s.name(), err)
	}
	for i, want := range w.wants {
		if _, absent := slices.BinarySearch(w.planned.Absent, i); !absent {
			w.sizes[w.of[i]] = s.loader.Size(want)
		}
	}
	return w, nil
}

// name returns the checkpoint's name for messages.
func (s *source) name() string {
	if s.row.Run == "" {
		return s.row.ID
	}
	return s.row.Run + "@" + s.row.ID
}

// want returns the want of an item.
func (s *source) want(it client.Item) (checkpoint.Want, error) {
	if it.FQN == "" {
		return checkpoint.Want{}, errors.New("an item has no name")
	}
	w := checkpoint.Want{Value: it.Value, Shard: tensor.Shard{FQN: it.FQN}}
	if !it.Value {
		w.Shard.DType, w.Shard.Global, w.Shard.Box = it.DType, it.Shape, tensor.Box{Offsets: it.Offsets, Sizes: it.Sizes}
		return w, nil
	}
	if it.Rank != nil {
		w.Rank = *it.Rank
		return w, nil
	}
	if ranks := s.perRank(it.FQN); len(ranks) > 0 {
		return checkpoint.Want{}, fmt.Errorf("value %q was saved by each of the ranks %v for itself: give the rank of the one to read", it.FQN, ranks)
	}
	return w, nil
}

// perRank returns the ranks that each saved the value for themselves, if any.
func (s *source) perRank(fqn string) (ranks []int) {
	for _, v := range s.values(fqn) {
		if v.PerRank {
			ranks = append(ranks, v.Rank)
		}
	}
	return ranks
}

// values returns the values of a name, which are adjacent.
func (s *source) values(fqn string) []checkpoint.Value {
	all := s.manifest.Layout.Values
	from, _ := slices.BinarySearchFunc(all, fqn, func(v checkpoint.Value, name string) int { return strings.Compare(v.FQN, name) })
	to := from
	for to < len(all) && all[to].FQN == fqn {
		to++
	}
	return all[from:to]
}

// serveRead answers read. If the caller does not get the reply, it frees the
// read.
func (s *Server) serveRead(w http.ResponseWriter, r *http.Request) {
	req, err := httpkit.Request[Request](w, r, maxBody)
	if err != nil {
		httpkit.Refuse(w, err)
		return
	}
	out, err := s.onRead(r.Context(), req)
	if err != nil {
		httpkit.Refuse(w, err)
		return
	}
	if httpkit.Reply(w, out) != nil {
		_, _ = s.onDone(r.Context(), Done{out.Read}) // the caller is gone
	}
}

func (s *Server) onRead(ctx context.Context, req Request) (out Reply, err error) {
	src, err := s.source(ctx, req.Ref)
	if err != nil {
		return out, err
	}
	w, err := src.plan(req)
	if err != nil {
		return out, err
	}
	if err := w.place(ctx); err != nil {
		return out, unreadable(src.row, err)
	}
	f, err := s.memory.take(ctx, w.size)
	if err != nil {
		return out, fmt.Errorf("read %s: %w", src.name(), err)
	}
	if err := w.fill(ctx, f.bytes()); err != nil {
		s.memory.give(f)
		return out, unreadable(src.row, err)
	}
	id, err := s.lendFile(ctx, f)
	if err != nil {
		s.memory.free(f)
		return out, err
	}
	out = w.reply(f)
	out.Checkpoint, out.Step, out.Read = src.row.ID, src.row.Step, id
	return out, nil
}

// unreadable adds the next step to the error of a damaged or missing checkpoint.
func unreadable(row projections.Checkpoint, err error) error {
	if row.Run == "" || !errors.As(err, new(*data.CorruptError)) && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return fmt.Errorf("%w; `ckptstore ls %s` lists the others", err, row.Run)
}

// lendFile registers a caller's file, until the caller requests done or has
// ended.
func (s *Server) lendFile(ctx context.Context, f *file) (uint64, error) {
	if err := ctx.Err(); err != nil {
		return 0, err // the caller is gone
	}
	pid, err := peer.Of(ctx)
	if err != nil && !errors.Is(err, peer.ErrUnknown) {
		return 0, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return 0, errors.New("the server has ended")
	}
	of := s.owners[pid]
	if of == nil && pid > 0 {
		of = &owner{pid: pid}
		if of.stop, err = peer.Watch(pid, func() { s.gone(of) }); err != nil {
			return 0, fmt.Errorf("watch the reading process: %w", err)
		}
		s.owners[pid] = of
	}
	if of != nil {
		of.reads++
	}
	s.next++
	s.reads[s.next] = &read{f, of}
	return s.next, nil
}

// gone frees the reads of a process that has ended.
func (s *Server) gone(of *owner) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, r := range s.reads {
		if r.owner == of {
			delete(s.reads, id)
			s.memory.give(r.file)
		}
	}
	if s.owners[of.pid] == of {
		delete(s.owners, of.pid)
		go of.stop() // it waits for this function
	}
}

func (s *Server) onDone(_ context.Context, req Done) (struct{}, error) {
	s.mu.Lock()
	r := s.reads[req.Read]
	if r == nil {
		s.mu.Unlock()
		return struct{}{}, problem.Errorf(problem.Invalid, "there is no read %d to release", req.Read)
	}
	delete(s.reads, req.Read)
	s.memory.give(r.file)
	var stop func()
	if r.owner != nil {
		if r.owner.reads--; r.owner.reads == 0 {
			delete(s.owners, r.owner.pid)
			stop = r.owner.stop
		}
	}
	s.mu.Unlock()
	if stop != nil {
		stop()
	}
	return struct{}{}, nil
}

// Close frees all memory, including reads that callers have not released; they
// may still read their mappings. All requests must have ended.
func (s *Server) Close() error {
	s.mu.Lock()
	s.closed = true
	var stops sync.WaitGroup
	for _, of := range s.owners {
		stops.Go(of.stop)
	}
	clear(s.owners)
	for id, r := range s.reads {
		delete(s.reads, id)
		s.memory.free(r.file)
	}
	s.mu.Unlock()
	stops.Wait()
	if err := s.memory.close(); err != nil {
		return fmt.Errorf("close the reading of checkpoints: %w", err)
	}
	return nil
}
