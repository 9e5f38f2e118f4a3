package launch_test

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/session"
)

// unwritten is a storage in which this node writes no rank, until ctx ends.
type unwritten struct{ passesOn }

// Writer implements data.Storage.
func (unwritten) Writer(at data.Location) data.Writer { return unwrittenRank{at.Writer} }

type unwrittenRank struct{ data.Writer }

// WriteData implements data.Writer.
func (unwrittenRank) WriteData(ctx context.Context, _ int, _ []checkpoint.Item, _ data.Source) (data.Written, error) {
	<-ctx.Done()
	return data.Written{}, ctx.Err()
}

// replicates makes a job of several nodes whose slots have replicas, except of the nodes in
// without, which serve other requests. The node lost, if not 0, writes no rank.
func (j *job) replicates(lost int, without ...int) {
	t := j.t
	j.differs = func(index int, cfg *launch.Config, s *session.Store) {
		if lost > 0 {
			s.Storage = passesOn{}
		}
		if lost > 0 && index == lost {
			s.Storage = unwritten{}
		}
		to := j.log
		if index > 0 {
			to = cfg.Stdout.(*transcript)
		}
		cfg.Logger = slog.New(slog.NewTextHandler(to, &slog.HandlerOptions{Level: slog.LevelDebug}))
		peers, err := nodes.ListenPeers(t.Context(), "127.0.0.1", cfg.Logger)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = peers.Close() })
		cfg.Peers = peers
		if !slices.Contains(without, index) {
			cfg.Replicas = 1
		}
	}
}

// sealsAndStays has each rank save once, and stay alive.
var sealsAndStays = workerRole("seals a save and stays", func(ctx context.Context, c *client.Client) error {
	if c.Resume != "" {
		return load(ctx, c, c.Resume, 1)
	}
	s, err := c.Save(ctx, 1, state(1, c.Rank, c.WorldSize), client.SaveOptions{})
	if err == nil {
		err = s.Wait(ctx, client.Staged)
	}
	if err != nil {
		return err
	}
	emit("staged")
	<-ctx.Done()
	return ctx.Err()
})

// A save that all ranks have sealed is committed although a node is lost that has written
// nothing of it: its partner writes the replica. The next group loads every byte of it.
func TestCommittedFromReplica(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		procs   []int
		lost    int
		adopter string // actor
	}{
		{"the coordinating node writes", []int{1, 1}, 1, "n0"},
		{"another node writes", []int{1, 1, 1}, 1, "n2"},
		{"of several ranks", []int{1, 2}, 1, "n0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			world := 0
			for _, n := range c.procs {
				world += n
			}
			j := newJob(t, world, sealsAndStays...)
			j.cfg.MaxInfraRestarts = 0
			j.replicates(c.lost)
			others := j.spread(c.procs...)
			lost := others[c.lost-1]
			j.start()
			for rank := c.procs[0]; rank < c.procs[0]+c.procs[c.lost]; rank++ {
				awaitText(t, lost.out, fmt.Sprintf("[rank%d] staged", rank))
				awaitText(t, lost.out, fmt.Sprintf(`msg="replica sent" checkpoint=step-1.a1 rank=%d`, rank))
			}
			if err := lost.link.Leave(t.Context(), "the test"); err != nil {
				t.Fatal(err)
			}
			if err := j.wait(); err == nil || !strings.Contains(err.Error(), "node 1") {
				t.Errorf("error %v, want the loss of node 1", err)
			}
			wantEnded(t, []string{"step-1.a1"}, nil)
			written := 0
			for _, r := range logOf(t, runOf(t)) {
				body, err := r.Body()
				if err != nil {
					t.Fatal(err)
				}
				if w, ok := body.(*events.WriteCompleted); ok && w.Rank >= c.procs[0] && fmt.Sprint(r.Scope.Actor) == c.adopter {
					written++
				}
			}
			for _, b := range bodiesOf[events.ReplicaNode](t, runOf(t)) {
				if ranks := events.RanksIn(b.Ranks); ranks[0] == c.procs[0] && (len(ranks) != c.procs[c.lost] || fmt.Sprint("n", b.Node) != c.adopter || b.Bytes == 0) {
					t.Errorf("recorded %+v", b)
				}
			}
			if written < c.procs[c.lost] {
				t.Errorf("%s wrote %d ranks of node 1, want %d", c.adopter, written, c.procs[c.lost])
			}
			again := newJob(t, world, sealsAndStays...)
			again.cfg.Run = j.cfg.Run
			again.must()
		})
	}
}

