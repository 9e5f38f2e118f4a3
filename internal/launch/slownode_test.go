package launch_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/gpu"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/projections"
)

// busyFor reports how long the rank was busy: rank 1 twice as long as the others, up to step 30.
var busyFor = workerRole("reports how long it was busy", func(ctx context.Context, c *client.Client) error {
	for step := int64(1); step <= 60; step++ {
		busy := 0.1
		if c.Rank == 1 && step <= 30 {
			busy = 0.2
		}
		if err := c.Report(ctx, step, map[string]any{"loss": 1.0, "busy_this_iter_s": busy}); err != nil {
			return err
		}
	}
	return nil
})

// A node whose ranks are busy longer than those of the others is named when it is slow, and when it
// is well again: by its index, and it alone. The metrics have no trace of it.
func TestSlowNode(t *testing.T) {
	t.Parallel()
	j := newJob(t, 3, busyFor...)
	j.spread(1, 1, 1)
	j.must()
	job := j.cfg.Job
	got := bodiesOf[events.NodeSlow](t, runOf(t))
	want := []events.NodeSlow{
		{Job: job, Attempt: 1, Node: 1, By: "busy", Seconds: 0.2, Others: 0.1, Behind: 20, Of: 20},
		{Job: job, Attempt: 1, Node: 1, Over: true, By: "busy", Seconds: 0.1, Others: 0.1, Behind: 10, Of: 30},
	}
	if len(got) != 2 || *got[0] != want[0] || *got[1] != want[1] {
		t.Errorf("%d facts, want %+v", len(got), want)
		for _, f := range got {
			t.Logf("%+v", *f)
		}
	}
	wantText(t, j.log, `msg="node is slow" node=1`, `msg="node is no longer slow" node=1`)
	for _, m := range bodiesOf[events.Metrics](t, runOf(t)) {
		if len(m.Others) > 0 || len(m.Metrics) != 1 {
			t.Fatalf("metrics %+v", m)
		}
	}
	rows := projections.NewMemory()
	for _, r := range logOf(t, runOf(t)) {
		if err := projections.Apply(rows, r); err != nil {
			t.Fatal(err)
		}
	}
	launches, err := projections.AllLaunches(rows, runOf(t), true)
	if err != nil {
		t.Fatal(err)
	}
	stays := launches[0].Jobs[0].Nodes
	n := stays[slices.IndexFunc(stays, func(n projections.JobNode) bool { return n.Node == 1 })]
	if n.SlowAttempt != 1 || n.SlowBy != "busy" || !n.WellAt.After(n.SlowAt) {
		t.Errorf("node %+v", n)
	}
}

// A job whose preflight finds a bad node: the clock of node 1 is behind those of the others by a minute.
func TestPreflightOfClock(t *testing.T) {
	t.Parallel()
	j := newJob(t, 3, busyFor...)
	j.cfg.Preflight, j.cfg.Exclude = true, launch.ExcludeAlways
	j.differs = func(index int, cfg *launch.Config, _ *session.Store) {
		if index == 1 {
			cfg.Now = func() time.Time { return time.Now().Add(-time.Minute) }
		}
	}
	other := j.spread(1, 1, 1)[0]
	j.cfg.GatherTimeout = 2 * time.Second
	wantExcluded(t, j.run, other, "its clock is 1m0s behind those of most nodes", 0)
}

// A disk that is bad for all nodes excludes none of them.
func TestPreflightOfSharedDisk(t *testing.T) {
	t.Parallel()
	j := newJob(t, 3, busyFor...)
	j.cfg.Preflight, j.cfg.Exclude = true, launch.ExcludeAlways
	j.cfg.Output.Dir = "/dev/null/logs"
	j.differs = func(_ int, cfg *launch.Config, _ *session.Store) { cfg.Output.Dir = j.cfg.Output.Dir }
	j.spread(1, 1, 1)
	j.cfg.GatherTimeout = 2 * time.Second
	j.must()
	wantText(t, j.log, "no node is to blame, as it may be one disk that they share")
}

// The device of node 1 is not fit for use.
func TestPreflightOfDevices(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, busyFor...)
	j.cfg.Preflight, j.cfg.Exclude = true, launch.ExcludeAlways
	j.differs = func(index int, cfg *launch.Config, _ *session.Store) {
		if index == 1 {
			d, errs := newDevices(), uint64(3)
			d.one.ECC = &errs
			cfg.Driver, cfg.DeviceIDs, cfg.DeviceTimeout = d, []string{oneGPU}, patience
		}
	}
	other := j.spread(1, 1)[0]
	j.cfg.GatherTimeout = 2 * time.Second
	wantExcluded(t, j.run, other, "its devices are not fit for use: GPU-1: 3 memory errors", 0)
}

var waitsForever = workerRole("waits until it is ended", func(ctx context.Context, _ *client.Client) error {
	emit("ready")
	<-ctx.Done()
	return ctx.Err()
})

// A device of node 1 fails while the job trains: the node is excluded, and the job waits for another.
func TestNodeOfFailedDeviceExcluded(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, waitsForever...)
	j.cfg.Exclude, j.cfg.MaxInfraRestarts, j.cfg.Grace = launch.ExcludeAlways, 1, time.Second
	d := newDevices()
	j.differs = func(index int, cfg *launch.Config, _ *session.Store) {
		if index == 1 {
			cfg.Driver, cfg.DeviceIDs, cfg.DeviceTimeout, cfg.Grace = d, []string{oneGPU}, patience, time.Second
		}
	}
	other := j.spread(1, 1)[0]
	j.cfg.GatherTimeout = 2 * time.Second
	j.start()
	other.out.await(t, 1, "[rank1] ready")
	d.send(t, gpu.Event{UUID: oneGPU, XID: 79, Kind: gpu.Hardware})
	wantExcluded(t, j.wait, other, "device GPU-1 failed: XID 79", 1)
}

// wantExcluded checks that a job of two nodes ends because its second node is excluded, and why.
func wantExcluded(t *testing.T, ends func() error, other *follower, why string, groups int) {
	t.Helper()
	var few *nodes.TooFewError
	if err := ends(); !errors.As(err, &few) || !strings.Contains(err.Error(), why) {
		t.Errorf("error %v, want too few nodes: %s", err, why)
	}
	select {
	case <-other.link.Done():
	case <-time.After(patience):
		t.Fatal("the node was not excluded")
	}
	if err := other.link.Err(); err == nil || !strings.Contains(err.Error(), why) {
		t.Errorf("the link ended by %v, want %s", err, why)
	}
	if n := len(bodiesOf[events.GroupStarted](t, runOf(t))); n != groups {
		t.Errorf("%d groups were started, want %d", n, groups)
	}
	var left []*events.NodeLeft
	for _, b := range bodiesOf[events.NodeLeft](t, runOf(t)) {
		if b.Excluded {
			left = append(left, b)
		}
	}
	if len(left) != 1 || left[0].Node != 1 || !strings.Contains(left[0].Reason, why) {
		t.Errorf("excluded %+v", left)
	}
}
