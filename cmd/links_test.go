package cmd_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/store"
)

// The users of these tests.
const (
	victimID   = 20001
	attackerID = 20002
)

// abortEnv makes the test binary append an aborted save to the store that it names, as
// the user that runs it.
const abortEnv = "CKPTSTORE_TEST_ABORT"

// abortSave appends to the log of a store that the save step-20 of run m was aborted.
func abortSave(dir string) error {
	ctx := context.Background()
	s, err := store.Open(ctx, store.Options{Location: dir})
	if err != nil {
		return err
	}
	agg := events.Aggregate{Run: "m", Trial: "main"}
	for _, body := range []events.Body{
		events.CheckpointBegun{Attempt: 1, Checkpoint: "step-20.a1", Name: "step-20", WorldSize: 1, Participants: []int{0}},
		events.CheckpointAborted{Attempt: 1, Checkpoint: "step-20.a1", Reason: "test"},
	} {
		d, err := events.NewDecision(store.Stamp("test"), agg, body)
		if err != nil {
			return errors.Join(err, s.Close())
		}
		end, err := s.Log.LaneEnd(ctx, agg)
		if err == nil {
			_, err = s.Log.Decide(ctx, d, end)
		}
		if err != nil {
			return errors.Join(err, s.Close())
		}
	}
	return s.Close()
}

// attacked is a user with a store, and with files that no other user may read.
type attacked struct {
	t                    *testing.T
	dir, store, precious string
}

// newAttacked makes a store with a checkpoint and an aborted save that left no files.
// Other users can write to its directories of checkpoints.
func newAttacked(t *testing.T) attacked {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("this test acts as two other users: run it as root")
	}
	dir, err := os.MkdirTemp("/tmp", "ckl") //nolint:usetesting // other users must be able to pass through it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	v := attacked{t: t, dir: dir, store: filepath.Join(dir, "home", "store"), precious: filepath.Join(dir, "home", "precious")}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if err := copyProgram(filepath.Join(bin, "ckptstore"), filepath.Join(dir, "ckptstore")); err != nil {
		t.Fatal(err)
	}
	if err := copyProgram(filepath.Join(bin, "trainer"), filepath.Join(dir, "trainer")); err != nil {
		t.Fatal(err)
	}
	if err := copyProgram(self, filepath.Join(dir, "test")); err != nil {
		t.Fatal(err)
	}
	for _, sub := range []string{"home", "run"} {
		if err := errors.Join(os.Mkdir(filepath.Join(dir, sub), 0o700), os.Chown(filepath.Join(dir, sub), victimID, victimID)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	v.must("sh", "-c", `umask 022; mkdir -p -m 700 precious/sub && echo thesis >precious/thesis.tex && echo key >precious/sub/id_rsa`)
	v.must("trainer", "run", "-q", "--store", v.store, "--name=m", "--nproc=1", "--", "trainer", "demo-worker", "--save-every=4", "--steps=4")
	v.must("env", abortEnv+"="+v.store, "test")
	// Otherwise the store is refused before it looks at any link.
	v.must("ckptstore", "config", "trust", v.store)
	return v
}

// run runs a command as a user, in the victim's home.
func (v attacked) run(user uint32, name string, args ...string) (out, stderr string, code int) {
	v.t.Helper()
	if own := filepath.Join(v.dir, name); exists(own) {
		name = own
	}
	cmd := exec.CommandContext(v.t.Context(), name, args...)
	cmd.Dir = v.dir
	if user == victimID {
		cmd.Dir = filepath.Join(v.dir, "home")
	}
	cmd.Env = []string{"PATH=" + v.dir + ":" + os.Getenv("PATH"), "HOME=" + cmd.Dir, "XDG_RUNTIME_DIR=" + filepath.Join(v.dir, "run"), raceEnv + "=" + os.Getenv(raceEnv)}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user, Gid: user}}
	var text, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &text, &errs
	if err := cmd.Run(); cmd.ProcessState == nil {
		v.t.Fatal(err)
	}
	return text.String(), errs.String(), cmd.ProcessState.ExitCode()
}

// must runs a command as the victim that must succeed.
func (v attacked) must(name string, args ...string) {
	v.t.Helper()
	if out, stderr, code := v.run(victimID, name, args...); code != 0 {
		v.t.Fatalf("%s %q: exit code %d\n%s%s", name, args, code, out, stderr)
	}
}

