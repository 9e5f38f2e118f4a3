package launch

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/gpu"
	"github.com/ckptstore/ckptstore/internal/launch/blame"
)

// listen watches the devices for one attempt. The channel is closed when one of
// the job's devices fails; stop ends the watch.
func (g *deviceGate) listen(work context.Context) (failed <-chan struct{}, stop func()) {
	if !g.shut() {
		return nil, func() {}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.failed, g.news = "", make(chan struct{})
	ctx, cancel := context.WithCancel(work)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if err := g.cfg.Driver.Watch(ctx, func(e gpu.Event) { g.hear(ctx, e) }); err != nil {
			g.log.Warn("device watch ended; the next check is before the next attempt", "error", err)
		}
	}()
	return g.news, func() {
		cancel()
		late := time.NewTimer(g.cfg.DeviceTimeout)
		defer late.Stop()
		select {
		case <-ended:
		case <-late.C:
			g.log.Warn("device watch does not stop", "after", g.cfg.DeviceTimeout)
		}
	}
}

// hear handles a device's event during an attempt.
func (g *deviceGate) hear(ctx context.Context, e gpu.Event) {
	switch {
	case e.Kind == gpu.Application:
		g.log.Info("GPU error by a program", "device", e.UUID, "error", e)
		return
	case !e.Sick():
		g.log.Warn("GPU event", "device", e.UUID, "what", e)
		return
	case !g.uses(ctx, e.UUID):
		g.log.Warn("unused device failed", "device", e.UUID, "error", e)
		return
	case e.Kind == gpu.Gone && g.answers(ctx, e.UUID):
		g.log.Warn("another device is lost; this one is healthy", "device", e.UUID)
		return
	}
	if err := g.unhealthy(ctx, e.UUID, e.String()); err != nil {
		g.log.Warn("failed device not recorded in the log", "device", e.UUID, "what", e, "error", err)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.failed == "" {
		g.failed = fmt.Sprintf("device %s failed: %s", e.UUID, e)
		close(g.news)
	}
}

// uses reports whether the job uses a device or one of its instances.
func (g *deviceGate) uses(ctx context.Context, uuid string) bool {
	if slices.Contains(g.cfg.DeviceIDs, uuid) {
		return true
	}
	if !slices.ContainsFunc(g.cfg.DeviceIDs, func(id string) bool { return !strings.HasPrefix(id, "GPU-") }) {
		return false
	}
	look, cancel := context.WithTimeout(ctx, g.cfg.DeviceTimeout)
	defer cancel()
	inventory, err := g.cfg.Driver.Inspect(look)
	if err != nil {
		g.log.Warn("MIG instances not resolved to devices; every device failure counts for the job", "error", err)
		return true
	}
	return slices.ContainsFunc(g.cfg.DeviceIDs, func(id string) bool {
		s, ok := inventory.Find(id)
		return ok && s.UUID == uuid
	})
}

// answers reports whether a device reported as gone is well, and another device
// is lost. While one device is lost, the driver reports all of them as gone. The
// first report is believed; once an inspection has found the device healthy,
// another inspection decides.
func (g *deviceGate) answers(ctx context.Context, uuid string) bool {
	g.mu.Lock()
	cleared := g.cleared[uuid]
	g.mu.Unlock()
	if !cleared {
		return false
	}
	look, cancel := context.WithTimeout(ctx, g.cfg.DeviceTimeout)
	defer cancel()
	inventory, err := g.cfg.Driver.Inspect(look)
	if err != nil {
		g.log.Warn("cannot check whether a device is lost; assuming that it is", "device", uuid, "error", err)
		return false
	}
	status, ok := inventory.Find(uuid)
	return ok && !slices.ContainsFunc(status.Health(), func(p gpu.Problem) bool { return p.Severity == gpu.Unhealthy })
}

// failure returns how a device has failed in this attempt, or "".
func (g *deviceGate) failure() string {
	if !g.shut() {
		return ""
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.failed
}

// blame returns the cause of an attempt's end. A failed device of the job
// explains the workers' errors, and makes the failure one of infrastructure.
func (g *deviceGate) blame(cause *FailedError) *FailedError {
	if !g.shut() {
		return cause
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.failed == "" {
		return cause
	}
	if cause == nil {
		return &FailedError{Rank: -1, Kind: blame.Infrastructure, Cause: g.failed}
	}
	if cause.Kind != blame.Infrastructure {
		cause.Kind, cause.Cause = blame.Infrastructure, g.failed+"; "+cause.Cause
	}
	return cause
}
