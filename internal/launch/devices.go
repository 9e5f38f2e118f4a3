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
	"github.com/ckptstore/ckptstore/internal/session"
)

// Devices are asked how the GPUs of this node fare. Each method returns soon
// after its context ends, whatever the driver does.
type Devices interface {
	// Inspect looks at all devices of the node.
	Inspect(ctx context.Context) (gpu.Inventory, error)
	// Watch tells of errors until ctx ends, which is no error of its own. It
	// does not tell after it has returned.
	Watch(ctx context.Context, told func(gpu.Event)) error
	// HoldersOf finds which of the processes hold memory of a device.
	HoldersOf(ctx context.Context, pids ...int) ([]gpu.Holder, error)
}

var _ Devices = gpu.System{}

// ErrDevices says that no attempt may be started on the job's devices.
var ErrDevices = errors.New("the devices of the job are not fit for use")

// deviceGate keeps the job from devices that are not healthy: before each
// attempt it looks at them, during one it listens to them. A job that names no
// device is not its business.
type deviceGate struct {
	*job
	left []process.Entry // processes of earlier attempts

	mu      sync.Mutex
	sick    map[string]bool // devices, by UUID, that the log knows as unhealthy
	cleared map[string]bool // devices that were told as gone and are healthy
	failed  string          // how a device has failed in this attempt
	news    chan struct{}   // closed with the first of them
}

// deviceMemoryPoll is the time between two looks at who holds memory.
const deviceMemoryPoll = 200 * time.Millisecond

func (g *deviceGate) shut() bool { return g != nil && g.cfg.Driver != nil && len(g.cfg.DeviceIDs) > 0 }

// admit returns nil when attempt n may start. What keeps it from that is no
// fault of the training: a trial that has begun stands, to be continued.
func (g *deviceGate) admit(ctx context.Context, n int) error {
	if !g.shut() {
		return nil
	}
	err := g.ready(ctx)
	if err == nil || n == 1 {
		return err
	}
	words, cancel := context.WithTimeout(context.WithoutCancel(ctx), session.LastWordsTimeout)
	defer cancel()
	return errors.Join(err, g.paused(words, n-1, session.Beginning(err.Error(), session.MaxMessage)))
}

func (g *deviceGate) ready(ctx context.Context) error {
	if err := g.released(ctx); err != nil {
		return err
	}
	look, cancel := context.WithTimeout(ctx, g.cfg.DeviceTimeout)
	defer cancel()
	inventory, err := g.cfg.Driver.Inspect(look)
	if errors.Is(err, gpu.ErrNotBuilt) {
		g.log.Warn("the health of the devices is not known", "error", err)
		return nil
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrDevices, err)
	}
	var bad []string
	for _, id := range g.cfg.DeviceIDs {
		reason, err := g.judge(ctx, inventory, id)
		if err != nil {
			return err
		}
		if reason != "" {
			bad = append(bad, id+": "+reason)
		}
	}
	if len(bad) > 0 {
		return fmt.Errorf("%w: %d of %d: %s; or run the job without them", ErrDevices, len(bad), len(g.cfg.DeviceIDs), strings.Join(bad, "; "))
	}
	return nil
}

// judge tells why a device of the job may not be used, "" if it may, and the
// log what has changed.
func (g *deviceGate) judge(ctx context.Context, inventory gpu.Inventory, id string) (reason string, err error) {
	status, ok := inventory.Find(id)
	var what, whole []string
	if !ok {
		what = []string{"this machine has no such device: see nvidia-smi -L"}
		whole = what
	}
	for _, p := range status.Health() {
		if p.Severity == gpu.Unhealthy {
			what, whole = append(what, p.What), append(whole, p.What+": "+p.Next)
		} else {
			g.log.Warn("a device of the job is not as it should be", "device", id, "problem", p.What, "next", p.Next)
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
	g.log.Info("a device that had failed is healthy", "device", uuid)
	return g.Append(ctx, &events.GPURecovered{Device: uuid})
}

// leave takes note of the processes of an attempt that has ended.
func (g *deviceGate) leave(processes *process.Hunt) {
	if g.shut() {
		g.left = append(g.left, processes.Known()...)
	}
}

// released waits until no process of an earlier attempt holds memory of a
// device: the driver frees it some time after the process is gone, and the
// next attempt would not find room.
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
			g.log.Warn("whether the last attempt still holds GPU memory is not known", "error", err)
			g.left = nil
			return nil
		case len(held) == 0:
			g.left = nil
			return nil
		}
		h := held[0]
		last = fmt.Errorf("process %d of an earlier attempt is gone and still holds memory of %s after %v: the driver hangs; see nvidia-smi and the kernel's log, then reset the device", h.PID, h.Device, g.cfg.DeviceTimeout)
		select {
		case <-time.After(deviceMemoryPoll):
		case <-wait.Done():
			if ctx.Err() == nil {
				return fmt.Errorf("%w: %w", ErrDevices, last)
			}
		}
	}
}

// pids are those of earlier attempts. One that is another process by now is
// nobody of ours.
func (g *deviceGate) pids() (pids []int) {
	g.left = slices.DeleteFunc(g.left, process.Entry.Replaced)
	for _, p := range g.left {
		pids = append(pids, p.PID())
	}
	return pids
}
