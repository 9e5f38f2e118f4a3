package backend

import (
	"context"
	"fmt"
)

// Names of the built-in backends.
const (
	Torch        = "torch"         // torch.distributed
	TensorPipe   = "tensorpipe"    // torch.distributed.rpc
	ProcessGroup = "process_group" // torch.distributed.rpc over a process group
	None         = "none"          // the workers communicate in their own way
)

// Environment that built-in backends set for a worker. Every worker gets the
// other variables that init_process_group and init_rpc need, such as RANK and
// MASTER_ADDR.
const (
	// EnvBackend is how the workers of the group communicate: nccl if each has a
	// device, else gloo; or the name of the RPC backend.
	EnvBackend = "CKPTSTORE_BACKEND"
	// EnvRPCName is the worker's name for init_rpc: worker0, worker1, …
	EnvRPCName = "CKPTSTORE_RPC_NAME"
)

// Builtin returns a new registry of the built-in backends.
func Builtin() *Registry {
	return &Registry{configs: map[string]Config{
		Torch:        named{Torch, torch{}},
		TensorPipe:   named{TensorPipe, rpc{name: TensorPipe}},
		ProcessGroup: named{ProcessGroup, rpc{name: ProcessGroup}},
		None:         named{None, Default{}},
	}}
}

// torch is for scripts that call init_process_group.
type torch struct{ Default }

var _ Backend = torch{}

// OnStart implements Backend.
func (torch) OnStart(_ context.Context, g *Group) error {
	name := "nccl"
	for _, w := range g.Workers {
		if len(w.Devices) == 0 {
			name = "gloo" // a mixed group cannot use NCCL
		}
	}
	for _, w := range g.Workers {
		w.Env[EnvBackend] = name
	}
	return nil
}

// ShareVisibleDevices implements Backend: scripts choose their device by
// LOCAL_RANK.
func (torch) ShareVisibleDevices() bool { return true }

// rpc is for scripts that call init_rpc.
type rpc struct {
	Default
	name string
}

var _ Backend = rpc{}

// OnStart implements Backend.
func (r rpc) OnStart(_ context.Context, g *Group) error {
	for _, w := range g.Workers {
		w.Env[EnvBackend] = r.name
		w.Env[EnvRPCName] = fmt.Sprintf("worker%d", w.Rank)
	}
	return nil
}

// ShareVisibleDevices implements Backend: device maps name devices of other
// workers, so all workers of a node must count devices alike.
func (rpc) ShareVisibleDevices() bool { return true }
