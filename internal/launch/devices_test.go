package launch_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/gpu"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/launch/blame"
	"github.com/ckptstore/ckptstore/projections"
)

// fakeDevices is a node with two GPUs, the second in MIG mode, whose condition
// the test sets.
type fakeDevices struct {
	mu      sync.Mutex
	one     gpu.Status
	hangs   bool
	holds   []gpu.Holder // of the queried process, as many times
	asked   [][]int      // for whose memory
	looks   int
	watched int
	tell    chan gpu.Event
}

const oneGPU, twoGPU, partGPU = "GPU-1", "GPU-2", "MIG-2a"

func newDevices() *fakeDevices {
	return &fakeDevices{one: gpu.Status{Device: gpu.Device{UUID: oneGPU}}, tell: make(chan gpu.Event)}
}

// Inspect implements launch.Devices.
func (d *fakeDevices) Inspect(ctx context.Context) (gpu.Inventory, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.looks++
	if d.hangs {
		<-ctx.Done()
		return gpu.Inventory{}, errors.New("the driver does not answer")
	}
	two := gpu.Status{Device: gpu.Device{UUID: twoGPU, Index: 1, MIG: true, Instances: []gpu.Instance{{UUID: partGPU}}}}
	return gpu.Inventory{Devices: []gpu.Status{d.one, two}}, nil
}

// Watch implements launch.Devices.
func (d *fakeDevices) Watch(ctx context.Context, told func(gpu.Event)) error {
	d.mu.Lock()
	d.watched++
	d.mu.Unlock()
	for {
		select {
		case e := <-d.tell:
			told(e)
		case <-ctx.Done():
			return nil
		}
	}
}

// HoldersOf implements launch.Devices.
func (d *fakeDevices) HoldersOf(_ context.Context, pids ...int) ([]gpu.Holder, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.asked = append(d.asked, pids)
	if len(d.holds) == 0 {
		return nil, nil
	}
	held := d.holds[0]
	if held.PID = pids[0]; len(d.holds) > 1 || held.Device == "" {
		d.holds = d.holds[1:]
	}
	return []gpu.Holder{held}, nil
}

// on is newJob with devices.
func on(t *testing.T, d *fakeDevices, ids []string, nproc int, command ...string) *job {
	j := newJob(t, nproc, command...)
	j.cfg.Driver, j.cfg.DeviceIDs, j.cfg.DeviceTimeout = d, ids, patience
	return j
}

func (d *fakeDevices) send(t *testing.T, e gpu.Event) {
	t.Helper()
	select {
	case d.tell <- e:
	case <-time.After(patience):
		t.Fatal("the devices are not watched")
	}
}

// wantUnhealthy compares the log's events about devices with pairs of UUID and a
// part of the reason.
func wantUnhealthy(t *testing.T, want ...string) {
	t.Helper()
	got := bodiesOf[events.GPUUnhealthy](t, runOf(t))
	if len(got) != len(want)/2 {
		t.Fatalf("%d events gpu.unhealthy, want %d", len(got), len(want)/2)
	}
	for i, e := range got {
		if e.Device != want[2*i] || !strings.Contains(e.Reason, want[2*i+1]) {
			t.Errorf("gpu.unhealthy %+v, want %q", e, want[2*i:2*i+2])
		}
	}
}

// Nothing starts on an unhealthy device.
func TestUnhealthyDeviceBeforeStart(t *testing.T) {
	t.Parallel()
	d := newDevices()
	errs := uint64(3)
	d.one.ECC = &errs
	j := on(t, d, []string{oneGPU, "GPU-x", partGPU}, 1, shell("echo started")...)
	err := j.run()
	if !errors.Is(err, launch.ErrDevices) {
		t.Fatalf("error %v", err)
	}
	for _, part := range []string{"2 of 3", "GPU-1: 3 memory errors", "nvidia-smi -r -i GPU-1", "GPU-x: this machine has no such device"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q is not in %v", part, err)
		}
	}
	wantUnhealthy(t, oneGPU, "3 memory errors", "GPU-x", "no such device")
	if n := len(bodiesOf[events.GroupStarted](t, runOf(t))); n != 0 || strings.Contains(j.out.String(), "started") {
		t.Errorf("%d attempts were started: %s", n, j.out)
	}
}

var waitsOnce = workerRole("waits in its first life", func(ctx context.Context, c *client.Client) error {
	if c.Attempt > 1 {
		return nil
	}
	emit("ready")
	return errors.Join(untilTerm(ctx), errors.New("ended"))
})

