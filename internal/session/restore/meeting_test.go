package restore

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/foreign"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/projections"
)

// Ranks on two nodes load what three ranks saved. The load is one, in the log too,
// even if each answer to a node is lost once.
func TestNodesLoad(t *testing.T) {
	for name, lost := range map[string]bool{"in order": false, "lost answers": true} {
		t.Run(name, func(t *testing.T) {
			g := newGroup(t)
			g.wire.lost = lost
			g.intact(t, g.load(t, all, whole), whole)
			if got := g.log.counts(); got != [3]int{1, 1, 0} {
				t.Fatalf("the log has %v loads that began, completed and failed", got)
			}
			begun, done := g.log.begun[0], g.log.completed[0]
			if begun.Load != 1 || begun.Checkpoint != saved || begun.WorldSize != 4 || begun.Attempt != 2 {
				t.Errorf("begun: %+v", begun)
			}
			sum := int64(0)
			for _, p := range g.log.plans {
				if sum += p.Bytes; p.Load != 1 || p.Attempt != 2 || p.Checkpoint != saved || p.Reads < 3 {
					t.Errorf("plan: %+v", p)
				}
			}
			if !slices.Equal(ranksOf(g.log.plans), all) || sum != rows*columns+4*(200_000+configBytes) {
				t.Errorf("%d bytes in the plans %+v", sum, g.log.plans)
			}
			// Each node reads what all its ranks have once.
			if want := int64(rows*columns + 2*(200_000+configBytes)); done.Wanted != want || done.Bytes < want || done.Tier != "files" || done.Load != 1 {
				t.Errorf("completed: %+v, want %d bytes", done, want)
			}
		})
	}
}

// The same request gets the same answer for as long as the attempt lasts, and changes
// nothing.
func TestRepeatedRequests(t *testing.T) {
	g := newGroup(t)
	g.intact(t, g.load(t, all, whole), whole)
	asks := []Ask{{Rank: 2, Ref: "step-5"}, {Rank: 3, Ref: "another"}}
	first, err := g.meeting.Resolve(t.Context(), 1, ResolveRequest{Key: Key{N: 1}, Asks: asks})
	if err != nil || first.Load != 1 || first.Checkpoint.ID != saved || first.Failure != nil || first.opened != nil {
		t.Errorf("%+v, %v", first, err)
	}
	again, err := g.meeting.Resolve(t.Context(), 1, ResolveRequest{Key: Key{N: 1}, Asks: asks[:1]})
	if err != nil || !reflect.DeepEqual(first, again) {
		t.Errorf("%+v, %v; want %+v", again, err, first)
	}
	for _, failure := range []*Failure{nil, {Text: "too late"}} {
		reply, err := g.meeting.Done(t.Context(), 1, DoneRequest{Key: Key{N: 1}, Report: Report{Parts: []Part{{Rank: 2}, {Rank: 3}}}, Failure: failure})
		if err != nil || reply.Failure != nil {
			t.Errorf("%+v, %v", reply, err)
		}
	}
	if got := g.log.counts(); got != [3]int{1, 1, 0} {
		t.Errorf("the log has %v loads that began, completed and failed", got)
	}
}

// The memory of a meeting does not grow with the loads of an attempt. The answers to the last ones can be asked
// for again, and what was forgotten is not begun again.
func TestMeetingForgets(t *testing.T) {
	g := newGroup(t)
	const loads = keptLoads + 3
	key := func(n int) Key { return Key{Participants: []int{3}, N: n} }
	for range loads {
		g.intact(t, g.load(t, []int{3}, whole), whole)
	}
	g.meeting.mu.Lock()
	known := len(g.meeting.loads)
	g.meeting.mu.Unlock()
	if known != keptLoads {
		t.Errorf("after %d loads, %d are known, want %d", loads, known, keptLoads)
	}
	asks := []Ask{{Rank: 3, Ref: "another"}}
	for _, n := range []int{loads - keptLoads + 1, loads} {
		if got, err := g.meeting.Resolve(t.Context(), 1, ResolveRequest{Key: key(n), Asks: asks}); err != nil || got.Load != n || got.Checkpoint.ID != saved {
			t.Errorf("load %d again: %+v, %v", n, got, err)
		}
	}
	for _, n := range []int{1, loads - keptLoads} {
		_, err := g.meeting.Resolve(t.Context(), 1, ResolveRequest{Key: key(n), Asks: asks})
		if !slices.Equal(problem.Kinds(err), []problem.Kind{problem.Conflict}) {
			t.Errorf("load %d, which is forgotten: %v", n, err)
		}
	}
	if got := g.log.counts(); got != [3]int{loads, loads, 0} {
		t.Errorf("the log has %v loads that began, completed and failed", got)
	}
}

