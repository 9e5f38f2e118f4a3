package launch_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/gpu"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/launch/backend"
	"github.com/ckptstore/ckptstore/internal/session"
)

// Workers see their own devices, or those of all, and the log records each
// assignment. Unassigned devices leave the environment unchanged.
func TestDevices(t *testing.T) {
	t.Setenv("CUDA_VISIBLE_DEVICES", "outer")
	yes, no := true, false
	mig := []gpu.Device{{UUID: "GPU-m", MIG: true, Instances: []gpu.Instance{{UUID: "MIG-1"}, {UUID: "MIG-2"}}}}
	for name, c := range map[string]struct {
		backend string
		devices []gpu.Device
		each    int
		share   *bool
		order   string      // CUDA_DEVICE_ORDER of the trainer
		sees    [2]string   // CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER, CKPTSTORE_BACKEND
		given   [2][]string // in the log
	}{
		"their own": {
			backend.None, devices("GPU-a", "GPU-b", "GPU-c"), 1, nil, "",
			[2]string{"GPU-a PCI_BUS_ID ", "GPU-b PCI_BUS_ID "},
			[2][]string{{"GPU-a"}, {"GPU-b"}},
		},
		"two each, ranks by the lowest": {
			backend.None, devices("GPU-c", "GPU-d", "GPU-b", "GPU-e"), 2, nil, "",
			[2]string{"GPU-b,GPU-e PCI_BUS_ID ", "GPU-c,GPU-d PCI_BUS_ID "},
			[2][]string{{"GPU-b", "GPU-e"}, {"GPU-c", "GPU-d"}},
		},
		"torch shares": {
			backend.Torch, devices("GPU-b", "GPU-a"), 1, nil, "",
			[2]string{"GPU-a,GPU-b PCI_BUS_ID nccl", "GPU-a,GPU-b PCI_BUS_ID nccl"},
			[2][]string{{"GPU-a"}, {"GPU-b"}},
		},
		"torch told not to": {
			backend.Torch, devices("GPU-b", "GPU-a"), 1, &no, "FASTEST_FIRST",
			[2]string{"GPU-a FASTEST_FIRST nccl", "GPU-b FASTEST_FIRST nccl"},
			[2][]string{{"GPU-a"}, {"GPU-b"}},
		},
		"none told to": {
			backend.None, devices("GPU-b", "GPU-a"), 1, &yes, "",
			[2]string{"GPU-a,GPU-b PCI_BUS_ID ", "GPU-a,GPU-b PCI_BUS_ID "},
			[2][]string{{"GPU-a"}, {"GPU-b"}},
		},
		"MIG instances": {
			backend.Torch, mig, 1, &no, "",
			[2]string{"MIG-1 PCI_BUS_ID nccl", "MIG-2 PCI_BUS_ID nccl"},
			[2][]string{{"MIG-1"}, {"MIG-2"}},
		},
		"no devices": {backend.Torch, nil, 0, nil, "", [2]string{"outer  gloo", "outer  gloo"}, [2][]string{}},
		"not wanted": {backend.Torch, devices("GPU-a", "GPU-b"), 0, &yes, "", [2]string{"outer  gloo", "outer  gloo"}, [2][]string{}},
	} {
		t.Run(name, func(t *testing.T) {
			if c.order != "" {
				t.Setenv("CUDA_DEVICE_ORDER", c.order)
			}
			j := newJob(t, 2, shell(`echo sees "$CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER $CKPTSTORE_BACKEND"`)...)
			j.cfg.Backend, j.cfg.Devices, j.cfg.GPUsPerWorker, j.cfg.ShareDevices = c.backend, c.devices, c.each, c.share
			j.must()
			started := one[events.GroupStarted](t, runOf(t))
			if started.Backend != c.backend {
				t.Errorf("the log names backend %q", started.Backend)
			}
			for rank, want := range c.sees {
				if got := j.out.lines(fmt.Sprintf("[rank%d] sees ", rank)); len(got) != 1 || got[0] != want {
					t.Errorf("rank %d sees %q, want %q", rank, got, want)
				}
				if got := started.Ranks[rank].Devices; !slices.Equal(got, c.given[rank]) {
					t.Errorf("the log gives rank %d %q, want %q", rank, got, c.given[rank])
				}
			}
		})
	}
}