// With two copies, a save that all ranks have sealed is committed although two nodes are lost that have
// written nothing of it: the node that is left has copies of both.
func TestCommittedFromSecondReplica(t *testing.T) {
	t.Parallel()
	j := newJob(t, 3, sealsAndStays...)
	j.cfg.MaxInfraRestarts = 0
	j.replicates(1)
	alike := j.differs
	j.differs = func(index int, cfg *launch.Config, s *session.Store) {
		alike(index, cfg, s)
		if cfg.Replicas = 2; index == 2 {
			s.Storage = unwritten{}
		}
	}
	others := j.spread(1, 1, 1)
	j.start()
	for i, o := range others {
		awaitText(t, o.out, fmt.Sprintf("[rank%d] staged", i+1))
		awaitText(t, o.out, fmt.Sprintf(`msg="replica sent" checkpoint=step-1.a1 rank=%d partner="node 0"`, i+1))
	}
	for _, o := range others {
		if err := o.link.Leave(t.Context(), "the test"); err != nil {
			t.Fatal(err)
		}
	}
	if err := j.wait(); err == nil {
		t.Error("no error")
	}
	wantEnded(t, []string{"step-1.a1"}, nil)
	written := map[int]bool{}
	for _, r := range logOf(t, runOf(t)) {
		body, err := r.Body()
		if err != nil {
			t.Fatal(err)
		}
		if w, ok := body.(*events.WriteCompleted); ok && r.Scope.Actor == "n0" {
			written[w.Rank] = true
		}
	}
	if !written[1] || !written[2] {
		t.Errorf("node 0 wrote the ranks %v", written)
	}
	again := newJob(t, 3, sealsAndStays...)
	again.cfg.Run = j.cfg.Run
	again.must()
}

// The copy of the first of two partners has changed in memory. The save is committed: the second partner
// writes the lost node's part.
func TestCommittedFromNextPartner(t *testing.T) {
	t.Parallel()
	j := newJob(t, 3, sealsAndStays...)
	j.cfg.MaxInfraRestarts = 0
	j.replicates(1)
	alike := j.differs
	j.differs = func(index int, cfg *launch.Config, s *session.Store) {
		alike(index, cfg, s)
		cfg.Replicas = 2
	}
	others := j.spread(1, 1, 1)
	lost, first := others[0], others[1]
	j.start()
	awaitText(t, lost.out, "[rank1] staged")
	for _, partner := range []string{"node 2", "node 0"} {
		awaitText(t, lost.out, fmt.Sprintf(`msg="replica sent" checkpoint=step-1.a1 rank=1 partner=%q`, partner))
	}
	j.changeReplica(2, first.memory)
	if err := lost.link.Leave(t.Context(), "the test"); err != nil {
		t.Fatal(err)
	}
	if err := j.wait(); err == nil || !strings.Contains(err.Error(), "node 1") {
		t.Errorf("error %v, want the loss of node 1", err)
	}
	wantEnded(t, []string{"step-1.a1"}, nil)
	var writers []string
	for _, r := range logOf(t, runOf(t)) {
		body, err := r.Body()
		if err != nil {
			t.Fatal(err)
		}
		if w, ok := body.(*events.WriteCompleted); ok && w.Rank == 1 {
			writers = append(writers, fmt.Sprint(r.Scope.Actor))
		}
	}
	if !slices.Equal(writers, []string{"n0"}) {
		t.Errorf("%q wrote the lost node's part, want the second partner", writers)
	}
	wantText(t, j.log, `msg="node asked for the sealed bytes of a lost node" node=2`)
	again := newJob(t, 3, sealsAndStays...)
	again.cfg.Run = j.cfg.Run
	again.must()
}

