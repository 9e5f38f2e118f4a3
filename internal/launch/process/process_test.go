package process_test

import (
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/launch/process"
	"github.com/ckptstore/ckptstore/internal/store"
)

// pieces keeps each write.
type pieces struct {
	mu   sync.Mutex
	list []string
}

// Write implements io.Writer.
func (p *pieces) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.list = append(p.list, string(b))
	return len(b), nil
}

// A process's output comes line by line to each of two writers, and its end is as
// the system reports it.
func TestStart(t *testing.T) {
	var out, err pieces
	p, serr := process.Start(3, []string{"/bin/sh", "-c", `echo a; printf b; echo e >&2; kill -USR1 $$`}, os.Environ(), &out, process.Prefixed(&err, "[rank3] "))
	if serr != nil {
		t.Fatal(serr)
	}
	root, rerr := p.Root()
	if rerr != nil || root == (process.Entry{}) {
		t.Errorf("root %+v, %v", root, rerr)
	}
	e := p.Wait()
	process.CloseOutput(slog.New(slog.DiscardHandler), p)
	if e != (process.Exit{Rank: 3, Code: 138, Signal: "SIGUSR1"}) || !e.Failed() || !p.Ended() || e.String() != "rank 3 was killed by SIGUSR1" {
		t.Errorf("%+v", e)
	}
	if got := strings.Join(out.list, "|"); got != "a\n|b" {
		t.Errorf("stdout %q", got)
	}
	if got := strings.Join(err.list, "|"); got != "[rank3] e\n" {
		t.Errorf("stderr %q", got)
	}
	if tail := p.Tail(); len(tail) != 3 {
		t.Errorf("tail %q", tail)
	}
}

// TestHuntOfOneStore: if a log names a live job of another store, or of another
// run, none of its processes is killed.
func TestHuntOfOneStore(t *testing.T) {
	job := store.NewID()
	start := func(id string) *exec.Cmd {
		cmd := exec.CommandContext(t.Context(), "/bin/sleep", "1000")
		cmd.Env = []string{client.EnvJob + "=" + job, client.EnvRun + "=a", client.EnvStoreID + "=" + id}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		return cmd
	}
	mine, theirs := start("mine"), start("theirs")
	defer func() { _ = process.NewHunt(job).Kill(t.Context()); _ = theirs.Wait() }()
	if err := process.NewHunt(job).Of(client.EnvStoreID+"=mine", client.EnvRun+"=b").Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if found, err := process.NewHunt(job).Look(); err != nil || len(found) != 2 {
		t.Errorf("after a hunt for another run there are %d of 2 processes, %v", len(found), err)
	}
	if err := process.NewHunt(job).Of(client.EnvStoreID+"=mine", client.EnvRun+"=a").Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	_ = mine.Wait() // it was killed
	if found, err := process.NewHunt(job).Look(); err != nil || len(found) != 1 || found[0].PID() != theirs.Process.Pid {
		t.Errorf("left are %+v, %v, want process %d", found, err, theirs.Process.Pid)
	}
}

// A hunt finds processes with the marker of its job, and their descendants
// without it, and nothing of another job.
func TestHunt(t *testing.T) {
	job, other := store.NewID(), store.NewID()
	start := func(job string) *exec.Cmd {
		cmd := exec.CommandContext(t.Context(), "/bin/sh", "-c", `setsid env -i sleep 1000 & echo up; wait`)
		cmd.Env = append(os.Environ(), client.EnvJob+"="+job)
		r, err := cmd.StdoutPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 3)
		if _, err := r.Read(b); err != nil {
			t.Fatal(err)
		}
		return cmd
	}
	mine, theirs := start(job), start(other)
	defer func() { _ = process.NewHunt(other).Kill(t.Context()); _ = theirs.Wait() }()
	deadline := time.After(time.Minute)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for n := 0; n < 2; { // the shell and its child
		found, err := process.NewHunt(job).Look()
		if err != nil {
			t.Fatal(err)
		}
		n = len(found)
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("%d processes are found", n)
		}
	}
	if err := process.NewHunt(job).Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	_ = mine.Wait() // it was killed
	if found, err := process.NewHunt(job).Look(); err != nil || len(found) > 0 {
		t.Errorf("left %+v, %v", found, err)
	}
	if found, err := process.NewHunt(other).Look(); err != nil || len(found) < 2 {
		t.Errorf("the other job has %+v, %v", found, err)
	}
}

// What is on its way through a pipe of the test.
type live chan string

func (l live) Write(p []byte) (int, error) {
	l <- string(p)
	return len(p), nil
}

// A progress bar is seen as it goes, and only its last state is among the last
// lines.
func TestProgressIsSeenAtOnce(t *testing.T) {
	t.Parallel()
	gate := filepath.Join(t.TempDir(), "gate")
	if err := syscall.Mkfifo(gate, 0o600); err != nil {
		t.Fatal(err)
	}
	out := make(live)
	p, err := process.Start(0, []string{"/bin/sh", "-c", `printf '\r1%%\r'; read go <"$0"; printf '2%%\r\n\r3%%'; printf 'x\ny\r\n'`, gate}, os.Environ(), process.Prefixed(out, "[rank0] "), io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	see := func(want string) {
		t.Helper()
		select {
		case got := <-out:
			if got != want {
				t.Errorf("saw %q, want %q", got, want)
			}
		case <-time.After(30 * time.Second):
			t.Fatalf("did not see %q", want)
		}
	}
	see("\r")
	see("[rank0] 1%\r") // and the rest is not there yet
	if err := os.WriteFile(gate, []byte("go\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	see("[rank0] 2%\r\n")
	see("\r")
	see("[rank0] 3%x\n")
	see("[rank0] y\r\n")
	p.Wait()
	process.CloseOutput(slog.New(slog.DiscardHandler), p)
	if tail := p.Tail(); !slices.Equal(tail, []string{"2%\r\n", "3%x\n", "y\r\n"}) {
		t.Errorf("tail %q", tail)
	}
}