// plant has the attacker make a link to the precious files in a directory that all
// users can write to at that moment.
func (v attacked) plant(path string) {
	v.t.Helper()
	modes := map[string]fs.FileMode{}
	for dir := filepath.Dir(path); dir != v.dir; dir = filepath.Dir(dir) {
		info, err := os.Stat(dir)
		if err == nil {
			modes[dir] = info.Mode().Perm()
			err = os.Chmod(dir, 0o777)
		}
		if err != nil {
			v.t.Fatal(err)
		}
	}
	if out, stderr, code := v.run(attackerID, "ln", "-s", v.precious, path); code != 0 {
		v.t.Fatalf("exit code %d\n%s%s", code, out, stderr)
	}
	for dir, mode := range modes {
		if err := os.Chmod(dir, mode); err != nil {
			v.t.Fatal(err)
		}
	}
}

// whole fails if a precious file is gone or has changed.
func (v attacked) whole(when string) {
	v.t.Helper()
	for name, want := range map[string]string{"thesis.tex": "thesis\n", "sub/id_rsa": "key\n"} {
		if text, err := os.ReadFile(filepath.Join(v.precious, name)); err != nil || string(text) != want {
			v.t.Fatalf("after %s, %s has %q, %v", when, name, text, err)
		}
	}
	if entries, err := os.ReadDir(v.precious); err != nil || len(entries) != 2 {
		v.t.Fatalf("after %s, there is %v, %v", when, entries, err)
	}
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// attempt is a command of the victim, with its exit code if it finds a link that no
// decision in the log is about.
type attempt struct {
	command string
	found   int
}

func (v attacked) commands(n int) []attempt {
	return []attempt{
		{"ls --all", 0},
		{"ls --offline", 12},
		{"gc m --policy last=1", 0},
		{"gc m --policy last=1 --apply", 0},
		{"verify", 6},
		{"verify --offline", 6},
		{"verify --repair", 6},
		{"cat m model.layer1.weight", 0},
		{fmt.Sprintf("backup %s/home/backup%d", v.dir, n), 0},
		{fmt.Sprintf("export m %s/home/export%d --format=safetensors", v.dir, n), 0},
	}
}

// TestLinkOfAnotherUser: another user puts a symbolic link in the place of an aborted
// save. Commands that open the store for writing remove the link, and no command reads,
// writes or removes its target. A link that no decision is about stays, and is a finding.
func TestLinkOfAnotherUser(t *testing.T) {
	t.Parallel()
	v := newAttacked(t)
	for n, name := range []string{"step-20.a1", "step-99.a1"} {
		left := n == 0 // by an aborted save
		path := filepath.Join(v.store, "data", "m", "main", name)
		for _, c := range v.commands(n) {
			command, found := c.command, c.found
			if !exists(path) {
				v.plant(path)
			}
			out, stderr, code := v.run(victimID, "ckptstore", append(strings.Fields(command), "--store", v.store)...)
			v.whole(command)
			tidies := left && (strings.HasPrefix(command, "gc") || strings.HasPrefix(command, "backup") || command == "verify --repair")
			if tidies {
				found = 0
			}
			if code != found || code != 0 && !strings.Contains(out+stderr, path+" is a symbolic link") {
				t.Errorf("%s with a link at %s: exit code %d, want %d\n%s%s", command, name, code, found, out, stderr)
			}
			if gone := !exists(path); gone != tidies {
				t.Errorf("%s: the link at %s is gone: %v", command, name, gone)
			}
		}
	}
}

// TestLinkedDirectories: if a data directory is a link of another user, every command
// ends, and a command that would have to follow the link names its path.
func TestLinkedDirectories(t *testing.T) {
	t.Parallel()
	v := newAttacked(t)
	for n, name := range []string{"data", "data/m", "data/m/main", "data/m/main/step-4.a1", "blobs", "log", "log/sealed", "views"} {
		path := filepath.Join(v.store, name)
		aside := filepath.Join(v.dir, "aside")
		had := exists(path)
		if had {
			if err := os.Rename(path, aside); err != nil {
				t.Fatal(err)
			}
		}
		v.plant(path)
		for _, c := range v.commands(10 + n) {
			command := c.command
			out, stderr, code := v.run(victimID, "ckptstore", append(strings.Fields(command), "--store", v.store)...)
			v.whole(command)
			if code != 0 && (code != 6 && code != 12 || !strings.Contains(out+stderr, path+" is a symbolic link")) {
				t.Errorf("%s with a link at %s: exit code %d\n%s%s", command, name, code, out, stderr)
			}
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		if had {
			if err := os.Rename(aside, path); err != nil {
				t.Fatal(err)
			}
		}
	}
	v.must("ckptstore", "verify", "--store", v.store)
}
