//go:build testbed || outlive

package cmd_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/testbed"
	"github.com/ckptstore/ckptstore/internal/testbed/netfs"
)

// machines are the machines of one launch, with a shared directory.
type machines struct {
	t     *testing.T
	ctx   context.Context
	bed   *testbed.Testbed
	nodes []*testbed.Node
	root  string // of this repository
}

// sharedStore is the store of all machines, on a disk with the caches of NFS and locks that
// hold on one machine only.
const sharedStore = "/srv/shared/ckpts"

func newMachines(t *testing.T, n int) *machines {
	t.Helper()
	bed, err := testbed.New(testbed.Options{Seed: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := bed.Close(); err != nil {
			t.Error(err)
		}
	})
	disk, err := netfs.NewServer(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := disk.Close(); err != nil {
			t.Error(err)
		}
	})
	root, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	t.Cleanup(cancel)
	m := &machines{t: t, ctx: ctx, bed: bed, root: root}
	options := netfs.NFS()
	options.LocalLocks = true
	for i := range n {
		node, err := bed.Start(ctx, testbed.Config{
			Name: fmt.Sprint("machine", i), Shm: 1 << 30, Disks: []testbed.Disk{{At: filepath.Dir(sharedStore), Server: disk, Options: options}},
			Env: []string{
				"CKPTSTORE_STORE=" + sharedStore, "CKPTSTORE_BIN=" + filepath.Join(bin, "ckptstore"), "PYTHONPATH=" + strings.Join([]string{filepath.Join(root, "python/src"), os.Getenv("PYTHONPATH")}, ":"),
				"OMP_NUM_THREADS=1", "PYTHONWARNINGS=ignore",
			},
		})
		if err != nil {
			t.Fatal(err)
		}
		m.nodes = append(m.nodes, node)
	}
	t.Cleanup(func() {
		if !t.Failed() {
			return
		}
		for _, n := range m.nodes {
			logs, err := n.Command(context.Background(), "sh", "-c", "tail -n 50 $XDG_RUNTIME_DIR/*/agent*.log").CombinedOutput()
			t.Logf("agents of %s: %v\n%s", n.Name(), err, logs)
		}
	})
	return m
}

// script writes a script that all machines see.
func (m *machines) script(source string) string {
	m.t.Helper()
	path := filepath.Join(m.t.TempDir(), "ranks.py")
	if err := os.WriteFile(path, []byte(source), 0o600); err != nil {
		m.t.Fatal(err)
	}
	return path
}

// run runs a command on each machine, with NAME=VALUE words before it, and returns their
// output.
func (m *machines) run(command func(i int) []string) []string {
	m.t.Helper()
	var ends sync.WaitGroup
	out := make([]string, len(m.nodes))
	for i, n := range m.nodes {
		ends.Go(func() {
			text, err := n.Command(m.ctx, "env", command(i)...).CombinedOutput()
			if out[i] = string(text); err != nil {
				m.t.Errorf("%s: %v\n%s", n.Name(), err, text)
			}
		})
	}
	ends.Wait()
	if m.t.Failed() {
		m.t.FailNow()
	}
	return out
}

// committed fails the test unless the store has these checkpoints.
func (m *machines) committed(ids ...string) {
	m.t.Helper()
	listed, err := m.nodes[0].Command(m.ctx, filepath.Join(bin, "ckptstore"), "ls", "--json").Output()
	if err != nil {
		m.t.Fatal(err)
	}
	for _, id := range ids {
		if !strings.Contains(string(listed), id) {
			m.t.Errorf("no %s in\n%s", id, listed)
		}
	}
}

// ownedByFirst fails the test unless only the first machine has an agent that may own the
// store.
func (m *machines) ownedByFirst() {
	m.t.Helper()
	owners := slices.DeleteFunc(slices.Clone(m.nodes), func(n *testbed.Node) bool {
		return n.Command(m.ctx, "sh", "-c", "ls $XDG_RUNTIME_DIR/*/agent.sock").Run() != nil
	})
	if len(owners) != 1 || owners[0] != m.nodes[0] {
		m.t.Errorf("%d machines have an agent that may own the store, want the first alone", len(owners))
	}
}

// plainRanks saves and loads in the protocol of the Python package, without PyTorch.
const plainRanks = `
import ckptstore
from ckptstore._connect import current
ckptstore.init(run="plain")
session, context = current(), ckptstore.context()
rank = context.rank
assert ckptstore.all_gather_object(rank) == [0, 1]
ckptstore.report({"loss": float(rank)})
items = [{"fqn": "w", "dtype": "float32", "shape": [8], "offsets": [4 * rank], "sizes": [4], "bytes": 16}]
if context.resume:
    with session.load(items, None) as loaded:
        assert bytes(loaded.bytes(0)) == bytes([rank] * 16), loaded.bytes(0)
slot = session.begin_save(1, items)
slot.memory[slot.offsets[0] : slot.offsets[0] + 16] = bytes([rank] * 16)
slot.seal()
session.wait(slot.checkpoint, "committed")
print("RANK", rank, "RESUMES", context.resume)
ckptstore.close()
`

// Ranks that no trainer started save together from two machines, and the next launch
// resumes, also when it has the same variables.
func TestPlainRanksOnTwoMachines(t *testing.T) {
	m := newMachines(t, 2)
	script := m.script(plainRanks)
	for attempt, resume := range []string{"None", "step-1.a1"} {
		out := m.run(func(i int) []string {
			return []string{
				fmt.Sprint("RANK=", i), "WORLD_SIZE=2", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1", "MASTER_ADDR=machine0", "MASTER_PORT=29500", "python3", script,
			}
		})
		for rank := range out {
			if want := fmt.Sprintf("RANK %d RESUMES %s\n", rank, resume); out[rank] != want {
				t.Errorf("launch %d: machine %d prints %q, want %q", attempt, rank, out[rank], want)
			}
		}
	}
	m.committed("step-1.a1", "step-1.a2")
	m.ownedByFirst()
}
