//go:build torch && (testbed || outlive)

package cmd_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

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
os.write(1, b"RANK %d DONE\n" % rank)  # at once: ranks share the pipe
ckptstore.close()
dist.destroy_process_group()
`

// Ranks of torchrun on two machines save into one store, in all ways.
func TestTorchrunOnTwoMachines(t *testing.T) {
	python := os.Getenv(torchEnv)
	if python == "" {
		t.Fatalf("%s names no python3 with PyTorch", torchEnv)
	}
	m := newMachines(t, 2)
	script := m.script(ranksOfTorchrun)
	torchrun := filepath.Join(m.root, "internal/launch/testdata/torchrun")
	out := m.run(func(i int) []string {
		return []string{
			"TORCHRUN=" + torchrun, python, filepath.Join(torchrun, "launch.py"), "--nnodes=2", fmt.Sprint("--node-rank=", i), "--nproc-per-node=2",
			"--master-addr=machine0", "--master-port=29500", script,
		}
	})
	for rank := range 4 {
		if want := fmt.Sprintf("RANK %d DONE", rank); !strings.Contains(out[rank/2], want) {
			t.Errorf("no %q in the output of machine %d:\n%s", want, rank/2, out[rank/2])
		}
	}
	m.committed("step-1.a1", "step-2.a2", "step-3.a3")
	m.ownedByFirst()
}

// ranksOfGroup know their ranks by torch.distributed alone, as under Lightning.
const ranksOfGroup = `
import os, sys
sys.path.append(os.environ["TORCHRUN"])
import launch
launch.without_libuv()
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
import ckptstore
rank = int(sys.argv[1])
dist.init_process_group("gloo", rank=rank, world_size=2)
dcp.save({"a": torch.arange(1000)}, checkpoint_id="ckptstore://url/step-1")
ckptstore.init(run="group")
ckptstore.save({"rank": rank}, step=2).wait("committed")
os.write(1, b"RANK %d OF %d\n" % (ckptstore.context().rank, ckptstore.context().world_size))
ckptstore.close()
dist.destroy_process_group()
`

// A launcher that sets no variables of ranks: the ranks compare their machines.
func TestProcessGroupOnTwoMachines(t *testing.T) {
	python := os.Getenv(torchEnv)
	if python == "" {
		t.Fatalf("%s names no python3 with PyTorch", torchEnv)
	}
	m := newMachines(t, 2)
	script := m.script(ranksOfGroup)
	out := m.run(func(i int) []string {
		return []string{
			"TORCHRUN=" + filepath.Join(m.root, "internal/launch/testdata/torchrun"), "MASTER_ADDR=machine0", "MASTER_PORT=29500", python, script, fmt.Sprint(i),
		}
	})
	for rank := range out {
		if want := fmt.Sprintf("RANK %d OF 2", rank); !strings.Contains(out[rank], want) {
			t.Errorf("no %q in the output of machine %d:\n%s", want, rank, out[rank])
		}
	}
	m.committed("step-1.a1", "step-2.a1")
	m.ownedByFirst()
}