// Loads that have not ended are not forgotten: a node may still wait for them.
func TestMeetingKeepsOpenLoads(t *testing.T) {
	g := newGroup(t)
	first := Key{Participants: []int{2, 3}, N: 1}
	asks := []Ask{{Rank: 2, Ref: "step-5"}, {Rank: 3, Ref: "step-5"}}
	for n := 1; n <= keptLoads+3; n++ {
		if got, err := g.meeting.Resolve(t.Context(), 1, ResolveRequest{Key: Key{Participants: first.Participants, N: n}, Asks: asks}); err != nil || got.Failure != nil {
			t.Fatalf("%+v, %v", got, err)
		}
	}
	done := DoneRequest{Key: first, Report: Report{Parts: []Part{{Rank: 2}, {Rank: 3}}}}
	if reply, err := g.meeting.Done(t.Context(), 1, done); err != nil || reply.Failure != nil {
		t.Errorf("%+v, %v", reply, err)
	}
}

// Requests that do not fit the group are refused and leave no trace.
func TestMisfitRequests(t *testing.T) {
	g := newGroup(t)
	for name, do := range map[string]func() error{
		"a load without a number": func() error {
			_, err := g.meeting.Resolve(t.Context(), 1, ResolveRequest{})
			return err
		},
		"a node too many": func() error {
			_, err := g.meeting.Resolve(t.Context(), 2, ResolveRequest{Key: Key{N: 1}})
			return err
		},
		"a node without participants": func() error {
			_, err := g.meeting.Resolve(t.Context(), 0, ResolveRequest{Key: Key{Participants: []int{2, 3}, N: 1}})
			return err
		},
		"a rank too many": func() error {
			_, err := g.meeting.Resolve(t.Context(), 1, ResolveRequest{Key: Key{Participants: []int{3, 4}, N: 1}})
			return err
		},
		"a participant twice": func() error {
			_, err := g.meeting.Resolve(t.Context(), 1, ResolveRequest{Key: Key{Participants: []int{3, 3}, N: 1}})
			return err
		},
		"a rank of another node": func() error {
			_, err := g.meeting.Resolve(t.Context(), 0, ResolveRequest{Key: Key{N: 1}, Asks: []Ask{{Rank: 2}}})
			return err
		},
		"an unknown load": func() error {
			_, err := g.meeting.Done(t.Context(), 1, DoneRequest{Key: Key{N: 1}})
			return err
		},
	} {
		if err := do(); err == nil || !slices.Equal(problem.Kinds(err), []problem.Kind{problem.Invalid}) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if got := g.load(t, all, whole); got[0].reply.Load != 1 {
		t.Errorf("%+v", got[0])
	}
}

// Ranks on the node that does not coordinate load without the others, under numbers of
// their own.
func TestNodesLoadInParts(t *testing.T) {
	g := newGroup(t)
	for n, participants := range [][]int{{2, 3}, {3}, {0}, {1, 2}, all, {2, 3}} {
		got := g.load(t, participants, whole)
		g.intact(t, got, whole)
		for rank, r := range got {
			if r.reply.Load != n+1 {
				t.Errorf("the ranks %v load, and for rank %d that is load %d, want %d", participants, rank, r.reply.Load, n+1)
			}
		}
		if got := g.log.begun[n]; got.Load != n+1 || got.WorldSize != 4 {
			t.Errorf("begun: %+v", got)
		}
	}
	if got := g.log.counts(); got != [3]int{6, 6, 0} {
		t.Errorf("the log has %v loads that began, completed and failed", got)
	}
}

// All ranks get the same error if their requests do not fit, and the next load is
// served.
func TestNodesDisagree(t *testing.T) {
	g := newGroup(t)
	fails(t, g.load(t, all, func(rank int) client.LoadRequest {
		req := whole(rank)
		if rank > 1 {
			req.Ref = "another"
		}
		return req
	}), all, problem.Conflict, `load 1: rank 0 asks for "step-5" and rank 2 for "another"`)
	fails(t, g.load(t, all, func(int) client.LoadRequest { return client.LoadRequest{} }), all, problem.Conflict, "load 2: there is nothing to resume from")
	fails(t, g.load(t, all, func(int) client.LoadRequest { return client.LoadRequest{Ref: "absent"} }), all, problem.Conflict, "no checkpoint run@absent")

	// Only the nodes together ask for all keys.
	split := func(without string) func(rank int) client.LoadRequest {
		return func(rank int) client.LoadRequest {
			req := whole(rank)
			req.Strict = rank == 2
			req.Items = slices.DeleteFunc(req.Items, func(it client.Item) bool {
				return it.FQN == without || (it.FQN == "weight") == (rank > 1) && without == ""
			})
			return req
		}
	}
	fails(t, g.load(t, all, split("config")), all, problem.Conflict, "load 4 of "+saved, `saved keys that no rank asks for: ["config"]`)
	if got := g.log.counts(); got != [3]int{} {
		t.Errorf("the log has %v loads that began, completed and failed", got)
	}
	g.intact(t, g.load(t, all, split("")), split(""))
	if got := g.log.counts(); got != [3]int{1, 1, 0} || g.log.begun[0].Load != 5 || len(g.log.completed[0].Unread) != 0 {
		t.Errorf("the log has %v loads that began, completed and failed, %+v", got, g.log.completed)
	}
}

// A rank that cannot load ends the load for the ranks of all nodes, whether they have
// asked or not.
func TestRankOfNodeCannotLoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGroup(t)
		before := g.start(t, all, []int{0, 2}, whole)
		synctest.Wait()
		refusing := g.start(t, all, []int{3}, func(int) client.LoadRequest { return client.LoadRequest{Refused: `"bias" is sparse`} })
		says := `load 1 is a collective, and rank 3 cannot take part in it: "bias" is sparse`
		fails(t, before(), []int{0, 2}, problem.Conflict, says)
		fails(t, refusing(), []int{3}, problem.Conflict, says)
		fails(t, g.start(t, all, []int{1}, whole)(), []int{1}, problem.Conflict, says)
		g.intact(t, g.load(t, all, whole), whole)
		if got := g.log.counts(); got != [3]int{1, 1, 0} || len(g.loaders[0].loads)+len(g.loaders[1].loads) > 0 {
			t.Errorf("the log has %v loads that began, completed and failed; loads are left", got)
		}
	})
}

