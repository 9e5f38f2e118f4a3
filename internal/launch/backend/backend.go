// Package backend defines the hooks of communication backends, such as
// torch.distributed, around the life of a worker group.
//
//	backend    six hooks: at the start, when training starts, at the end, for
//	           the data of reports on either side, and whether workers see each
//	           other's devices
//	config     names a backend and creates one for each job
//	registry   the configs that a trainer knows, by name
//	group      the workers of one attempt: places, devices, environment
//	executor   runs the hooks of a backend for one group at a time
//
// The order of a start is
//
//	allocate devices        the caller, see gpu.Assign; [Arrange] creates the group
//	create workers          as entries of the group: their processes come later
//	init hook               [Options].Init
//	share visible devices   CUDA_VISIBLE_DEVICES
//	OnStart                 may still change every worker's environment
//	session                 the socket of each worker opens, and then its process
//	                        executes the user's command
//	OnTrainingStart         all workers have sent hello on their sockets
//	user function           what a worker does after the answer to its hello
//
// Everything up to OnStart happens before any process exists, since a process
// runs the user's command from its first instruction. So hooks act on workers
// through their environment. A program may do much before it sends hello, or
// never send it. OnTrainingStart therefore delays no worker, unless the backend
// is a [Gate]: then no hello is answered before OnTrainingStart has ended.
//
// OnShutdown runs only at a graceful end: all workers have ended well, or the job
// was asked to end and they have not been sent a signal yet. It does not run
// after a failure: a [FailureObserver] is called when no process is left.
package backend

import (
	"context"
	"fmt"
	"strconv"
)

// Backend is the set of hooks of a communication backend. They are called in the
// order of the package comment, from one goroutine at a time except for
// EncodeData and DecodeData. Their contexts end with the group, when a worker
// dies, and at a deadline. A hook that continues after that is abandoned.
//
// An error of OnStart or OnTrainingStart fails the group, which restarts if the
// budget allows. An error of OnShutdown is logged: often its cause is a worker
// that has already ended.
type Backend interface {
	OnStart(ctx context.Context, g *Group) error
	OnTrainingStart(ctx context.Context, g *Group) error
	OnShutdown(ctx context.Context, g *Group) error
	// EncodeData is called by the worker with the metrics of a report, before
	// they are sent. DecodeData is called by the trainer with the received data,
	// and inverts EncodeData. The result of EncodeData is sent as JSON.
	EncodeData(data map[string]any) (map[string]any, error)
	DecodeData(data map[string]any) (map[string]any, error)
	// ShareVisibleDevices reports whether each worker sees the devices of all
	// workers of its node, instead of only its own.
	ShareVisibleDevices() bool
}

// Gate is a backend whose OnTrainingStart must end before any worker's hello is
// answered. Every worker of the group must then send hello.
type Gate interface {
	HoldsHello() bool
}

// FailureObserver is a backend that is notified when a started group fails,
// before the next one starts. No process of the group is left then.
type FailureObserver interface {
	OnFailure(ctx context.Context, g *Group, cause error) error
}

// Default does nothing in each hook. Embed it.
type Default struct{}

var _ Backend = Default{}

// OnStart implements Backend.
func (Default) OnStart(context.Context, *Group) error { return nil }

// OnTrainingStart implements Backend.
func (Default) OnTrainingStart(context.Context, *Group) error { return nil }

// OnShutdown implements Backend.
func (Default) OnShutdown(context.Context, *Group) error { return nil }

// EncodeData implements Backend.
func (Default) EncodeData(data map[string]any) (map[string]any, error) { return data, nil }

// DecodeData implements Backend.
func (Default) DecodeData(data map[string]any) (map[string]any, error) { return data, nil }

// ShareVisibleDevices implements Backend.
func (Default) ShareVisibleDevices() bool { return false }

// EnvShareDevices decides whether workers see each other's devices. It overrides
// the flag and the backend.
const EnvShareDevices = "CKPTSTORE_SHARE_DEVICES"

// Sharing resolves the user's choice to share visible devices. value is that of
// [EnvShareDevices] and wins unless it is empty; flag is the choice on the
// command line, if any. The result nil leaves the choice to the backend.
func Sharing(flag *bool, value string) (*bool, error) {
	if value == "" {
		return flag, nil
	}
	share, err := strconv.ParseBool(value)
	if err != nil {
		return nil, fmt.Errorf("%s is %q; set it to 1 or to 0, or unset it", EnvShareDevices, value)
	}
	return &share, nil
}
