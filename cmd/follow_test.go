package cmd_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/store"
)

// follower is a running `events --follow --json`.
type follower struct {
	t      *testing.T
	cmd    *exec.Cmd
	lines  chan uint64 // sequences as they are printed; closed at its end
	stderr bytes.Buffer
}

func follow(t *testing.T, dir string, args ...string) *follower {
	t.Helper()
	f := &follower{t: t, lines: make(chan uint64, 10_000)}
	f.cmd = exec.CommandContext(t.Context(), "ckptstore", append([]string{"events", "--follow", "--json", "--store", dir}, args...)...)
	f.cmd.Stderr = &f.stderr
	out, err := f.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := f.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(f.lines)
		for scan := bufio.NewScanner(out); scan.Scan(); {
			var e struct{ Sequence uint64 }
			if json.Unmarshal(scan.Bytes(), &e) == nil {
				f.lines <- e.Sequence
			}
		}
	}()
	return f
}

// until reads to the line of a sequence, each from first on exactly once.
func (f *follower) until(first, last uint64) {
	f.t.Helper()
	limit := time.After(60 * time.Second)
	for want := first; want <= last; want++ {
		select {
		case got, ok := <-f.lines:
			if !ok || got != want {
				_ = f.cmd.Process.Kill()
				f.t.Fatalf("event %d was printed (more: %v), want %d\n%s", got, ok, want, f.stderr.String())
			}
		case <-limit:
			_ = f.cmd.Process.Kill()
			f.t.Fatalf("event %d was not printed\n%s", want, f.stderr.String())
		}
	}
}

// end sends a signal and returns the exit code. Nothing more was printed.
func (f *follower) end(sig os.Signal) int {
	f.t.Helper()
	if err := f.cmd.Process.Signal(sig); err != nil {
		f.t.Fatal(err)
	}
	for seq := range f.lines {
		f.t.Errorf("event %d was printed at the end", seq)
	}
	_ = f.cmd.Wait() // the exit code is checked instead
	return f.cmd.ProcessState.ExitCode()
}

// TestFollowOwnersThatDie: a follower of the log sees every event once while the owners
// of the store are killed one after the other.
func TestFollowOwnersThatDie(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "store")
	output(t, 0, "ckptstore", "init", "--store", dir)
	serve := func() *exec.Cmd {
		cmd := exec.CommandContext(t.Context(), "ckptstore", "serve", "--store", dir)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		return cmd
	}
	first := serve()
	waitOwner(t, dir, first.Process.Pid)
	second := serve()
	f := follow(t, dir, "--cursor", "durable")
	f.until(1, 1)
	s, err := store.Open(t.Context(), store.Options{Location: dir})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	const each = 100
	appended := make(chan error, 1)
	next := uint64(2)
	for _, owner := range []*exec.Cmd{first, second} {
		go func() { appended <- appendMetrics(t, s, each) }()
		f.until(next, next+each/4)
		if err := owner.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = owner.Wait()
		if err := <-appended; err != nil {
			t.Fatal(err)
		}
		f.until(next+each/4+1, next+each-1)
		next += each
	}
	if code := f.end(os.Interrupt); code != 0 {
		t.Errorf("exit code %d\n%s", code, f.stderr.String())
	}
	if list, err := s.Log.ListCursors(t.Context()); err != nil || len(list) != 1 || list[0].Sequence != next-1 {
		t.Errorf("the cursor is %+v, want it at %d: %v", list, next-1, err)
	}
}

func appendMetrics(t *testing.T, s *store.Store, n int) error {
	for i := range n {
		fact, err := events.NewFact(store.Stamp("test"), events.Scope{Run: "r", Trial: "main", Actor: events.Rank(0)},
			events.Metrics{Attempt: 1, Iteration: i + 1, Metrics: map[string]any{"loss": 1.5}})
		if err == nil {
			_, err = s.Log.Append(t.Context(), fact)
		}
		if err != nil {
			return fmt.Errorf("append %d: %w", i, err)
		}
	}
	return nil
}

func waitOwner(t *testing.T, dir string, pid int) {
	t.Helper()
	limit := time.After(20 * time.Second)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		var owner struct{ PID int }
		if text, err := os.ReadFile(filepath.Join(dir, "owner.json")); err == nil && json.Unmarshal(text, &owner) == nil && owner.PID == pid {
			return
		}
		select {
		case <-tick.C:
		case <-limit:
			t.Fatalf("process %d does not own %s", pid, dir)
		}
	}
}

// TestCursor: a subscriber continues where it was killed, no other process can use its
// cursor meanwhile, and the list has its position.
func TestCursor(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "store")
	output(t, 0, "ckptstore", "init", "--store", dir)
	s, err := store.Open(t.Context(), store.Options{Location: dir})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	if err := appendMetrics(t, s, 9); err != nil {
		t.Fatal(err)
	}
	f := follow(t, dir, "--cursor", "alerts", "--run", "r", "--type", "report.*")
	f.until(2, 10)
	output(t, 5, "ckptstore", "events", "--cursor", "alerts", "--store", dir)
	output(t, 5, "ckptstore", "events", "cursors", "rm", "alerts", "--store", dir)
	f.end(syscall.SIGKILL)

	// At least once: the last events may be printed again, and none is skipped.
	if err := appendMetrics(t, s, 5); err != nil {
		t.Fatal(err)
	}
	f = follow(t, dir, "--cursor", "alerts", "--from", "new")
	from := <-f.lines
	if from < 2 || from > 11 {
		t.Fatalf("it continues at %d after 2 to 10 were printed", from)
	}
	f.until(from+1, 15)
	if code := f.end(os.Interrupt); code != 0 {
		t.Errorf("exit code %d\n%s", code, f.stderr.String())
	}
	if more := output(t, 0, "ckptstore", "events", "--cursor", "alerts", "--json", "--store", dir); more != "" {
		t.Errorf("after a clean end these are printed again: %s", more)
	}
	text := output(t, 0, "ckptstore", "events", "cursors", "--json", "--store", dir)
	schema(t, "cursors", text)
	var list struct {
		Cursors []struct {
			Name          string
			Sequence, Lag uint64
		}
	}
	decode(t, text, &list)
	if len(list.Cursors) != 1 || list.Cursors[0].Name != "alerts" || list.Cursors[0].Sequence != 15 || list.Cursors[0].Lag != 0 {
		t.Errorf("cursors are %s", text)
	}
	output(t, 0, "ckptstore", "events", "cursors", "rm", "alerts", "--store", dir)
	output(t, 4, "ckptstore", "events", "cursors", "rm", "alerts", "--store", dir)
}