// Ranks that cannot be served get their own reason, and the others learn the node and
// the ranks.
func TestNodeCannotServe(t *testing.T) {
	g := newGroup(t)
	got := g.load(t, all, func(rank int) client.LoadRequest {
		req := whole(rank)
		if req.Strict = false; rank == 3 {
			req.Items[0].FQN = "absent"
		}
		return req
	})
	says := `rank 3: load ` + saved + `: missing key "absent"`
	fails(t, got, []int{3}, problem.Invalid, says)
	fails(t, got, []int{2}, problem.Conflict, "load 1 is a collective, and cannot be served to all ranks: "+says)
	fails(t, got, []int{0, 1}, problem.Conflict, "node 1 (ranks [2 3]): load 1 is a collective, and cannot be served to all ranks: "+says)
	if text := g.log.failure(t); !strings.Contains(text, says) {
		t.Errorf("the log has %q", text)
	}
	g.intact(t, g.load(t, all, whole), whole)
}

// A damaged file that only one node reads fails the load on all nodes.
func TestNodesReadDamage(t *testing.T) {
	g := newGroup(t)
	g.damage(t, 2) // its rows are those of rank 3, and some of rank 2
	got := g.load(t, all, whole)
	fails(t, got, []int{2, 3}, problem.Damage, "checksum of the block", "ckptstore ls run")
	fails(t, got, []int{0, 1}, problem.Damage, "node 1 (ranks [2 3]): ", "checksum of the block", "ckptstore ls run")
	if text := g.log.failure(t); !strings.HasPrefix(text, "node 1 (ranks [2 3]): ") || strings.Count(text, "ckptstore ls run") != 1 {
		t.Errorf("the log has %q", text)
	}
}

