package launch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/gpu"
	"github.com/ckptstore/ckptstore/internal/launch/process"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/session/retry"
)

// Devices queries the condition of this node's GPUs. Each method returns soon
// after its context ends, even if the driver hangs.
type Devices interface {
	// Inspect takes inventory of all devices of the node.
	Inspect(ctx context.Context) (gpu.Inventory, error)
	// Watch reports errors until ctx ends, which is not an error. It does not
	// call told after it has returned.
	Watch(ctx context.Context, told func(gpu.Event)) error
	// HoldersOf returns which of the processes hold memory of a device.
	HoldersOf(ctx context.Context, pids ...int) ([]gpu.Holder, error)
}

var _ Devices = gpu.System{}

// ErrDevices is returned if no attempt can start on the job's devices.
var ErrDevices = problem.New(problem.Failed, "the devices of the job are not fit for use")

// deviceGate keeps the job off unhealthy devices: it inspects them before each
// attempt and watches them during it. It ignores jobs that name no device.
type deviceGate struct {
	*job
	left []process.Entry // processes of earlier attempts

	mu      sync.Mutex
	sick    map[string]bool // devices, by UUID, that the log records as unhealthy
	cleared map[string]bool // devices that were reported gone and are healthy
	failed  string          // how a device has failed in this attempt
	news    chan struct{}   // closed at the first failure
}

// deviceMemoryPoll is the interval of checks for who holds memory.
const deviceMemoryPoll = 200 * time.Millisecond

func (g *deviceGate) shut() bool { return g != nil && g.cfg.Driver != nil && len(g.cfg.DeviceIDs) > 0 }

// admit returns nil if attempt n may start. Otherwise the training is not at
// fault: a trial that has begun is paused, to be continued.
func (g *deviceGate) admit(ctx context.Context, n int) error {
	if !g.shut() {
		return nil
	}
	err := g.ready(ctx)
	if err == nil || n == 1 {
		return err
	}
	words, cancel := context.WithTimeout(context.WithoutCancel(ctx), retry.EndTimeout)
	defer cancel()
	return errors.Join(err, g.paused(words, n-1, session.Beginning(err.Error(), session.MaxMessage)))
}

func (g *deviceGate) ready(ctx context.Context) error {
	if err := g.released(ctx); err != nil {
		return err
	}
	bad, err := g.unfit(ctx)
	if err == nil && len(bad) > 0 {
		err = fmt.Errorf("%w: %d of %d: %s; or run the job without them", ErrDevices, len(bad), len(g.cfg.DeviceIDs), strings.Join(bad, "; "))
	}
	return err
}

// unfit returns the devices of the job that may not be used, each with the reason.
func (g *deviceGate) unfit(ctx context.Context) (bad []string, err error) {
	look, cancel := context.WithTimeout(ctx, g.cfg.DeviceTimeout)
	defer cancel()
	inventory, err := g.cfg.Driver.Inspect(look)
	if errors.Is(err, gpu.ErrNotBuilt) {
		g.log.Warn("device health unknown", "error", err)
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrDevices, err)
	}
	for _, id := range g.cfg.DeviceIDs {
		reason, err := g.judge(ctx, inventory, id)
		if err != nil {
			return nil, err
		}
		if reason != "" {
			bad = append(bad, id+": "+reason)
		}
	}
	return bad, nil
}

// judge returns why a device of the job may not be used, "" if it may. It records
// changes in the log.
func (g *deviceGate) judge(ctx context.Context, inventory gpu.Inventory, id string) (reason string, err error) {
	status, ok := inventory.Find(id)
	var what, whole []string
	if !ok {
		what = []string{"this machine has no such device; see nvidia-smi -L"}
		whole = what
	}
	for _, p := range status.Health() {
		if p.Severity == gpu.Unhealthy {
			what, whole = append(what, p.What), append(whole, p.What+": "+p.Next)
		} else {
			g.log.Warn("device has a problem", "device", id, "problem", p.What, "next", p.Next)
		}
	}
	uuid := cmp.Or(status.UUID, id)
	switch sick, known := len(what) > 0, g.known(uuid); {
	case sick && !known:
		err = g.unhealthy(ctx, uuid, strings.Join(what, "; "))
	case !sick && known:
		err = g.recovered(ctx, uuid)
	}
	return strings.Join(whole, "; "), err
}

func (g *deviceGate) known(uuid string) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.sick[uuid]
}

func (g *deviceGate) unhealthy(ctx context.Context, uuid, reason string) error {
	g.mu.Lock()
	if g.sick == nil {
		g.sick = map[string]bool{}
	}
	g.sick[uuid] = true
	g.mu.Unlock()
	return g.Append(ctx, &events.GPUUnhealthy{Device: uuid, Reason: reason})
}

func (g *deviceGate) recovered(ctx context.Context, uuid string) error {
	g.mu.Lock()
	delete(g.sick, uuid)
	if g.cleared == nil {
		g.cleared = map[string]bool{}
	}
	g.cleared[uuid] = true
	g.mu.Unlock()
	g.log.Info("failed device is healthy again", "device", uuid)
	return g.Append(ctx, &events.GPURecovered{Device: uuid})
}

// leave records the processes of an attempt that has ended.
func (g *deviceGate) leave(processes *process.Hunt) {
	if g.shut() {
		g.left = append(g.left, processes.Known()...)
	}
}

// released waits until no process of an earlier attempt holds device memory. The
// driver frees memory some time after the process is gone, and the next attempt
// would not find room.
func (g *deviceGate) released(ctx context.Context) error {
	if len(g.left) == 0 {
		return nil
	}
	wait, cancel := context.WithTimeout(ctx, g.cfg.DeviceTimeout)
	defer cancel()
	var last error
	for {
		held, err := g.cfg.Driver.HoldersOf(wait, g.pids()...)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil && wait.Err() != nil:
			if last == nil {
				last = err
			}
			return fmt.Errorf("%w: %w", ErrDevices, last)
		case err != nil:
			g.log.Warn("cannot check whether the last attempt still holds GPU memory", "error", err)
			g.left = nil
			return nil
		case len(held) == 0:
			g.left = nil
			return nil
		}
		h := held[0]
		last = fmt.Errorf("process %d of an earlier attempt is gone but still holds memory of %s after %v: the driver hangs; see nvidia-smi and the kernel's log, then reset the device", h.PID, h.Device, g.cfg.DeviceTimeout)
		select {
		case <-time.After(deviceMemoryPoll):
		case <-wait.Done():
			if ctx.Err() == nil {
				return fmt.Errorf("%w: %w", ErrDevices, last)
			}
		}
	}
}

// pids returns the processes of earlier attempts. It skips PIDs that have been
// reused by other processes.
func (g *deviceGate) pids() (pids []int) {
	g.left = slices.DeleteFunc(g.left, process.Entry.Replaced)
	for _, p := range g.left {
		pids = append(pids, p.PID())
	}
	return pids
}
