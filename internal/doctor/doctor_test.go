package doctor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/gpu"
)

// The test binary is also the process that tries locks.
func TestMain(m *testing.M) {
	if len(os.Args) == 4 && os.Args[1] == "doctor" && os.Args[2] == lockCommand {
		switch err := TakeLock(os.Args[3]); {
		case errors.Is(err, ErrHeld):
			os.Exit(lockHeld)
		case err != nil:
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func noDriver(context.Context) (gpu.Inventory, error) {
	return gpu.Inventory{}, fmt.Errorf("inspect GPUs: %w", gpu.ErrNoDriver)
}

// here returns options for this machine and a store that does not exist.
func here(t *testing.T) Options {
	t.Helper()
	return Options{
		Store: filepath.Join(t.TempDir(), "no", "store"), Shared: t.TempDir(),
		Inventory: noDriver, TryLock: lockElsewhere, Patience: time.Minute,
	}
}

func examine(t *testing.T, o Options) Report {
	t.Helper()
	r, err := Examine(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// want looks for a check with a status, a part of its finding and a part of the
// next step.
func want(t *testing.T, r Report, id string, status Status, saw, do string) {
	t.Helper()
	at := slices.IndexFunc(r.Checks, func(c Check) bool { return c.ID == id })
	if at < 0 {
		t.Errorf("no check %s in %+v", id, r.Checks)
		return
	}
	if c := r.Checks[at]; c.Status != status || !strings.Contains(c.Saw, saw) || !strings.Contains(c.Do, do) {
		t.Errorf("%+v, want %q, %q, %q", c, status, saw, do)
	}
}

// wantNothingIn checks that no probe has left files behind.
func wantNothingIn(t *testing.T, dir string) {
	t.Helper()
	left, err := os.ReadDir(dir)
	if err != nil || len(left) > 0 {
		t.Errorf("%s has %v, %v", dir, left, err)
	}
}

func TestExamineThisMachine(t *testing.T) {
	o := here(t)
	r := examine(t, o)
	at := filepath.Dir(filepath.Dir(o.Store))
	if r.Examined != at || len(r.Checks) != 22 {
		t.Errorf("%d checks in %s, want those in %s: %+v", len(r.Checks), r.Examined, at, r.Checks)
	}
	want(t, r, "gpu.driver", NotChecked, "no NVIDIA driver", "no action is needed on a machine without GPUs")
	want(t, r, "shm.map", OK, "mapped", "")
	for id, saw := range map[string]string{
		"store.write": at, "store.lock": "between processes", "store.dirsync": "synced",
		"store.rename": "atomically", "store.mode": "mode and owner", "net.loopback": "127.0.0.1", "net.unix": "socket",
	} {
		want(t, r, id, OK, saw, "")
	}
	wantNothingIn(t, at)
	wantNothingIn(t, o.Shared)
}

func ptr[T any](v T) *T { return &v }

// a100s are eight healthy devices, in two halves.
func a100s() gpu.Inventory {
	i := gpu.Inventory{Driver: "550.54.15", CUDA: "12.4"}
	for n := range 8 {
		i.Devices = append(i.Devices, gpu.Status{
			Device:    gpu.Device{UUID: fmt.Sprint("GPU-", n), Index: n, Name: "NVIDIA A100", MemoryBytes: 40 << 30},
			UsedBytes: ptr(uint64(3 << 30)), ECC: ptr(uint64(0)), Rows: &gpu.Rows{}, Celsius: ptr(uint32(41)),
			Milliwatts: ptr(uint32(62500)), Utilization: ptr(uint32(7)), NVLinks: ptr(12), Processes: []gpu.Process{},
		})
		for m := range n {
			level := gpu.AcrossNodes
			if m/4 == n/4 {
				level = gpu.OneSwitch
			}
			i.Links = append(i.Links, gpu.Link{A: fmt.Sprint("GPU-", m), B: fmt.Sprint("GPU-", n), Level: level})
		}
	}
	return i
}

func TestGPUs(t *testing.T) {
	examineGPUs := func(t *testing.T, change func(*gpu.Inventory)) Report {
		t.Helper()
		i := a100s()
		change(&i)
		e := examination{Options: here(t)}
		e.Inventory = func(context.Context) (gpu.Inventory, error) { return i, nil }
		e.gpus(t.Context())
		return e.report
	}
	t.Run("healthy", func(t *testing.T) {
		r := examineGPUs(t, func(*gpu.Inventory) {})
		if r.Problems+r.Warnings != 0 || len(r.Checks) != 11 || r.Err() != nil {
			t.Errorf("%+v", r)
		}
		want(t, r, "gpu.driver", OK, "driver 550.54.15, CUDA up to 12.4, 8 devices", "")
		want(t, r, "gpu.7", OK, "NVIDIA A100 GPU-7, 3.0 GiB of 40.0 GiB used, 41 °C, 62 W, 7 % busy, 12 NVLinks", "")
		want(t, r, "gpu.links", OK, "12 pairs PIX, 16 pairs SYS", "")
		want(t, r, "gpu.mig", OK, "off", "")
	})
	t.Run("ECC", func(t *testing.T) {
		r := examineGPUs(t, func(i *gpu.Inventory) { i.Devices[2].ECC = ptr(uint64(5)) })
		want(t, r, "gpu.2", Problem, "5 memory errors that ECC could not correct", "nvidia-smi -r -i GPU-2")
		if r.Problems != 1 || !errors.Is(r.Err(), ErrFound) {
			t.Errorf("%+v, %v", r, r.Err())
		}
	})
	t.Run("fallen off the bus", func(t *testing.T) {
		r := examineGPUs(t, func(i *gpu.Inventory) {
			i.Devices[3] = gpu.Status{Device: gpu.Device{Index: 3}, Lost: "find: ERROR_GPU_IS_LOST"}
		})
		want(t, r, "gpu.3", Problem, "does not answer: find: ERROR_GPU_IS_LOST", "look for Xid in the kernel's log")
	})
	t.Run("MIG", func(t *testing.T) {
		r := examineGPUs(t, func(i *gpu.Inventory) {
			i.Devices[0].MIG, i.Devices[0].Utilization = true, nil
			i.Devices[0].Instances = []gpu.Instance{{UUID: "MIG-a"}, {UUID: "MIG-b"}}
		})
		want(t, r, "gpu.mig", OK, "on 1 devices, 2 instances", "")
		if strings.Contains(r.Checks[1].Saw, "busy") {
			t.Errorf("a utilization that was not measured is in %+v", r.Checks[1])
		}
		r = examineGPUs(t, func(i *gpu.Inventory) { i.Devices[4].MIG = true })
		want(t, r, "gpu.mig", Warning, "GPU-4 has no instance", "nvidia-smi mig")
	})
	t.Run("busy", func(t *testing.T) {
		r := examineGPUs(t, func(i *gpu.Inventory) { i.Devices[6].Processes = []gpu.Process{{PID: 77, Bytes: ptr(uint64(1 << 30))}} })
		want(t, r, "gpu.6", Warning, "used by other processes: pid 77 with 1024 MiB", "other devices")
		if r.Warnings != 1 || r.Problems != 0 || r.Err() != nil {
			t.Errorf("%+v", r)
		}
	})
	t.Run("hanging driver", func(t *testing.T) {
		e := examination{Options: here(t)}
		e.Patience = 50 * time.Millisecond
		release := make(chan struct{})
		defer close(release)
		e.Inventory = func(context.Context) (gpu.Inventory, error) { <-release; return a100s(), nil }
		e.gpus(t.Context())
		want(t, e.report, "gpu.driver", Problem, "no answer after 50ms", "state D")
		if len(e.report.Checks) != 1 {
			t.Errorf("%+v", e.report)
		}
	})
	t.Run("no device", func(t *testing.T) {
		r := examineGPUs(t, func(i *gpu.Inventory) { i.Devices = nil })
		want(t, r, "gpu.driver", Warning, "no device", "nvidia-smi -L")
	})
}

func TestDriverErrors(t *testing.T) {
	for _, c := range []struct {
		err    error
		status Status
		saw    string
	}{
		{gpu.ErrNoDriver, NotChecked, "no NVIDIA driver found"},
		{gpu.ErrNotBuilt, NotChecked, "built without cgo"},
		{errors.New("the driver does not answer"), Problem, "the driver does not answer"},
	} {
		if _, a := driver(gpu.Inventory{}, c.err); a.status != c.status || !strings.Contains(a.saw, c.saw) || a.do == "" {
			t.Errorf("%v: %+v", c.err, a)
		}
	}
}

// Locks that do not keep other processes out are found.
func TestLockThatDoesNotHold(t *testing.T) {
	o := here(t)
	o.TryLock = func(context.Context, string) error { return nil }
	want(t, examine(t, o), "store.lock", Problem, "also granted to another process", "flock")
	o.TryLock = func(context.Context, string) error { return ErrHeld }
	want(t, examine(t, o), "store.lock", Problem, "a free lock is refused", "flock")
}

// A probe that hangs is abandoned, and the other checks run.
func TestProbeThatHangs(t *testing.T) {
	o := here(t)
	o.Patience = time.Second
	release := make(chan struct{})
	defer close(release)
	o.TryLock = func(context.Context, string) error { <-release; return nil }
	r, err := Examine(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	want(t, r, "store.lock", Problem, "no answer after 1s", "state D")
	want(t, r, "store.rename", OK, "atomically", "")
	wantNothingIn(t, r.Examined)
}

// An interrupted examination leaves nothing behind.
func TestInterrupted(t *testing.T) {
	o := here(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("told to stop")
	o.TryLock = func(ctx context.Context, file string) error {
		if _, err := os.Stat(file); err != nil {
			t.Error(err)
		}
		cancel(why)
		<-ctx.Done()
		return ctx.Err()
	}
	r, err := Examine(ctx, o)
	if !errors.Is(err, why) {
		t.Errorf("error %v", err)
	}
	want(t, r, "net.unix", NotChecked, "was interrupted", "")
	wantNothingIn(t, r.Examined)
	wantNothingIn(t, o.Shared)
}

func TestStorePlaces(t *testing.T) {
	o := here(t)
	o.Store = "nats://localhost:4222"
	r := examine(t, o)
	want(t, r, "store", NotChecked, "nats://localhost:4222 is a URL", "--store DIR")
	if r.Examined != "" {
		t.Errorf("examined %s", r.Examined)
	}

	o.Store = "/proc/no/store" // no process can create files there
	want(t, examine(t, o), "store.write", Problem, "", "choose a directory")

	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	o.Store = filepath.Join(file, "store")
	want(t, examine(t, o), "store.write", Problem, "is not a directory", "looked at")

	// A filesystem of its own is probed in itself.
	memory, err := os.MkdirTemp("/dev/shm", "doctor") //nolint:usetesting // t.TempDir is on a disk
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(memory) }()
	o.Store = "/dev/shm"
	if r := examine(t, o); r.Examined != "/dev/shm" {
		t.Errorf("examined %s", r.Examined)
	}
	o.Store = filepath.Join(memory, "store")
	want(t, examine(t, o), "store.type", Warning, "tmpfs: it is memory", "on a disk")
	wantNothingIn(t, memory)
}

func TestSocketPaths(t *testing.T) {
	long := filepath.Join(t.TempDir(), strings.Repeat("x", 100))
	if a := unixSocket(t.Context(), "", long); a.status != Problem || !strings.Contains(a.saw, "at most 67") || !strings.Contains(a.do, "XDG_RUNTIME_DIR") {
		t.Errorf("%+v", a)
	}
	// A runtime directory that is too long is ignored, as if it were not set.
	if err := os.Mkdir(long, 0o700); err != nil {
		t.Fatal(err)
	}
	if a := unixSocket(t.Context(), long, "/tmp"); a.status != OK || !strings.Contains(a.saw, "temporary files") {
		t.Errorf("%+v", a)
	}
}

func TestGroupLimit(t *testing.T) {
	root := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(root, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
		return path
	}
	two := write("two", "0::/pod/container\n")
	write("pod/container/memory.max", "max\n")
	write("pod/memory.max", "4096\n")
	write("pod/container/pids.max", "100\n")
	one := write("one", "5:pids:/a\n4:memory:/b\n0::/\n")
	write("memory/b/memory.limit_in_bytes", "8192\n")
	for _, c := range []struct {
		groups, controller, file, old string
		want                          uint64
	}{
		{two, "memory", "memory.max", "memory.limit_in_bytes", 4096},
		{two, "pids", "pids.max", "pids.max", 100},
		{one, "memory", "memory.max", "memory.limit_in_bytes", 8192},
		{one, "pids", "pids.max", "pids.max", 1<<64 - 1},
		{filepath.Join(root, "none"), "pids", "pids.max", "pids.max", 1<<64 - 1},
	} {
		if got, err := groupLimit(c.groups, root, c.controller, c.file, c.old); err != nil || got != c.want {
			t.Errorf("%+v: %d, %v", c, got, err)
		}
	}
	if a := groupPIDs(two, root); a.status != Warning || !strings.Contains(a.do, "--pids-limit") {
		t.Errorf("%+v", a)
	}
	if a := groupMemory(two, root); a.status != OK || !strings.Contains(a.saw, "4.0 KiB of memory by control groups") {
		t.Errorf("%+v", a)
	}
}

func TestStacks(t *testing.T) {
	bin := t.TempDir()
	t.Setenv("PATH", bin)
	scope := filepath.Join(bin, "ptrace_scope")
	if a := stacks(scope, 1000); a.status != Warning || !strings.Contains(a.do, "py-spy") {
		t.Errorf("without py-spy: %+v", a)
	}
	if err := os.WriteFile(filepath.Join(bin, "py-spy"), []byte("#!/bin/sh\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	if a := stacks(scope, 1000); a.status != OK {
		t.Errorf("without Yama: %+v", a)
	}
	for _, c := range []struct {
		scope string
		uid   int
		want  Status
	}{{"0", 1000, OK}, {"1", 1000, Warning}, {"1", 0, OK}, {"3", 0, Warning}} {
		if err := os.WriteFile(scope, []byte(c.scope+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		if a := stacks(scope, c.uid); a.status != c.want {
			t.Errorf("%+v: %+v", c, a)
		}
	}
}

func TestTable(t *testing.T) {
	r := Report{Checks: []Check{
		{"a", OK, "fine", "not shown"}, {"long.name", Warning, "odd\nlines", "look"}, {"c", Problem, "bad", "mend"}, {"d", NotChecked, "why\x1b", ""},
	}, Warnings: 1, Problems: 1}
	var plain, colour bytes.Buffer
	if err := errors.Join(r.Table(&plain, false), r.Table(&colour, true)); err != nil {
		t.Fatal(err)
	}
	const want = `OK    a          fine
WARN  long.name  odd lines
                 -> look
FAIL  c          bad
                 -> mend
-     d          why\x1b

4 checks, 1 warning, 1 problem
`
	if plain.String() != want {
		t.Errorf("got\n%swant\n%s", &plain, want)
	}
	const coloured = `✓  a          fine
!  long.name  odd lines
              -> look
✗  c          bad
              -> mend
-  d          why\x1b

4 checks, 1 warning, 1 problem
`
	if got := regexp.MustCompile("\x1b\\[[0-9]+m").ReplaceAllString(colour.String(), ""); got != coloured {
		t.Errorf("got\n%swant\n%s", got, coloured)
	}
}