// A node that is gone after the load was resolved ends it for the others, and so does a
// node that does not report.
func TestNodeEndsBeforeItReports(t *testing.T) {
	for name, c := range map[string]struct {
		kind problem.Kind
		says string
	}{
		"gone": {problem.Conflict, "load 1 is a collective, and node 1 (ranks [2 3]) is gone: its link is cut"},
		"late": {problem.Late, "load 1 is a collective, and ranks [2 3] have not confirmed their part: context deadline exceeded"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newGroup(t)
				stuck := make(chan struct{})
				g.wire.done = func() { <-stuck }
				near, far := g.start(t, all, []int{0, 1}, whole), g.start(t, all, []int{2, 3}, whole)
				if synctest.Wait(); name == "gone" {
					g.meeting.EndNode(1, errors.New("its link is cut"))
				}
				fails(t, near(), []int{0, 1}, c.kind, c.says)
				close(stuck) // the node is back, too late
				fails(t, far(), []int{2, 3}, c.kind, c.says)
				if text := g.log.failure(t); text != c.says {
					t.Errorf("the log has %q", text)
				}
			})
		})
	}
}

// A rank that does not ask ends the load after the limit, and is named to the ranks of
// all nodes.
func TestRankOfNodeNeverLoads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGroup(t)
		got := g.start(t, all, []int{0, 1, 3}, whole)()
		fails(t, got, []int{0, 1, 3}, problem.Late, "load 1 is a collective, and ranks [2] have not called it: context deadline exceeded")
		fails(t, g.start(t, all, []int{2}, whole)(), []int{2}, problem.Late, "ranks [2] have not called it")
		g.intact(t, g.load(t, all, whole), whole)
	})
}

// A rank whose process has ended releases the ranks of all nodes, now and later.
func TestRankOfNodeEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGroup(t)
		waiting := g.start(t, all, []int{0, 1, 2}, whole)
		synctest.Wait()
		why := errors.New("rank 3 exited with code 0, so the group cannot meet any more")
		g.loaders[1].End(3, why)
		fails(t, g.start(t, []int{2}, []int{2}, whole)(), []int{2}, problem.Conflict, why.Error())
		g.meeting.End(why)
		fails(t, waiting(), []int{0, 1, 2}, problem.Conflict, why.Error())
		fails(t, g.load(t, []int{0, 1}, whole), []int{0, 1}, problem.Conflict, why.Error())
		if got := g.log.counts(); got != [3]int{} {
			t.Errorf("the log has %v loads that began, completed and failed", got)
		}
	})
}

// A rank that leaves does not keep the others from their answers, also if it is the
// only one of its node.
func TestRanksOfNodeLeave(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGroup(t)
		reading := make(chan struct{})
		g.loaders[1].cfg.Store.Reader = func(own *data.FileReader) data.Reader { return held{own, reading} }
		left, leave := context.WithCancel(t.Context())
		gone := make(chan error, 1)
		go func() {
			_, err := g.loaders[1].Load(left, 2, []int{0, 2}, whole(2), limit)
			gone <- err
		}()
		rest := g.start(t, []int{0, 2}, []int{0}, whole)
		synctest.Wait()
		leave()
		if err := <-gone; !errors.Is(err, left.Err()) {
			t.Errorf("%v", err)
		}
		close(reading)
		g.intact(t, rest(), whole)
		if got := g.log.counts(); got != [3]int{1, 1, 0} {
			t.Errorf("the log has %v loads that began, completed and failed", got)
		}
	})
}

// held reads nothing until the channel is closed.
type held struct {
	data.Reader
	until chan struct{}
}

func (r held) ReadMetadata(ctx context.Context) (checkpoint.Manifest, error) {
	<-r.until
	return r.Reader.ReadMetadata(ctx)
}

// The end of the attempt releases all ranks.
func TestMeetingCloses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGroup(t)
		stuck := make(chan struct{})
		g.wire.done = func() { <-stuck }
		resolved := g.start(t, all, all, whole)
		open := g.start(t, []int{1, 2}, []int{1}, whole)
		synctest.Wait()
		if !g.meeting.Close(limit) {
			t.Error("the meeting does not end")
		}
		close(stuck)
		fails(t, resolved(), all, problem.Conflict, "the attempt is over")
		fails(t, open(), []int{1}, problem.Conflict, "the attempt is over")
		fails(t, g.load(t, []int{2, 3}, whole), []int{2, 3}, problem.Conflict, "the attempt is over")
		if got := g.log.counts(); got != [3]int{1, 0, 0} {
			t.Errorf("the log has %v loads that began, completed and failed", got)
		}
	})
}

// A loader that closes releases its ranks, whatever the meeting does.
func TestLoaderOfNodeCloses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGroup(t)
		waiting := g.start(t, all, []int{2}, whole)
		synctest.Wait()
		if !g.loaders[1].Close(limit) {
			t.Error("the loader does not end")
		}
		fails(t, waiting(), []int{2}, problem.Conflict, "the attempt is over")
		fails(t, g.start(t, all, []int{3}, whole)(), []int{3}, problem.Conflict, "the attempt is over")
	})
}

