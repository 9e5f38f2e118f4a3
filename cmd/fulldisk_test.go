//go:build outlive

package cmd_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// diskEnv is the directory of a test in its own namespace, in which every user may
// mount a disk.
const diskEnv = "CKPTSTORE_TEST_DISK"

// TestJobsOutliveFullDisk: the disk of a store is full to the last byte, and stays full
// when a process frees space. No job ends, and each save is committed or aborted with a
// reason. Once there is room again, all jobs continue.
func TestJobsOutliveFullDisk(t *testing.T) {
	t.Parallel()
	if disk := os.Getenv(diskEnv); disk != "" {
		outliveFullDisk(t, disk)
		return
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "unshare", "-rm", exe, "-test.v", "-test.run=^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), diskEnv+"="+t.TempDir(), builtEnv+"="+bin)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	t.Logf("%s", out)
}

func outliveFullDisk(t *testing.T, disk string) {
	if err := unix.Mount("tmpfs", disk, "tmpfs", 0, "size=400m"); err != nil {
		t.Fatal(err)
	}
	o := &outliving{t: t, dir: filepath.Join(disk, "store")}
	// Registered before the jobs start, so that the disk is unmounted after they end.
	t.Cleanup(func() {
		if err := unix.Unmount(disk, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	first := o.start("job-0")
	o.owns(first.Cmd)
	o.start("job-1")
	o.start("job-2")
	o.start("preempted")
	o.commits(2)
	free := fill(t, filepath.Join(disk, "zeros"))
	o.prints("log has no room; retrying")
	pause := time.NewTimer(shortPause)
	<-pause.C
	o.preemptFull()
	free()
	o.commits(2)
	o.end()
}

// preemptFull preempts the last job while the disk is full. The job loses the work since
// its last commit, reports that, and the run can be started again.
func (o *outliving) preemptFull() {
	o.t.Helper()
	j := o.jobs[len(o.jobs)-1]
	o.jobs = o.jobs[:len(o.jobs)-1]
	if err := j.Process.Signal(syscall.SIGTERM); err != nil {
		o.t.Fatal(err)
	}
	select {
	case <-j.done:
	case <-time.After(3 * patience):
		o.t.Fatalf("job of %s does not end:\n%s", j.run, j.out.String())
	}
	if code := j.ProcessState.ExitCode(); code != 128+int(syscall.SIGTERM) {
		o.t.Errorf("job of %s ended with code %d, want 143:\n%s", j.run, code, j.out.String())
	}
}

// fill takes all free space, and space that is freed later, until the returned function
// is called.
func fill(t *testing.T, path string) (free func()) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	stop, full, ended := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	go func() {
		filled := full
		zeros := make([]byte, 1<<20)
		for tick := time.Tick(50 * time.Millisecond); ; <-tick {
			for size := len(zeros); size >= 1<<10; {
				if _, err := f.Write(zeros[:size]); errors.Is(err, syscall.ENOSPC) {
					size /= 2
				} else if err != nil {
					ended <- err
					return
				}
			}
			if filled != nil {
				close(filled)
				filled = nil
			}
			select {
			case <-stop:
				ended <- errors.Join(f.Close(), os.Remove(path))
				return
			default:
			}
		}
	}()
	select {
	case <-full:
	case err := <-ended:
		t.Fatal(err)
	}
	return func() {
		t.Helper()
		close(stop)
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
	}
}

// prints waits until each job has printed text, and checks that it is alive.
func (o *outliving) prints(text string) {
	o.t.Helper()
	deadline := time.Now().Add(3 * patience)
	for tick := time.Tick(50 * time.Millisecond); slices.ContainsFunc(o.jobs, func(j *outlivingJob) bool {
		return !strings.Contains(j.out.String(), text)
	}); <-tick {
		for _, j := range o.jobs {
			select {
			case <-j.done:
				o.t.Fatalf("job of %s ended with code %d:\n%s", j.run, j.ProcessState.ExitCode(), j.out.String())
			default:
			}
		}
		if time.Now().After(deadline) {
			for _, j := range o.jobs {
				fmt.Fprintf(o.t.Output(), "%s:\n%s\n", j.run, j.out.String())
			}
			o.t.Fatalf("not all jobs have printed %q", text)
		}
	}
}