// A hardware error of a device of the job ends the attempt, and is the device's
// fault alone. Errors of programs and of other devices do not end it.
func TestDeviceFailsDuringAttempt(t *testing.T) {
	t.Parallel()
	d := newDevices()
	j := on(t, d, []string{oneGPU}, 2, waitsOnce...)
	j.cfg.MaxInfraRestarts = 1
	j.start()
	j.out.await(t, 2, "[rank")
	d.send(t, gpu.Event{UUID: oneGPU, XID: 31, Kind: gpu.Application})
	d.send(t, gpu.Event{UUID: oneGPU, XID: 63, Kind: gpu.Other})
	d.send(t, gpu.Event{UUID: twoGPU, XID: 79, Kind: gpu.Hardware})
	d.send(t, gpu.Event{UUID: oneGPU, XID: 79, Kind: gpu.Hardware})
	if err := j.wait(); err != nil {
		t.Fatal(err)
	}
	stopped := bodiesOf[events.GroupStopped](t, runOf(t))
	if len(stopped) != 2 || !strings.Contains(stopped[0].Reason, "device GPU-1 failed: XID 79: it has fallen off the bus") {
		t.Errorf("group.stopped %+v", stopped)
	}
	wantUnhealthy(t, oneGPU, "XID 79")
	if got := one[events.GPURecovered](t, runOf(t)); got.Device != oneGPU {
		t.Errorf("gpu.recovered %+v", got)
	}
	wantText(t, j.log, "GPU error by a program", "GPU event", "unused device failed")
	if d.watched != 2 || d.looks != 2 || len(d.asked) != 1 || len(d.asked[0]) < 2 {
		t.Errorf("%d watches, %d looks, asked who holds memory for %v", d.watched, d.looks, d.asked)
	}
}

// A device that stays unhealthy prevents the next attempt. The trial can be
// continued on other devices.
func TestDeviceStaysUnhealthy(t *testing.T) {
	t.Parallel()
	d := newDevices()
	j := on(t, d, []string{"0"}, 1, waitsOnce...)
	j.cfg.MaxInfraRestarts = 1
	j.start()
	j.out.await(t, 1, "ready")
	d.mu.Lock()
	d.one.Lost = "find: ERROR_GPU_IS_LOST"
	d.mu.Unlock()
	d.send(t, gpu.Event{UUID: oneGPU, Kind: gpu.Gone})
	if err := j.wait(); !errors.Is(err, launch.ErrDevices) || !strings.Contains(err.Error(), "0: it does not answer") {
		t.Errorf("error %v", err)
	}
	wantUnhealthy(t, oneGPU, "a device of this machine is lost")
	if trial := trialOf(t); trial.Status != projections.Paused {
		t.Errorf("trial %+v", trial)
	}
	if n := len(bodiesOf[events.GroupStarted](t, runOf(t))); n != 1 {
		t.Errorf("%d attempts", n)
	}
}

var waitsTwice = workerRole("waits in two lives", func(ctx context.Context, c *client.Client) error {
	emit("ready")
	if c.Attempt > 1 {
		return untilTerm(ctx)
	}
	return errors.Join(untilTerm(ctx), errors.New("ended"))
})

// While another device is lost, the driver reports all as lost. This ends one
// attempt; the next continues as long as its own device answers.
func TestAnotherDeviceIsLost(t *testing.T) {
	t.Parallel()
	d := newDevices()
	j := on(t, d, []string{oneGPU}, 1, waitsTwice...)
	j.cfg.MaxInfraRestarts = 1
	j.start()
	j.out.await(t, 1, "ready")
	d.send(t, gpu.Event{UUID: oneGPU, Kind: gpu.Gone})
	j.out.await(t, 2, "ready")
	d.send(t, gpu.Event{UUID: oneGPU, Kind: gpu.Gone})
	awaitText(t, j.log, "another device is lost; this one is healthy")
	d.mu.Lock()
	d.one.Lost = "find: ERROR_GPU_IS_LOST"
	d.mu.Unlock()
	d.send(t, gpu.Event{UUID: oneGPU, Kind: gpu.Gone})
	failed := new(launch.FailedError)
	if err := j.wait(); !errors.As(err, &failed) || failed.Attempt != 2 || !strings.Contains(failed.Cause, "device GPU-1 failed") {
		t.Errorf("error %v", err)
	}
	wantUnhealthy(t, oneGPU, "is lost", oneGPU, "is lost")
}