// A node that is gone cannot take part any more, and a load without it neither begins
// nor is complete.
func TestNodeIsGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGroup(t)
		waiting := g.start(t, all, []int{0, 2, 3}, whole)
		synctest.Wait()
		g.meeting.EndNode(1, errors.New("node 1 does not answer"))
		fails(t, waiting(), []int{0, 2, 3}, problem.Conflict, "node 1 does not answer")
		fails(t, g.load(t, []int{2, 3}, whole), []int{2, 3}, problem.Conflict, "node 1 does not answer")
		if got := g.log.counts(); got != [3]int{} {
			t.Errorf("the log has %v loads that began, completed and failed", got)
		}
	})
}

// A load that is being resolved when a node is lost, or the attempt ends, fails for all.
func TestEndsWhileResolved(t *testing.T) {
	for name, c := range map[string]struct {
		end    func(g *group)
		says   string
		events [3]int
	}{
		"node": {
			func(g *group) { g.meeting.EndNode(1, errors.New("its link is cut")) },
			"node 1 (ranks [2 3]) is gone: its link is cut",
			[3]int{1, 0, 1},
		},
		"attempt": {
			func(g *group) { go g.meeting.Close(limit) }, "the attempt is over", [3]int{1, 0, 0},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				resolving := make(chan struct{})
				g := newGroup(t, func(c *Config) {
					resolve := c.Store.Resolve
					c.Store.Resolve = func(_ context.Context, ref string) (projections.Checkpoint, error) {
						<-resolving
						return resolve(t.Context(), ref)
					}
					reader := c.Store.Reader
					c.Store.Reader = func(own *data.FileReader) data.Reader { return undying{reader(own), t.Context()} }
				})
				results := g.start(t, all, all, whole)
				synctest.Wait()
				c.end(g)
				synctest.Wait()
				close(resolving)
				fails(t, results(), all, problem.Conflict, c.says)
				if got := g.log.counts(); got != c.events {
					t.Errorf("the log has %v loads that began, completed and failed, want %v", got, c.events)
				}
			})
		})
	}
}

// undying reads a manifest after the attempt has ended.
type undying struct {
	data.Reader
	ctx context.Context
}

func (r undying) ReadMetadata(context.Context) (checkpoint.Manifest, error) {
	return r.Reader.ReadMetadata(r.ctx)
}

func (r undying) SetUp(_ context.Context, m checkpoint.Manifest, coordinator bool) error {
	return r.Reader.SetUp(r.ctx, m, coordinator)
}

// The bytes of all nodes count, and so does where each node took them from.
func TestSumOfNodes(t *testing.T) {
	g := newGroup(t)
	key := Key{Participants: []int{1, 2}, N: 1}
	var wg sync.WaitGroup
	for node := range 2 {
		wg.Go(func() {
			reply, err := g.meeting.Resolve(t.Context(), node, ResolveRequest{Key: key, Asks: []Ask{{Rank: node + 1, Ref: "step-5"}}, FQNs: []string{"config"}})
			if err != nil || reply.opened != nil || !slices.Equal(reply.Unread, []string{"bias", "weight"}) {
				t.Errorf("%+v, %v", reply, err)
			}
		})
	}
	wg.Wait()
	if _, err := g.meeting.Done(t.Context(), 0, DoneRequest{Key: key, Report: Report{Parts: []Part{{Rank: 0}}}}); err == nil {
		t.Error("a report of another rank is taken")
	}
	cut, cancel := context.WithCancel(t.Context())
	cancel()
	// Of a node, the first report counts.
	for _, slots := range []int64{70, 7000} {
		_, err := g.meeting.Done(cut, 0, DoneRequest{Key: key, Report: Report{Parts: []Part{{Rank: 1, Reads: 2, Bytes: 7}}, Slots: slots, Wanted: 7, Read: events.Seconds(2 * time.Second)}})
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%v", err)
		}
	}
	done, err := g.meeting.Done(t.Context(), 1, DoneRequest{Key: key, Report: Report{Parts: []Part{{Rank: 2, Reads: 1, Bytes: 5}}, Files: 50, Wanted: 5, Read: events.Seconds(time.Second), Check: events.Seconds(time.Minute)}})
	if err != nil || done.Failure != nil {
		t.Errorf("%+v, %v", done, err)
	}
	if len(g.log.completed) == 1 {
		if g.log.completed[0].Resolve == nil {
			t.Error("the resolution was not measured")
		}
		g.log.completed[0].Resolve = nil
	}
	want := events.RestoreCompleted{Attempt: 2, Load: 1, Checkpoint: saved, Tier: "slots+files", Bytes: 120, Slots: 70, Wanted: 12, Unread: []string{"bias", "weight"}, Read: events.Seconds(2 * time.Second), Check: events.Seconds(time.Minute)}
	if len(g.log.completed) != 1 || !reflect.DeepEqual(g.log.completed[0], want) || !slices.Equal(ranksOf(g.log.plans), []int{1, 2}) {
		t.Errorf("%+v and %+v, want %+v", g.log.completed, g.log.plans, want)
	}
}

