// Package backend is what a communication backend, such as torch.distributed,
// does around the life of a worker group.
//
//	backend    six hooks: at the start, when training starts, at the end, for
//	           the data of reports on either side, and whether workers see each
//	           other's devices
//	config     names a backend and makes it, one for each job
//	registry   the configs that a trainer knows, by name
//	group      the workers of one attempt: places, devices, environment
//	executor   runs the hooks of a backend for one group after the other
//
// The order of a start is
//
//	allocate devices        the caller, see gpu.Assign; [Arrange] makes the group
//	create workers          as entries of the group: their processes come later
//	init hook               [Options].Init
//	share visible devices   CUDA_VISIBLE_DEVICES
//	OnStart                 may still change every worker's environment
//	session                 the socket of each worker opens, and then its process
//	                        executes the user's command
//	OnTrainingStart         all workers have said hello on their sockets
//	user function           what a worker does when its hello was answered
//
// Everything up to OnStart happens before any process exists, since a process
// runs the user's command from its first instruction. So hooks act on workers by
// their environment. And a program may do much before it says hello, or never
// say it: OnTrainingStart holds up nobody, unless the backend is a [Gate]: then
// no hello is answered before it has ended.
//
// OnShutdown runs at a graceful end only: all workers have ended well, or
// somebody has asked for the end and they have not been sent a signal yet. After
// a failure it does not run: a [FailureObserver] is told when no process is left.
package backend

import (
	"context"
	"fmt"
	"strconv"
)

// Backend are the hooks of a communication backend. They are called in the
// order of the package comment, from one goroutine at a time but for EncodeData
// and DecodeData. Their contexts end with the group, when a worker dies, and at
// a deadline; a hook that goes on after that is left behind.
//
// An error of OnStart or OnTrainingStart is a failure of the group, which is
// started again if the budget allows. One of OnShutdown is logged: often it is
// that of a worker that has ended.
type Backend interface {
	OnStart(ctx context.Context, g *Group) error
	OnTrainingStart(ctx context.Context, g *Group) error
	OnShutdown(ctx context.Context, g *Group) error
	// EncodeData is called by the worker with the metrics of a report, before
	// they are sent, and DecodeData by the trainer with what came. What one
	// makes the other takes back. The result of EncodeData is sent as JSON.
	EncodeData(data map[string]any) (map[string]any, error)
	DecodeData(data map[string]any) (map[string]any, error)
	// ShareVisibleDevices says whether each worker sees the devices of all
	// workers of its node, instead of its own alone.
	ShareVisibleDevices() bool
}

// Gate is a backend whose OnTrainingStart must have ended before any worker's
// hello is answered. Then every worker of the group has to say hello.
type Gate interface {
	HoldsHello() bool
}

// FailureObserver is a backend that is told when a group that has started fails, before
// the next one starts. No process of the group is left then.
type FailureObserver interface {
	OnFailure(ctx context.Context, g *Group, cause error) error
}

// Default does nothing in each hook, to be embedded.
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

// EnvShareDevices decides whether workers see each other's devices, whatever
// the flag and the backend say.
const EnvShareDevices = "CKPTSTORE_SHARE_DEVICES"

// Sharing is what was asked about the sharing of visible devices: value is that
// of [EnvShareDevices], set unless it is empty, and flag what else was said, if
// anything. The answer nil leaves it to the backend.
func Sharing(flag *bool, value string) (*bool, error) {
	if value == "" {
		return flag, nil
	}
	share, err := strconv.ParseBool(value)
	if err != nil {
		return nil, fmt.Errorf("%s is %q: set it to 1 or to 0, or unset it", EnvShareDevices, value)
	}
	return &share, nil
}