// Without a whole replica the save is aborted, with the lost node.
func TestNoReplica(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		without []int
		slow    bool
		says    string
	}{
		"the node keeps none":                      {[]int{1}, false, "slots of nodes have no replica; start their trainers with --replicas too"},
		"the coordinating node keeps none":         {[]int{0}, false, "slots of nodes have no replica; start the coordinating trainer with --replicas too"},
		"the replica is not whole when it is lost": {nil, true, "no other node has a whole replica of its slots"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			j := newJob(t, 2, sealsAndStays...)
			j.cfg.MaxInfraRestarts = 0
			j.replicates(1, c.without...)
			if alike := j.differs; c.slow {
				j.differs = func(index int, cfg *launch.Config, s *session.Store) {
					alike(index, cfg, s)
					cfg.ReplicaRate = 1
				}
			}
			lost := j.spread(1, 1)[0]
			j.start()
			awaitText(t, lost.out, "[rank1] staged")
			if err := lost.link.Leave(t.Context(), "the test"); err != nil {
				t.Fatal(err)
			}
			if err := j.wait(); err == nil {
				t.Error("no error")
			}
			wantEnded(t, nil, []string{"step-1.a1"})
			wantText(t, j.log, c.says, "node 1 is lost")
		})
	}
}

// savesAndStays has each rank commit a save and stay alive. The next life loads it.
var savesAndStays = workerRole("commits a save and stays", func(ctx context.Context, c *client.Client) error {
	if c.Resume != "" {
		return load(ctx, c, c.Resume, 1)
	}
	if err := save(ctx, c, 1); err != nil {
		return err
	}
	emit("committed")
	<-ctx.Done()
	return ctx.Err()
})

// A node that replaces a lost one takes the slots of its ranks from the lost node's partner,
// and compares them with the digests of the manifest: a replica that differs is not used.
func TestRestoredFromReplica(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		damaged bool
		tier    string
		files   int64 // bytes, at most; the weights of a rank have 60
	}{
		"whole":   {false, "slots+peers+files", 59},
		"damaged": {true, "slots+files", math.MaxInt64},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			j := newJob(t, 2, savesAndStays...)
			j.cfg.MaxInfraRestarts = 1
			j.replicates(0)
			lost := j.spread(1, 1)[0]
			j.start()
			awaitText(t, lost.out, "[rank1] committed")
			awaitText(t, lost.out, `msg="replica sent" checkpoint=step-1.a1 rank=1`)
			if c.damaged {
				j.changeReplica(0, j.store.Shared)
			}
			if err := lost.link.Leave(t.Context(), "the test"); err != nil {
				t.Fatal(err)
			}
			j.follow(2, 1)
			if err := j.wait(); err != nil {
				t.Fatal(err)
			}
			restored := bodiesOf[events.RestoreCompleted](t, runOf(t))
			if len(restored) != 1 {
				t.Fatalf("%d restores", len(restored))
			}
			if b := restored[0]; b.Tier != c.tier || (b.Peers > 0) == c.damaged || b.Slots == 0 || b.Bytes-b.Slots-b.Peers > c.files {
				t.Errorf("restored %+v, want the tiers %s with at most %d bytes of files", *b, c.tier, c.files)
			}
		})
	}
}

// changeReplica changes the last bytes of the replica of rank 1 on a node.
func (j *job) changeReplica(node int, memory string) {
	t := j.t
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(memory, "*", fmt.Sprintf("*-%s-n%d", events.EncodeName(j.cfg.Run), node), "r00001.peer.*"))
	if err != nil || len(paths) != 1 {
		t.Fatalf("replicas %q: %v", paths, err)
	}
	f, err := os.OpenFile(paths[0], os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	for at := int64(4096); ; at++ {
		b := make([]byte, 1)
		if _, err := f.ReadAt(b, at); err != nil {
			return // the end
		}
		b[0] ^= 1
		if _, err := f.WriteAt(b, at); err != nil {
			t.Fatal(err)
		}
	}
}
