package launch_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/store"
)

// trainer is a trainer in a process of its own: STORE MEMORY RUN GATE. It stops
// for good at the gate: a part of a file's name, or "log:" and the kind of a fact
// that its log does not take.
var trainer = role("trainer", func(ctx context.Context, args []string) error {
	st, err := store.Open(ctx, store.Options{Location: args[0]})
	if err != nil {
		return err
	}
	defer func() { _ = st.Close() }()
	s := storeOf(st, args[1])
	if kind, ok := strings.CutPrefix(args[3], "log:"); ok {
		s.Log = deafLog{s.Log, kind}
	} else if args[3] != "" {
		g, err := gated(&s, st, args[3])
		if err != nil {
			return err
		}
		go func() {
			<-g.reached
			emit("now")
		}()
	}
	return launch.Run(ctx, config(args[2], 2, savesWithFamily, os.Stdout, os.Stderr), s)
})

// gated puts a gate before the files of a store.
func gated(s *session.Store, st *store.Store, at string) (g *gate, err error) {
	g = newGate(at)
	if s.Data, err = data.Open(g, st.Data.Dir()); err != nil {
		return nil, err
	}
	s.Data.OfStore(st.ID)
	return g, nil
}

// startTrainer starts a trainer in a process of its own, for the run of a test, with its workers'
// output and its standard input. If the test fails, it logs both outputs.
func startTrainer(ctx context.Context, t *testing.T, role []string, gate string) (cmd *exec.Cmd, out *transcript, in io.Writer) {
	t.Helper()
	cmd = exec.CommandContext(ctx, role[0], append(role[1:], home.Location, memory, runOf(t), gate)...)
	out, log := newTranscript(), &bytes.Buffer{}
	cmd.Stdout, cmd.Stderr = out, log
	in, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("workers:\n%strainer:\n%s", out, log)
		}
	})
	return cmd, out, in
}

// deafLog never takes facts of a kind.
type deafLog struct {
	session.Log
	kind string
}

// Append implements session.Log.
func (l deafLog) Append(ctx context.Context, facts ...events.Fact) ([]uint64, error) {
	for _, f := range facts {
		if string(f.Kind) == l.kind {
			emit("now")
			<-ctx.Done()
			return nil, ctx.Err()
		}
	}
	return l.Log.Append(ctx, facts...)
}

// savesWithFamily saves step 1 to the end, and then step 2 as far as the test
// lets it.
var savesWithFamily = workerRole("saves with a family", func(ctx context.Context, c *client.Client) error {
	if c.Attempt > 1 {
		emit("resumes %s", c.Resume)
		return nil
	}
	child := exec.CommandContext(ctx, "/bin/sh", "-c", "trap '' TERM HUP; sleep 1000 & exec sleep 1000")
	child.SysProcAttr = &unix.SysProcAttr{Setsid: true}
	if err := child.Start(); err != nil {
		return err
	}
	emit("pid %d", os.Getpid())
	emit("pid %d", child.Process.Pid)
	s, err := c.Begin(ctx, 2, state(2, c.Rank, 2), client.SaveOptions{})
	if err != nil {
		return err
	}
	if err := s.Wait(ctx, client.Begun); err != nil {
		return err
	}
	if err := meet(ctx, c); err != nil {
		return err
	}
	if strings.Contains(c.Run, "mid-copy") && c.Rank == 1 {
		emit("now")
		<-ctx.Done()
	}
	if err := s.Seal(ctx); err != nil {
		return err
	}
	emit("sealed")
	<-ctx.Done()
	return ctx.Err()
})

// A trainer that is killed at any point of a save leaves no process behind. The
// next job of the run commits the save if all ranks had sealed their slots,
// aborts it otherwise, frees the memory, and continues from there.
func TestKilledTrainer(t *testing.T) {
	t.Parallel()
	for _, moment := range []struct {
		name, gate string
		commits    bool
		damage     int // bytes of a slot's header from here on are damaged
	}{
		{"mid-copy", "", false, 0},
		{"between sealed and recorded", "log:write.sealed", true, 0},
		{"between staged and written", "r00001.safetensors", true, 0},
		{"staged and not written, a slot unsealed", "r00001.safetensors", false, 8},
		{"staged and not written, a damaged header", "r00001.safetensors", false, 24},
		{"between written and committed", "manifest-", true, 0},
		{"between committed and receipt", checkpoint.ReceiptFile, true, 0},
	} {
		t.Run(moment.name, func(t *testing.T) {
			t.Parallel()
			pids := killTrainer(t, moment.gate)
			if len(pids) != 4 {
				t.Fatalf("%d processes were known, want 4", len(pids))
			}
			j := newJob(t, 2, savesWithFamily...)
			if left := slots(t, j); len(left) == 0 {
				t.Error("a killed trainer left no slot: the test shows nothing")
			}
			if moment.damage > 0 {
				// Of rank 1, which is not written: rank 0's may not be needed.
				damaged := slices.DeleteFunc(slots(t, j), func(path string) bool { return !strings.HasPrefix(filepath.Base(path), "r00001.save.") })
				if len(damaged) == 0 {
					t.Fatal("rank 1 has no slot")
				}
				for _, path := range damaged {
					damage(t, path, int64(moment.damage))
				}
			}
			j.must()
			if _, err := os.Stat(arenasOf(j)); !os.IsNotExist(err) {
				t.Errorf("memory is not freed: %v", err)
			}
			if moment.commits {
				wantEnded(t, []string{"step-2.a1"}, nil)
				wantText(t, j.out, "[rank0] resumes step-2.a1\n", "[rank1] resumes step-2.a1\n")
			} else {
				wantEnded(t, nil, []string{"step-2.a1"})
				wantText(t, j.out, "[rank0] resumes \n", "[rank1] resumes \n")
			}
		})
	}
}

// damage changes eight bytes of a file.
func damage(t *testing.T, path string, at int64) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.WriteAt(bytes.Repeat([]byte{0x5A}, 8), at)
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
}

// killTrainer runs the trainer up to its gate, kills it, and waits until every
// process that it recorded is gone.
func killTrainer(t *testing.T, gate string) (pids []int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	cmd, out, _ := startTrainer(ctx, t, trainer, gate)
	for _, prefix := range []string{"[rank0] pid ", "[rank1] pid "} {
		for _, text := range out.await(t, 2, prefix) {
			pid, err := strconv.Atoi(text)
			if err != nil {
				t.Fatal(err)
			}
			pids = append(pids, pid)
		}
	}
	awaitText(t, out, "now\n")
	if gate != "" {
		out.await(t, 1, "[rank0] sealed")
		out.await(t, 1, "[rank1] sealed")
	}
	var fds []int
	for _, pid := range pids {
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			t.Fatalf("process %d: %v", pid, err)
		}
		fds = append(fds, fd)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // it was killed
	for i, fd := range fds {
		if err := gone(fd); err != nil {
			t.Errorf("process %d outlives its trainer: %v", pids[i], err)
			_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
		}
		_ = unix.Close(fd)
	}
	return pids
}

// gone waits until the process of a pidfd has ended.
func gone(fd int) error {
	for end := time.Now().Add(patience); time.Now().Before(end); {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 100)
		if n > 0 || err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
	}
	return fmt.Errorf("alive after %v", patience)
}
