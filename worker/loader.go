package worker

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"slices"
	"strings"
	"sync"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/planner/plan"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/storage"
	"github.com/ckptstore/ckptstore/worker/client"
)

// loader serves collective loads. The n-th load of an attempt is resolved
// once, when every rank has asked for it; so no two ranks can restore
// different checkpoints, whatever is committed in between.
type loader struct {
	g      *group
	arenas *arenas

	mu     sync.Mutex
	counts map[int]int // loads a rank has asked for
	loads  map[int]*load
	lent   map[string]*arena // by path: what workers copy from
	over   error             // why no load can be complete any more
}

// load is one collective load.
type load struct {
	n        int
	asked    map[int]client.LoadRequest
	complete chan struct{} // closed when every rank has asked, or none will
	over     error         // set before complete is closed
	resolve  sync.Once
	err      error
	ckpt     projections.Checkpoint
	manifest plan.Manifest
	planner  *planner.Loader
	reader   storage.Reader
	unread   []string

	mu       sync.Mutex
	bytes    int64
	finished int
}

func newLoader(g *group, a *arenas) *loader {
	return &loader{g: g, arenas: a, counts: map[int]int{}, loads: map[int]*load{}, lent: map[string]*arena{}}
}

// join adds rank's request to the next load of the rank.
func (l *loader) join(rank int, req client.LoadRequest) (*load, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.counts[rank]++
	n := l.counts[rank]
	ld := l.loads[n]
	if ld == nil && l.over != nil {
		return nil, &problem{http.StatusConflict, l.over}
	}
	if ld == nil {
		ld = &load{n: n, asked: map[int]client.LoadRequest{}, complete: make(chan struct{})}
		l.loads[n] = ld
	}
	ld.asked[rank] = req
	if len(ld.asked) == l.g.cfg.NProc && ld.over == nil {
		close(ld.complete)
	}
	return ld, nil
}

// end releases the ranks that wait for one whose process has ended.
func (l *loader) end(why error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.over = why
	for _, ld := range l.loads {
		if len(ld.asked) < l.g.cfg.NProc && ld.over == nil {
			ld.over = why
			close(ld.complete)
		}
	}
}

// absent lists the ranks that have not joined a load.
func (l *loader) absent(ld *load) []int {
	l.mu.Lock()
	defer l.mu.Unlock()
	var ranks []int
	for rank := range l.g.cfg.NProc {
		if _, ok := ld.asked[rank]; !ok {
			ranks = append(ranks, rank)
		}
	}
	return ranks
}

func (s *rankServer) onLoad(ctx context.Context, req client.LoadRequest) (client.LoadReply, error) {
	for _, it := range req.Items {
		if it.FQN == "" {
			return client.LoadReply{}, badRequest("an item has no name")
		}
	}
	ld, err := s.loader.join(s.rank, req)
	if err != nil {
		return client.LoadReply{}, err
	}
	wait, cancel := context.WithTimeout(ctx, s.cfg.Collective)
	defer cancel()
	select {
	case <-ld.complete:
	case <-wait.Done():
		return client.LoadReply{}, &problem{http.StatusGatewayTimeout, fmt.Errorf(
			"load %d is a collective, and ranks %v have not called it: %w", ld.n, s.loader.absent(ld), wait.Err())}
	}
	if ld.over != nil {
		return client.LoadReply{}, &problem{http.StatusConflict, ld.over}
	}
	ld.resolve.Do(func() { ld.err = s.resolve(ctx, ld) })
	if ld.err != nil {
		return client.LoadReply{}, &problem{http.StatusConflict, ld.err}
	}
	reply, err := s.read(ctx, ld, req.Items)
	if err != nil {
		sayErr := s.lane.say(ctx, &events.RestoreFailed{Attempt: s.attempt, Load: ld.n, Checkpoint: ld.ckpt.ID, Error: fmt.Sprintf("rank %d: %v", s.rank, err)})
		return client.LoadReply{}, errors.Join(err, sayErr)
	}
	return reply, nil
}

// resolve decides, once for all ranks, which checkpoint a load reads.
func (s *rankServer) resolve(ctx context.Context, ld *load) error {
	ref := ld.asked[0].Ref
	asked := map[string]bool{}
	strict := false
	for rank := range s.cfg.NProc {
		r := ld.asked[rank]
		if r.Ref != ref {
			return fmt.Errorf("load %d: rank 0 asks for %q and rank %d for %q", ld.n, ref, rank, r.Ref)
		}
		strict = strict || r.Strict
		for _, it := range r.Items {
			asked[it.FQN] = true
		}
	}
	if ref == "" {
		ref = s.resume
	}
	if ref == "" {
		return fmt.Errorf("load %d: there is nothing to resume from; check the context's resume field, or name a checkpoint", ld.n)
	}
	c, err := s.store.Views.Resolve(ctx, qualify(s.cfg.Run, ref))
	if err != nil {
		return err
	}
	digest, err := plan.ParseDigest(c.Manifest)
	if err != nil {
		return fmt.Errorf("checkpoint %s: %w", c.ID, err)
	}
	reader := s.store.Data.Reader(storage.RefOf(c.Run, c.Trial, c.ID)).WithManifest(digest)
	m, err := reader.ReadMetadata(ctx)
	if err != nil {
		return unreadable(c, err)
	}
	if err := reader.SetUp(ctx, m, true); err != nil {
		return err
	}
	ld.ckpt, ld.manifest, ld.reader = c, m, reader
	ld.planner = planner.NewLoader(m.Layout)
	ld.unread = planner.Unread(m.Layout, asked)
	if strict && len(ld.unread) > 0 {
		return fmt.Errorf("load %d of %s: these saved keys are not asked for by any rank: %q; ask for them, or load without strict", ld.n, c.ID, ld.unread)
	}
	_, err = s.lane.decide(ctx, &events.RestoreBegun{Attempt: s.attempt, Load: ld.n, Checkpoint: c.ID, WorldSize: s.cfg.NProc})
	return err
}