// A checkpoint of another program is opened by each node, at its path.
func TestNodesLoadForeign(t *testing.T) {
	const header = `{"weight":{"dtype":"U8","shape":[12,50000],"data_offsets":[0,600000]}}`
	path := filepath.Join(t.TempDir(), "model.safetensors")
	file := append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header...)
	if err := os.WriteFile(path, append(file, content("weight", rows*columns)...), 0o600); err != nil {
		t.Fatal(err)
	}
	g := newGroup(t, func(c *Config) {
		c.Store.Foreign = func(ctx context.Context, path string) (*data.Foreign, error) {
			return foreign.Open(ctx, vfs.Default, path)
		}
	})
	want := func(rank int) client.LoadRequest {
		return client.LoadRequest{Ref: path, Items: []client.Item{itemOfShard(rowsOf(rank, 4))}}
	}
	g.intact(t, g.load(t, all, want), want)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	fails(t, g.load(t, all, want), all, problem.Conflict, "model.safetensors")
	if got := g.log.counts(); got != [3]int{1, 1, 0} || g.log.begun[0].Checkpoint != path {
		t.Errorf("the log has %v loads that began, completed and failed", got)
	}
}

// A node that cannot open the checkpoint, which the coordinating node can, fails the load.
func TestNodeCannotOpen(t *testing.T) {
	g := newGroup(t)
	empty, err := data.OpenUnsynced(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	g.loaders[1].cfg.Store.Data = empty
	got := g.load(t, all, whole)
	fails(t, got, []int{2, 3}, problem.Conflict, "read the manifest", "ckptstore ls run")
	fails(t, got, []int{0, 1}, problem.Conflict, "node 1 (ranks [2 3]): ", "read the manifest", "ckptstore ls run")
	if text := g.log.failure(t); strings.Count(text, "ckptstore ls run") != 1 {
		t.Errorf("the log has %q", text)
	}
}

// A completion that the log refuses fails the load for all.
func TestLogRefusesCompletion(t *testing.T) {
	g := newGroup(t)
	g.log.refuses = problem.New(problem.NoSpace, "the log is full")
	fails(t, g.load(t, all, whole), all, problem.NoSpace, "the log is full")
	if text := g.log.failure(t); text != "the log is full" {
		t.Errorf("the log has %q", text)
	}
}

// A failure keeps its text and kinds on its way, and its cause in its own process.
func TestFailureKeepsItsKinds(t *testing.T) {
	cfg := Config{}
	cause := problem.New(problem.Damage, "bad block")
	err := &ConflictError{problem.Wrap(problem.MissingFile, cause)}
	own := cfg.failure(err)
	if !errors.Is(own.Err(), cause) {
		t.Errorf("%v", own.Err())
	}
	sent := overJSON(own)
	if got := sent.Err(); got.Error() != "bad block" || !slices.Equal(problem.Kinds(got), problem.Kinds(err)) || len(sent.Kinds) != 3 {
		t.Errorf("%v of %v", got, problem.Kinds(got))
	}
	if err := (*Failure)(nil).Err(); err != nil {
		t.Errorf("%v", err)
	}
	text, merr := json.Marshal(DoneRequest{Key: Key{N: 2}, Report: Report{Parts: []Part{{Rank: 1, Reads: 2, Bytes: 3}}, Slots: 4}})
	if want := `{"n":2,"parts":[{"rank":1,"reads":2,"bytes":3}],"slots":4}`; merr != nil || string(text) != want {
		t.Errorf("%s, %v; want %s", text, merr, want)
	}
}