// A job whose backend or devices do not exist begins no attempt, nor does a job
// whose workers would have to share instances.
func TestBadBackend(t *testing.T) {
	t.Parallel()
	for says, change := range map[string]func(*launch.Config){
		`--backend: no backend "mpi" is registered; choose one of none, process_group, tensorpipe, torch`: func(c *launch.Config) { c.Backend = "mpi" },
		"--gpus-per-worker: assign 1 GPUs to each of 1 workers: 0 are visible here":                       func(c *launch.Config) { c.GPUsPerWorker = 1 },
		"do not share devices here; give --share-devices=false": func(c *launch.Config) {
			c.Nodes, c.Backend, c.GPUsPerWorker = session.OneNode(2), backend.Torch, 1
			c.Devices = []gpu.Device{{UUID: "GPU-m", MIG: true, Instances: []gpu.Instance{{UUID: "MIG-1"}, {UUID: "MIG-2"}}}}
		},
	} {
		j := newJob(t, 1, "/bin/true")
		change(&j.cfg)
		if err := j.run(); !errors.Is(err, launch.ErrConfig) || !strings.Contains(err.Error(), says) {
			t.Errorf("error %v, want %q", err, says)
		}
	}
	if started := bodiesOf[events.GroupStarted](t, runOf(t)); len(started) > 0 {
		t.Errorf("%d attempts were begun", len(started))
	}
}

// A hook that panics fails its group, and the job continues with the next group.
func TestHookPanicFailsTheGroup(t *testing.T) {
	t.Parallel()
	for says, hook := range map[string]string{"init hook": "init", "OnStart": "start", "OnTrainingStart": "training"} {
		t.Run(hook, func(t *testing.T) {
			t.Parallel()
			j := newJob(t, 1, helloOnly...)
			j.cfg.MaxRestarts = 1
			h := hooked(t, j, map[string]func(context.Context, *backend.Group) error{
				hook: func(_ context.Context, g *backend.Group) error {
					if g.Attempt == 1 {
						panic("no mesh today")
					}
					return nil
				},
			})
			h.holds = true
			j.must()
			wantText(t, j.log, "restarting the group", says+" panicked: no mesh today", "backends_test.go")
			if n := len(bodiesOf[events.GroupStarted](t, runOf(t))); n != 2 {
				t.Errorf("%d attempts, want 2", n)
			}
		})
	}
}

// The workers' environment follows torchrun's flags.
func TestTorchConfig(t *testing.T) {
	t.Setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := l.Addr().(*net.TCPAddr).Port
	show := shell(`echo $ROLE_NAME $TORCHELASTIC_RUN_ID $MASTER_ADDR $MASTER_PORT $TORCH_NCCL_ASYNC_ERROR_HANDLING; [ $TORCHELASTIC_RESTART_COUNT = 1 ]`)
	torch := launch.TorchConfig{Role: "learner", RunID: "job 7", MasterAddr: "localhost", MasterPort: port}

	j := newJob(t, 1, show...)
	j.cfg.Torch = torch
	if err := j.run(); !errors.Is(err, launch.ErrConfig) || !strings.Contains(err.Error(), fmt.Sprintf("hold MASTER_PORT %d", port)) || !strings.Contains(err.Error(), "choose another --master-port") {
		t.Errorf("with a port that is in use: %v", err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	j = newJob(t, 1, show...)
	j.cfg.Torch, j.cfg.MaxRestarts = torch, 1
	j.must()
	line := fmt.Sprintf("learner job 7 localhost %d 3\n", port)
	if got := j.out.String(); got != line+line {
		t.Errorf("two attempts see\n%swant twice\n%s", got, line)
	}
}

// The health of the workers' devices is checked, instance by instance where they
// are instances.
func TestAssignedDevicesAreWatched(t *testing.T) {
	t.Parallel()
	d := newDevices()
	errs := uint64(3)
	d.one.ECC = &errs
	there, err := d.Inspect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var inventory []gpu.Device
	for _, status := range there.Devices {
		inventory = append(inventory, status.Device)
	}
	j := on(t, d, nil, 2, shell("echo started")...)
	j.cfg.Devices, j.cfg.GPUsPerWorker = inventory, 1
	if err := j.run(); !errors.Is(err, launch.ErrDevices) || !strings.Contains(err.Error(), "1 of 2: GPU-1: 3 memory errors") {
		t.Errorf("error %v", err)
	}
	wantUnhealthy(t, oneGPU, "3 memory errors")
	j = on(t, d, nil, 1, shell("echo started")...)
	j.cfg.Devices, j.cfg.GPUsPerWorker = inventory[1:], 1
	j.must()
}
