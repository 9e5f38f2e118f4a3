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

// torchEnv names a python3 that has PyTorch. Tests that need it are skipped without it:
// the job of CI that has PyTorch sets it.
const torchEnv = "TORCH_PYTHON"

// ranksOfTorchrun saves and loads by a StorageWriter, by URL and by the functions, on
// every rank.
const ranksOfTorchrun = `
import os, sys
sys.path.append(os.environ["TORCHRUN"])
import launch
launch.without_libuv()
import fsspec, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
import ckptstore
from ckptstore.dcp import StorageReader, StorageWriter
store = os.environ["CKPTSTORE_STORE"]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world,))
full = torch.arange(64 * 500, dtype=torch.float32).reshape(64, 500)

def state(fill=True):
    return {"w": distribute_tensor(full if fill else torch.zeros_like(full), mesh, [Shard(0)]), "step": 7 if fill else 0}

def check(**where):
    z = state(False)
    dcp.load(z, **where)
    assert torch.equal(z["w"].full_tensor(), full) and z["step"] == 7, z

dcp.save(state(), checkpoint_id="ckptstore://url/step-1")
check(checkpoint_id="ckptstore://url/step-1")
dcp.save({"a": torch.ones(1000)}, checkpoint_id="ckptstore://url/step-2")  # most ranks write nothing
if rank == world - 1:
    with fsspec.open("ckptstore://url/step-2/extra.bin", "wb") as f:
        f.write(b"x" * 100000)
dist.barrier()
with fsspec.open("ckptstore://url/step-2/extra.bin") as f:
    assert f.read() == b"x" * 100000
last = dist.new_group([world - 1])
if rank == world - 1:  # the machine of this rank does not commit
    dcp.save({"b": torch.ones(100000)}, checkpoint_id="ckptstore://url/step-3", process_group=last)
dist.barrier()
z = {"b": torch.zeros(100000)}
dcp.load(z, checkpoint_id="ckptstore://url/step-3")
assert torch.equal(z["b"], torch.ones(100000))

ckptstore.init(run="writer")
dcp.save(state(), storage_writer=StorageWriter(store + "/step-1"))
check(storage_reader=StorageReader(store + "/step-1"))
dcp.save(state(), checkpoint_id="ckptstore://writer/step-2")
check(checkpoint_id="ckptstore://writer/step-2")
ckptstore.save({"rank": rank, "w": full}, step=3).wait("committed")
assert ckptstore.all_gather_object(rank) == list(range(world))
ckptstore.report({"loss": float(rank)})
print("RANK", rank, "DONE")
ckptstore.close()
dist.destroy_process_group()
`

// Ranks of torchrun on two machines save into one store, on a disk with the caches of NFS
// and locks that hold on one machine only.
func TestTorchrunOnTwoMachines(t *testing.T) {
	python := os.Getenv(torchEnv)
	if python == "" {
		t.Skipf("%s names no python3 with PyTorch", torchEnv)
	}
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
	script := filepath.Join(t.TempDir(), "ranks.py")
	if err := os.WriteFile(script, []byte(ranksOfTorchrun), 0o600); err != nil {
		t.Fatal(err)
	}
	torchrun := filepath.Join(root, "internal/launch/testdata/torchrun")
	options := netfs.NFS()
	options.LocalLocks = true
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	var ends sync.WaitGroup
	out := make([]string, 2)
	nodes := make([]*testbed.Node, 2)
	for i := range nodes {
		nodes[i], err = bed.Start(ctx, testbed.Config{
			Name: fmt.Sprintf("machine%d", i), Shm: 1 << 30, Disks: []testbed.Disk{{At: "/srv/shared", Server: disk, Options: options}},
			Env: []string{
				"CKPTSTORE_STORE=/srv/shared/ckpts", "CKPTSTORE_BIN=" + filepath.Join(bin, "ckptstore"), "PYTHONPATH=" + filepath.Join(root, "python/src"),
				"TORCHRUN=" + torchrun, "OMP_NUM_THREADS=1", "PYTHONWARNINGS=ignore",
			},
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for i, n := range nodes {
		ends.Go(func() {
			text, err := n.Command(ctx, python, filepath.Join(torchrun, "launch.py"), "--nnodes=2", fmt.Sprint("--node-rank=", i), "--nproc-per-node=2",
				"--master-addr=machine0", "--master-port=29500", script).CombinedOutput()
			if out[i] = string(text); err != nil {
				t.Errorf("machine %d: %v\n%s", i, err, text)
			}
		})
	}
	ends.Wait()
	if t.Failed() {
		for _, n := range nodes {
			logs, err := n.Command(ctx, "sh", "-c", "tail -n 50 $XDG_RUNTIME_DIR/*/agent*.log").CombinedOutput()
			t.Logf("agents of %s: %v\n%s", n.Name(), err, logs)
		}
		return
	}
	for rank := range 4 {
		if want := fmt.Sprintf("RANK %d DONE", rank); !strings.Contains(out[rank/2], want) {
			t.Errorf("no %q in the output of machine %d:\n%s", want, rank/2, out[rank/2])
		}
	}
	listed, err := nodes[0].Command(ctx, filepath.Join(bin, "ckptstore"), "ls", "--json").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{"step-1.a1", "step-2.a2", "step-3.a3"} {
		if !strings.Contains(string(listed), id) {
			t.Errorf("no %s in\n%s", id, listed)
		}
	}
	// Only the machine of rank 0 has a server of the log.
	owners := slices.DeleteFunc(nodes, func(n *testbed.Node) bool {
		return n.Command(ctx, "sh", "-c", "ls $XDG_RUNTIME_DIR/*/agent.sock").Run() != nil
	})
	if len(owners) != 1 || owners[0].Name() != "machine0" {
		t.Errorf("agents that may own the store are on %v", owners)
	}
}
