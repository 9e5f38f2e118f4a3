package worker

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/planner/plan"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/storage"
	"github.com/ckptstore/ckptstore/worker/client"
)

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
	reader, c, err := s.reader(ctx, ref)
	if err != nil {
		return err
	}
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
		return fmt.Errorf("load %d of %s: %w", ld.n, c.ID, &planner.UnreadError{FQNs: ld.unread})
	}
	_, err = s.lane.decide(ctx, &events.RestoreBegun{Attempt: s.attempt, Load: ld.n, Checkpoint: c.ID, WorldSize: s.cfg.NProc})
	return err
}

// reader reads the checkpoint that a reference names. One that lies at a path
// has that path for its ID.
func (s *rankServer) reader(ctx context.Context, ref string) (storage.Reader, projections.Checkpoint, error) {
	if isPath(ref) {
		f, err := s.store.Foreign(ctx, ref)
		if err != nil {
			return nil, projections.Checkpoint{}, err
		}
		return f, projections.Checkpoint{ID: f.Path(), Step: -1}, nil
	}
	c, err := s.store.Views.Resolve(ctx, qualify(s.cfg.Run, ref))
	if err != nil {
		return nil, c, err
	}
	digest, err := plan.ParseDigest(c.Manifest)
	if err != nil {
		return nil, c, fmt.Errorf("checkpoint %s: %w", c.ID, err)
	}
	return s.store.Data.Reader(storage.RefOf(c.Run, c.Trial, c.ID)).WithManifest(digest), c, nil
}

// isPath reports whether a reference is the path of a checkpoint of another
// program: no name of a run begins so by accident.
func isPath(ref string) bool {
	return strings.HasPrefix(ref, "/") || strings.HasPrefix(ref, "./") || strings.HasPrefix(ref, "../")
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
func (s *rankServer) read(ctx context.Context, ld *load, req client.LoadRequest) (client.LoadReply, error) {
	items := req.Items
	wants, of := s.wants(ld, items)
	planned, err := ld.planner.LoadWith(wants, planner.LoadOptions{Partial: req.Partial, StrictDType: req.StrictDType})
	if err != nil {
		return client.LoadReply{}, &problem{http.StatusBadRequest, fmt.Errorf("load %s: %w", ld.ckpt.ID, err)}
	}
	reads, err := ld.reader.PrepareLocalPlan(ctx, planned.Reads)
	if err != nil {
		return client.LoadReply{}, unreadable(ld.ckpt, err)
	}
	sizes := make([]int64, len(wants))
	for i, w := range wants {
		if _, absent := slices.BinarySearch(planned.Absent, i); !absent {
			sizes[i] = ld.planner.Size(w)
		}
	}
	offsets, size := place(sizes)
	a, err := s.loader.arenas.take(ctx, s.rank, "load", size)
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
		if _, absent := slices.BinarySearch(planned.Absent, i); !absent {
			reply.Offsets[of[i]], reply.Sizes[of[i]] = offsets[i], sizes[i]
		}
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
	if c.Run == "" || !errors.As(err, new(*storage.CorruptError)) && !errors.Is(err, fs.ErrNotExist) {
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