// A job on a MIG instance ends with the device of the instance.
func TestDeviceOfInstanceFails(t *testing.T) {
	t.Parallel()
	d := newDevices()
	j := on(t, d, []string{partGPU}, 1, waitsOnce...)
	j.start()
	j.out.await(t, 1, "ready")
	d.send(t, gpu.Event{UUID: oneGPU, XID: 79, Kind: gpu.Hardware})
	d.send(t, gpu.Event{UUID: twoGPU, XID: 95, Kind: gpu.Hardware})
	failed := new(launch.FailedError)
	if err := j.wait(); !errors.As(err, &failed) || failed.Kind != blame.Infrastructure || !strings.Contains(failed.Cause, "device GPU-2 failed: XID 95") {
		t.Errorf("error %v", err)
	}
}

// If a worker's end is seen before the failure of the device that caused it, the
// device is the cause nevertheless.
func TestDeviceExplainsFailure(t *testing.T) {
	t.Parallel()
	d := newDevices()
	told := filepath.Join(t.TempDir(), "told")
	j := on(t, d, []string{oneGPU}, 2, shell(`
		if [ $RANK = 1 ]; then exit 3; fi
		trap 'echo; echo ending' TERM
		while [ ! -e `+told+` ]; do sleep 0.1; done`)...)
	j.start()
	j.out.await(t, 1, "[rank0] ending")
	d.send(t, gpu.Event{UUID: oneGPU, XID: 94, Kind: gpu.Hardware})
	d.send(t, gpu.Event{UUID: oneGPU, XID: 13, Kind: gpu.Application}) // the previous event was handled
	if err := os.WriteFile(told, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	failed := new(launch.FailedError)
	if err := j.wait(); !errors.As(err, &failed) || failed.Kind != blame.Infrastructure || failed.Rank != 1 ||
		!strings.Contains(failed.Cause, "device GPU-1 failed: XID 94: contained memory error; rank 1 exited with code 3") {
		t.Errorf("error %v", err)
	}
}

var diesOnce = workerRole("dies in its first life", func(_ context.Context, c *client.Client) error {
	if c.Attempt > 1 {
		return nil
	}
	emit("pid %d", os.Getpid())
	return errors.New("dead")
})

// The next attempt starts when nothing of the last one holds GPU memory.
func TestDeviceMemoryIsFreed(t *testing.T) {
	t.Parallel()
	d := newDevices()
	d.holds = []gpu.Holder{{Device: oneGPU}, {Device: oneGPU}, {}}
	j := on(t, d, []string{oneGPU}, 1, diesOnce...)
	j.cfg.MaxRestarts = 1
	j.must()
	if pids := d.asked[0]; len(d.asked) != 4 || len(pids) != 1 || !slices.Contains(j.out.lines("pid "), strconv.Itoa(pids[0])) {
		t.Errorf("asked for %v", d.asked)
	}
}

// Memory that stays held ends the job with an error that names the process and
// the device.
func TestDeviceMemoryIsHeld(t *testing.T) {
	t.Parallel()
	d := newDevices()
	d.holds = []gpu.Holder{{Device: oneGPU}}
	j := on(t, d, []string{oneGPU}, 1, diesOnce...)
	j.cfg.MaxRestarts, j.cfg.DeviceTimeout = 1, shortly
	err := j.run()
	pid := j.out.lines("pid ")
	if !errors.Is(err, launch.ErrDevices) || len(pid) != 1 || !strings.Contains(err.Error(), "process "+pid[0]+" of an earlier attempt is gone but still holds memory of GPU-1") {
		t.Errorf("error %v, pid %v", err, pid)
	}
	if trial := trialOf(t); trial.Status != projections.Paused {
		t.Errorf("trial %+v", trial)
	}
}

// A driver that does not answer delays no job.
func TestDevicesHang(t *testing.T) {
	t.Parallel()
	d := newDevices()
	d.hangs = true
	j := on(t, d, []string{oneGPU}, 1, shell("true")...)
	j.cfg.DeviceTimeout = shortly
	if err := j.run(); !errors.Is(err, launch.ErrDevices) || !strings.Contains(err.Error(), "does not answer") {
		t.Errorf("error %v", err)
	}
}

// A job without devices does not query the driver.
func TestNoDevices(t *testing.T) {
	t.Parallel()
	d := newDevices()
	d.hangs = true
	on(t, d, nil, 1, shell("true")...).must()
	if d.looks+d.watched+len(d.asked) != 0 {
		t.Errorf("asked %d, %d and %d times", d.looks, d.watched, len(d.asked))
	}
}