// wants are what rank asks for, and for each the index of its item. Optional
// values that the checkpoint has of other ranks only are left out.
func (s *rankServer) wants(ld *load, items []client.Item) (wants []plan.Want, of []int) {
	for i, it := range items {
		w := plan.Want{Value: it.Value, Shard: shard(it), Rank: s.rank}
		if it.Rank != nil {
			w.Rank = *it.Rank
		}
		if !it.Optional || !ld.planner.Lacks(w) {
			wants, of = append(wants, w), append(of, i)
		}
	}
	return wants, of
}

// read fills rank's load arena with what it wants.
func (s *rankServer) read(ctx context.Context, ld *load, items []client.Item) (client.LoadReply, error) {
	wants, of := s.wants(ld, items)
	reads, err := ld.planner.Load(wants)
	if err != nil {
		return client.LoadReply{}, &problem{http.StatusBadRequest, fmt.Errorf("load %s: %w", ld.ckpt.ID, err)}
	}
	if reads, err = ld.reader.PrepareLocalPlan(ctx, reads); err != nil {
		return client.LoadReply{}, unreadable(ld.ckpt, err)
	}
	sizes := make([]int64, len(wants))
	for i, w := range wants {
		sizes[i] = ld.planner.Size(w)
	}
	offsets, size := place(sizes)
	a, err := s.loader.arenas.take(s.rank, "load", size)
	if err != nil {
		return client.LoadReply{}, err
	}
	dst := make(loadTarget, len(wants))
	reply := client.LoadReply{
		Checkpoint: ld.ckpt.ID, Step: ld.ckpt.Step, Arena: a.path, Size: size, Unread: ld.unread,
		Offsets: make([]int64, len(items)), Sizes: slices.Repeat([]int64{-1}, len(items)),
	}
	for i := range wants {
		dst[i] = a.data[offsets[i] : offsets[i]+sizes[i]]
		reply.Offsets[of[i]], reply.Sizes[of[i]] = offsets[i], sizes[i]
	}
	n, err := ld.reader.ReadData(ctx, wants, reads, dst)
	if err == nil {
		err = s.finish(ctx, ld, len(reads), n)
	}
	if err != nil {
		return client.LoadReply{}, errors.Join(unreadable(ld.ckpt, err), s.loader.arenas.drop(a))
	}
	s.loader.lend(a)
	return reply, nil
}

// lend remembers an arena that a worker copies from.
func (l *loader) lend(a *arena) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lent[a.path] = a
}

// onLoaded takes an arena back from the worker.
func (s *rankServer) onLoaded(_ context.Context, req client.LoadedRequest) (struct{}, error) {
	l := s.loader
	l.mu.Lock()
	defer l.mu.Unlock()
	a, ok := l.lent[req.Arena]
	if !ok || a.rank != s.rank {
		return struct{}{}, badRequest("rank %d has no load in %q", s.rank, req.Arena)
	}
	delete(l.lent, req.Arena)
	l.arenas.give(a)
	return struct{}{}, nil
}

// close drops the arenas that workers have not given back.
func (l *loader) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for path, a := range l.lent {
		delete(l.lent, path)
		_ = l.arenas.drop(a) // what cannot be removed stays until the job ends
	}
}

// finish says what a rank has read, and with the last rank that the load is
// complete.
func (s *rankServer) finish(ctx context.Context, ld *load, reads int, n int64) error {
	ld.mu.Lock()
	ld.bytes += n
	ld.finished++
	last, sum := ld.finished == s.cfg.NProc, ld.bytes
	ld.mu.Unlock()
	err := s.lane.sayAs(ctx, s.lane.trial, events.Rank(s.rank), &events.LoadPlan{
		Attempt: s.attempt, Load: ld.n, Checkpoint: ld.ckpt.ID, Rank: s.rank, Reads: reads, Bytes: n,
	})
	if err == nil && last {
		err = s.lane.say(ctx, &events.RestoreCompleted{
			Attempt: s.attempt, Load: ld.n, Checkpoint: ld.ckpt.ID, Tier: "files", Bytes: sum, Unread: ld.unread,
		})
	}
	return err
}

// loadTarget is the buffers of a rank's wants.
type loadTarget [][]byte

// Want implements storage.Destination.
func (t loadTarget) Want(i int) []byte { return t[i] }

// unreadable says what to do about a checkpoint that is damaged or gone: the
// next attempt would resume from it too.
func unreadable(c projections.Checkpoint, err error) error {
	if !errors.As(err, new(*storage.CorruptError)) && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return fmt.Errorf("%w; `ckptstore ls %s` lists the others: end the job and start it with --resume %s@ID of an intact one", err, c.Run, c.Run)
}

// qualify makes a reference of a run out of what a worker names: a full
// reference, or an ID or name in its own run.
func qualify(run, ref string) string {
	if strings.Contains(ref, "@") {
		return ref
	}
	return run + "@" + ref
}
