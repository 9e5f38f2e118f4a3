package launch_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/store"
)

// Two users of one machine.
const (
	victim   = 20001
	attacker = 20002
)

// initializer creates a store: STORE.
var initializer = role("initializer of a store", func(ctx context.Context, args []string) error {
	_, err := store.Init(ctx, args[0], "")
	return err
})

var loadsStaged = workerRole("loads what was staged", func(ctx context.Context, c *client.Client) error {
	emit("resumes %s", c.Resume)
	return load(ctx, c, "", 2)
})

// finishingTrainer is a trainer in a process of its own: STORE MEMORY RUN.
var finishingTrainer = role("trainer that finishes", func(ctx context.Context, args []string) error {
	st, err := store.Open(ctx, store.Options{Location: args[0]})
	if err != nil {
		return err
	}
	err = launch.Run(ctx, config(args[2], 2, loadsStaged, os.Stdout, os.Stderr), storeOf(st, args[1]))
	return errors.Join(err, st.Close())
})

// Another user takes the name of a user's shared memory. The trainer stages under
// another name, which no other user can read. What it had staged when it was
// killed is committed by the next trainer, which finds that name.
func TestNeighbourTakesSharedMemory(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Fatal("this test runs processes of other users: run it as root")
	}
	for what, take := range map[string]string{"no user": ":", "a directory": `mkdir -m 0777 "$1"`, "a link": `ln -s /tmp "$1"`} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			open, shared := folderOf(t, "/tmp", 0o755), folderOf(t, "/dev/shm", 0o777|os.ModeSticky)
			exe, home := filepath.Join(open, "exe"), filepath.Join(open, "home")
			own, err := os.Executable()
			if err != nil {
				t.Fatal(err)
			}
			err = errors.Join(exec.CommandContext(t.Context(), "cp", own, exe).Run(), os.Chmod(exe, 0o755),
				os.MkdirAll(filepath.Join(home, "run"), 0o700), os.Chown(home, victim, victim), os.Chown(filepath.Join(home, "run"), victim, victim))
			if err != nil {
				t.Fatal(err)
			}
			as := func(user uint32, name string, args ...string) *exec.Cmd {
				ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
				t.Cleanup(cancel)
				c := exec.CommandContext(ctx, name, args...)
				c.Dir, c.Env = "/", []string{"PATH=" + os.Getenv("PATH"), "HOME=" + home, "TMPDIR=" + home, "XDG_RUNTIME_DIR=" + filepath.Join(home, "run"), "GORACE=atexit_sleep_ms=0"}
				c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user, Gid: user}}
				return c
			}
			plays := func(role []string, args ...string) (*exec.Cmd, *transcript) {
				c, out := as(victim, exe, append(role[1:], args...)...), newTranscript()
				c.Stdout, c.Stderr = out, out
				return c, out
			}
			parent := filepath.Join(shared, fmt.Sprint("ckptstore-memory-", victim))
			if out, err := as(attacker, "/bin/sh", "-c", take, "sh", parent).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			at := filepath.Join(home, "store")
			if c, out := plays(initializer, at); c.Run() != nil {
				t.Fatal(out)
			}

			killed, out := plays(stagingTrainer, at, shared, "alone")
			if err := killed.Start(); err != nil {
				t.Fatal(err)
			}
			defer func() {
				_ = killed.Process.Kill()
				_ = killed.Wait() // it was killed
			}()
			out.await(t, 1, "[rank0] staged")
			out.await(t, 1, "[rank1] staged")
			slots, err := filepath.Glob(filepath.Join(shared, "*", "*", "r*.save.*"))
			if err != nil || len(slots) < 2 {
				t.Fatalf("slots %q, %v\n%s", slots, err, out)
			}
			for _, slot := range slots {
				if taken := take != ":"; strings.HasPrefix(slot, parent+"-") != taken {
					t.Errorf("a slot is %s", slot)
				}
				for _, script := range []string{`cat "$1"`, `: >> "$1"`, `ls "${1%/*}"`} {
					if out, err := as(attacker, "/bin/sh", "-c", script, "sh", slot).CombinedOutput(); err == nil {
						t.Errorf("another user can do %s with %s: %d bytes", script, slot, len(out))
					}
				}
			}
			if err := killed.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			_ = killed.Wait() // it was killed

			next, out := plays(finishingTrainer, at, shared, "alone")
			if err := next.Run(); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			wantText(t, out, "[rank0] resumes step-2.a1\n", "[rank1] resumes step-2.a1\n")
		})
	}
}

// folderOf is a new directory with a mode that is removed with the test.
func folderOf(t *testing.T, in string, mode os.FileMode) string {
	t.Helper()
	dir, err := os.MkdirTemp(in, "street") //nolint:usetesting // other users enter it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	if err := os.Chmod(dir, mode); err != nil {
		t.Fatal(err)
	}
	return dir
}
