package restore

import (
	"errors"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/session/staging"
)

func verifying(rank int) client.LoadRequest {
	req := whole(rank)
	req.Verifies = true
	return req
}

// confirm makes ranks report that they have their part, and returns the result of each.
func (g *group) confirm(t *testing.T, load int, ranks []int, said func(rank int) client.LoadedRequest) func() map[int]result {
	var mu sync.Mutex
	var wg sync.WaitGroup
	got := map[int]result{}
	for _, rank := range ranks {
		wg.Go(func() {
			req := said(rank)
			req.Load = load
			err := g.loaders[rank/2].Loaded(t.Context(), rank, req, limit)
			mu.Lock()
			defer mu.Unlock()
			got[rank] = result{err: err}
		})
	}
	return func() map[int]result {
		wg.Wait()
		return got
	}
}

func fine(int) client.LoadedRequest { return client.LoadedRequest{} }

// toVerify loads on all ranks, which must verify their part.
func (g *group) toVerify(t *testing.T) (load int) {
	t.Helper()
	for rank, r := range g.load(t, all, verifying) {
		if r.err != nil || r.reply.Checks == nil {
			t.Fatalf("rank %d: %+v, %v", rank, r.reply, r.err)
		}
		load = r.reply.Load
	}
	return load
}

// Ranks of two nodes verify what they copy. The load is complete when all have, and has
// failed for all nodes when one rank reports damage, or cannot report any more.
func TestNodesVerify(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGroup(t)
		early := g.confirm(t, g.toVerify(t), []int{0, 1, 2}, fine)
		synctest.Wait()
		if got := g.log.counts(); got != [3]int{1, 0, 0} {
			t.Errorf("before rank 3 has verified its part, the log has %v", got)
		}
		for _, got := range []map[int]result{g.confirm(t, 1, []int{3}, fine)(), early()} {
			for rank, r := range got {
				if r.err != nil {
					t.Errorf("rank %d: %v", rank, r.err)
				}
			}
		}
		if got := g.log.counts(); got != [3]int{1, 1, 0} || g.log.completed[0].Bytes < rows*columns {
			t.Errorf("the log has %v, %+v", got, g.log.completed)
		}
		g.log.completed = nil

		got := g.confirm(t, g.toVerify(t), all, func(rank int) (said client.LoadedRequest) {
			if rank == 3 {
				said.Damaged = "my memory is bad"
			}
			return said
		})()
		says := "load 2 of " + saved + ": the copy of rank 3 is damaged (my memory is bad), the checkpoint is not: load it again"
		fails(t, got, all, problem.Conflict, says)
		fails(t, got, []int{0, 1}, problem.Conflict, "node 1 (ranks [2 3]): load 2 ")
		if text := g.log.failure(t); text != "node 1 (ranks [2 3]): "+says {
			t.Errorf("the log has %q", text)
		}
		g.log.failed = nil

		waiting := g.confirm(t, g.toVerify(t), []int{0, 1, 2}, fine)
		synctest.Wait()
		g.loaders[1].End(3, errors.New("rank 3 was killed"))
		fails(t, waiting(), []int{0, 1, 2}, problem.Conflict, "load 3 is a collective: rank 3 was killed")
		if text := g.log.failure(t); text != "node 1 (ranks [2 3]): load 3 is a collective: rank 3 was killed" {
			t.Errorf("the log has %q", text)
		}
	})
}

// Damage in a file that a rank finds is confirmed by its node, and fails the load for all.
func TestNodesFindDamage(t *testing.T) {
	g := newGroup(t)
	g.damage(t, 2)
	got := g.confirm(t, g.toVerify(t), all, func(rank int) (said client.LoadedRequest) {
		if rank == 3 {
			said.Damaged = "a block is another"
		}
		return said
	})()
	fails(t, got, all, problem.Damage, "checksum of the block", "ckptstore ls run")
}

// A rank that does not confirm its part is named to the ranks of all nodes.
func TestRankOfNodeVerifiesTooLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGroup(t)
		got := g.confirm(t, g.toVerify(t), []int{0, 1, 2}, fine)()
		fails(t, got, []int{0, 1}, problem.Late, "have not confirmed their part: context deadline exceeded")
		fails(t, got, []int{2}, problem.Late, "ranks [3] have not confirmed their part: context deadline exceeded")
		fails(t, g.confirm(t, 1, []int{3}, fine)(), []int{3}, problem.Late, "have not confirmed their part")
	})
}

// All ranks verify or none: because of a rank that cannot, both nodes read everything.
func TestRankOfNodeDoesNotVerify(t *testing.T) {
	g := newGroup(t)
	mixed := func(rank int) client.LoadRequest {
		req := whole(rank)
		req.Verifies = rank != 1
		return req
	}
	got := g.load(t, all, mixed)
	for rank, r := range got {
		if r.err != nil || r.reply.Checks != nil {
			t.Errorf("rank %d: %+v, %v", rank, r.reply, r.err)
		}
	}
	g.intact(t, got, mixed)
}

// A slot whose digest is known to differ from the committed one is not lent to ranks that verify: its bytes
// come from the files, and the load does not fail.
func TestSlotOfAnotherDigestNotLent(t *testing.T) {
	item := checkpoint.Item{Shard: rowsOf(2, savedBy), Bytes: rows / savedBy * columns}
	asks := func(int) client.LoadRequest {
		return client.LoadRequest{Ref: "step-5", Verifies: true, Items: []client.Item{itemOfShard(item.Shard)}}
	}
	for name, of := range map[string]struct {
		bytes []byte
		slots int64
	}{
		"same":    {bytesOf(item.Shard), item.Bytes},
		"another": {make([]byte, item.Bytes), 0},
	} {
		t.Run(name, func(t *testing.T) {
			g := newGroup(t)
			s := staging.New(g.loaders[1].cfg.Arenas, staging.Config{
				Slots: 1, Ranks: 4, Busy: staging.BusyWait, Memory: staging.Memory{Bytes: 1 << 30}, Log: slog.New(slog.DiscardHandler),
			})
			keep(t, s, saved, 2, item, of.bytes)
			s.Close()
			got := g.load(t, []int{2, 3}, asks)
			g.intact(t, got, asks)
			if done := g.log.completed; len(done) != 1 || done[0].Slots != 2*of.slots {
				t.Errorf("completed %+v; want %d bytes from slots", done, 2*of.slots)
			}
		})
	}
}
