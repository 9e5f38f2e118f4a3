//go:build outlive

package cmd_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// viewsDisks are the ways in which the disk of the views fails while three jobs train
// and one of them owns the store.
var viewsDisks = map[string]func(t *testing.T, at string) (breaks func()){
	"full": func(t *testing.T, at string) func() {
		t.Helper()
		if err := unix.Mount("tmpfs", at, "tmpfs", 0, "size=64m,mode=0700"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Unmount(at, unix.MNT_DETACH) })
		return func() { t.Cleanup(fill(t, filepath.Join(at, "zeros"))) }
	},
	"errors": func(t *testing.T, at string) func() {
		t.Helper()
		d := mountBroken(t, at)
		return func() { d.breaks(syscall.EIO) }
	},
	"silent": func(t *testing.T, at string) func() {
		t.Helper()
		d := mountBroken(t, at)
		return func() { d.breaks(silent) }
	},
}

// TestJobsOutliveBadViews: the disk of a store's views is full, returns errors or hangs.
// No job ends, commands get answers, a later command gets the same ones, and one
// SIGTERM ends each job within its grace period.
func TestJobsOutliveBadViews(t *testing.T) {
	t.Parallel()
	for how, disk := range viewsDisks {
		t.Run(how, func(t *testing.T) {
			if dir := os.Getenv(diskEnv); dir != "" {
				outliveBadViews(t, dir, disk)
				return
			}
			t.Parallel()
			if how != "full" && !canMount() {
				t.Log("not run: this machine has no /dev/fuse, by which a disk returns errors or hangs")
				return
			}
			exe, err := os.Executable()
			if err != nil {
				t.Fatal(err)
			}
			cmd := exec.CommandContext(t.Context(), "unshare", "-rm", exe, "-test.v", "-test.run=^TestJobsOutliveBadViews$/^"+how+"$")
			cmd.Env = append(os.Environ(), diskEnv+"="+t.TempDir(), builtEnv+"="+bin)
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			t.Logf("%s", out)
		})
	}
}

func outliveBadViews(t *testing.T, dir string, disk func(*testing.T, string) func()) {
	o := &outliving{t: t, dir: filepath.Join(dir, "store")}
	if out, err := exec.CommandContext(t.Context(), "ckptstore", "init", "--store", o.dir).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	views := filepath.Join(o.dir, "views")
	if err := os.Mkdir(views, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		t.Fatal(err)
	}
	breaks := disk(t, views)
	first := o.start("job-0")
	o.owns(first.Cmd)
	o.start("job-1")
	o.start("job-2")
	o.commits(2)
	breaks()
	o.degrades(first)
	o.commits(2)
	o.answers()
	o.end()
}

// degrades waits until the owner keeps the views in memory.
func (o *outliving) degrades(owner *outlivingJob) {
	o.t.Helper()
	const text = "views kept in memory"
	began := time.Now()
	deadline := began.Add(3 * patience)
	for tick := time.Tick(50 * time.Millisecond); !strings.Contains(owner.out.String(), text); <-tick {
		select {
		case <-owner.done:
			o.t.Fatalf("job of %s ended with code %d:\n%s", owner.run, owner.ProcessState.ExitCode(), owner.out.String())
		default:
		}
		if time.Now().After(deadline) {
			o.t.Fatalf("the owner does not print %q:\n%s", text, owner.out.String())
		}
	}
	o.t.Logf("views in memory after %v", time.Since(began).Round(time.Millisecond))
}

// answers runs several commands on each run.
func (o *outliving) answers() {
	o.t.Helper()
	for _, j := range o.jobs {
		for _, args := range [][]string{{"ls", j.run}, {"show", j.run + "@latest"}, {"metrics", j.run, "--json"}, {"jobs"}} {
			within, cancel := context.WithTimeout(o.t.Context(), 2*patience)
			cmd := exec.CommandContext(within, "ckptstore", append(args, "--store", o.dir)...)
			began := time.Now()
			out, err := cmd.CombinedOutput()
			cancel()
			if err != nil || !strings.Contains(string(out), j.run) {
				o.t.Errorf("ckptstore %v: %v\n%s", args, err, out)
			}
			o.t.Logf("ckptstore %v answered in %v", args, time.Since(began).Round(time.Millisecond))
		}
	}
}
