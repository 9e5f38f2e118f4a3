package launches

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ckptstore/ckptstore/events"
)

// other is the ID of another user.
const other = 20002

// started returns a job.started of a run.
func started(t *testing.T, run string, seq uint64, command ...string) events.Recorded {
	t.Helper()
	f, err := events.NewFact(events.Stamp{ID: fmt.Sprint("event-", seq), Source: "test", Time: time.Unix(1, 0)},
		events.Scope{Run: run, Trial: events.None, Actor: events.Node(0)}, &events.JobStarted{Job: "job", Command: command, Dir: "/"})
	if err != nil {
		t.Fatal(err)
	}
	return events.Recorded{Event: f.Event, Sequence: seq}
}

// directory returns a directory to start a job in.
func directory(t *testing.T) fs.FileInfo {
	t.Helper()
	info, err := os.Stat(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return info
}

// home sets the state directory to a new directory.
func home(t *testing.T) string {
	t.Helper()
	base := filepath.Join(t.TempDir(), "state")
	t.Setenv("XDG_STATE_HOME", base)
	return base
}

func record(t *testing.T, l Launch) {
	t.Helper()
	if err := l.Record(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// unproven expects a launch not to be proven, for a reason.
func unproven(t *testing.T, what string, l Launch, says string) {
	t.Helper()
	if err := l.Prove(t.Context()); !errors.Is(err, ErrUnproven) || !strings.Contains(err.Error(), says) {
		t.Errorf("%s: %v, want %q", what, err, says)
	}
}

// TestProve: only its own record proves a launch.
func TestProve(t *testing.T) {
	home(t)
	dir := directory(t)
	event := started(t, "bert", 7, "python3", "train.py")
	l := Of("store", "", event, dir)
	unproven(t, "before it is recorded", l, "no trainer of this user")
	record(t, l)
	if err := l.Prove(t.Context()); err != nil {
		t.Error(err)
	}
	changed := event
	changed.Data = []byte(strings.Replace(string(event.Data), "train.py", "train.pz", 1))
	unproven(t, "one byte of the body", Of("store", "", changed, dir), "with another body")
	unproven(t, "the same event elsewhere", Of("store", "", started(t, "bert", 8, "python3", "train.py"), dir), "event 7, and this is event 8")
	renamed := event
	renamed.ID = "event-8"
	unproven(t, "another event there", Of("store", "", renamed, dir), "event 7")
	unproven(t, "another run", Of("store", "", started(t, "other", 7, "python3", "train.py"), dir), "no trainer of this user")
	unproven(t, "another store", Of("other", "", event, dir), "no trainer of this user")
	unproven(t, "a copy of the store", Of("store", "copy", event, dir), "no trainer of this user")
	moved := l
	moved.DirOwner = other
	unproven(t, "a directory of another user", moved, "now belongs to user 20002")

	// The next launch of the run replaces it.
	next := Of("store", "", started(t, "bert", 9, "python3", "train.py"), dir)
	record(t, next)
	if err := next.Prove(t.Context()); err != nil {
		t.Error(err)
	}
	unproven(t, "the launch before", l, "event 9, and this is event 7")
}

// TestNotThisUsers: a record that another user may have written proves nothing.
func TestNotThisUsers(t *testing.T) {
	if os.Getuid() != 0 {
		t.Fatal("this test gives files to another user: run it as root")
	}
	for name, spoil := range map[string]func(dir, file string) error{
		"another user's directory": func(dir, _ string) error { return os.Chown(dir, other, other) },
		"another user's record":    func(_, file string) error { return os.Chown(file, other, other) },
		"a directory others write": func(dir, _ string) error { return os.Chmod(dir, 0o777) },
		"a directory others see":   func(dir, _ string) error { return os.Chmod(dir, 0o750) },
		"a record others write":    func(_, file string) error { return os.Chmod(file, 0o622) },
		"a record others see":      func(_, file string) error { return os.Chmod(file, 0o644) },
		"a link to another place": func(dir, file string) error {
			elsewhere := filepath.Join(filepath.Dir(dir), "elsewhere")
			return errors.Join(os.Rename(file, elsewhere), os.Symlink(elsewhere, file))
		},
	} {
		base := home(t)
		l := Of("store", "", started(t, "bert", 7, "true"), directory(t))
		record(t, l)
		dir := filepath.Join(base, "ckptstore", "launches")
		if err := spoil(dir, filepath.Join(dir, l.key())); err != nil {
			t.Fatal(err)
		}
		unproven(t, name, l, "not private to this user")
	}
}

// TestModes: with any umask, and in a group-writable directory, the created files
// are private to this user.
func TestModes(t *testing.T) {
	for _, umask := range []int{0, 0o002, 0o022, 0o077} {
		base := home(t)
		if err := os.Chmod(filepath.Dir(base), 0o777|fs.ModeSetgid); err != nil {
			t.Fatal(err)
		}
		l := Of("store", "", started(t, "bert", 7, "true"), directory(t))
		was := syscall.Umask(umask)
		err := l.Record(t.Context())
		syscall.Umask(was)
		if err != nil {
			t.Fatal(err)
		}
		for path, want := range map[string]fs.FileMode{
			base: 0o700, filepath.Join(base, "ckptstore"): 0o700, filepath.Join(base, "ckptstore", "launches"): 0o700,
			filepath.Join(base, "ckptstore", "launches", l.key()): 0o600,
		} {
			if info, err := os.Stat(path); err != nil || info.Mode().Perm() != want {
				t.Errorf("umask %03o: %s has mode %v, %v, want %v", umask, path, info.Mode(), err, want)
			}
		}
		if err := l.Prove(t.Context()); err != nil {
			t.Errorf("umask %03o: %v", umask, err)
		}
	}
}

// TestHome: the state is below the home of this user, and nowhere else.
func TestHome(t *testing.T) {
	if os.Getuid() != 0 {
		t.Fatal("this test gives a home to another user: run it as root")
	}
	l := Of("store", "", started(t, "bert", 7, "true"), directory(t))
	own, foreign := t.TempDir(), t.TempDir()
	if err := os.Chown(foreign, other, other); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct{ xdg, home, says string }{
		"as usual":                {"", own, ""},
		"relative":                {"state", own, ""},
		"no home":                 {"", "", "neither"},
		"a home that is not made": {"", filepath.Join(own, "nowhere"), "no such file"},
		"another user's home":     {"", foreign, "belongs to user 20002"},
		"a state that is no home": {filepath.Join(foreign, "state"), own, "belongs to user 20002"},
	} {
		t.Setenv("XDG_STATE_HOME", tc.xdg)
		t.Setenv("HOME", tc.home)
		err := l.Record(t.Context())
		if tc.says == "" {
			if err != nil || l.Prove(t.Context()) != nil {
				t.Errorf("%s: %v, %v", name, err, l.Prove(t.Context()))
			}
			continue
		}
		if err == nil || !strings.Contains(err.Error(), tc.says) || !strings.Contains(err.Error(), "XDG_STATE_HOME") {
			t.Errorf("%s: %v", name, err)
		}
		unproven(t, name, l, "")
	}
	if left, err := os.ReadDir(foreign); err != nil || len(left) > 0 {
		t.Errorf("in the home of another user are %v, %v", left, err)
	}
}

// TestPrune: the oldest records are removed, and the number of records is
// bounded.
func TestPrune(t *testing.T) {
	base := home(t)
	dir := directory(t)
	first := Of("store", "", started(t, "first", 7, "true"), dir)
	record(t, first)
	records := filepath.Join(base, "ckptstore", "launches")
	for i := range kept {
		name := filepath.Join(records, fmt.Sprint(i))
		if err := os.WriteFile(name, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	long := time.Unix(1, 0)
	if err := os.Chtimes(filepath.Join(records, first.key()), long, long); err != nil {
		t.Fatal(err)
	}
	last := Of("store", "", started(t, "last", 7, "true"), dir)
	record(t, last)
	if entries, err := os.ReadDir(records); err != nil || len(entries) != kept {
		t.Errorf("%d records, %v, want %d", len(entries), err, kept)
	}
	unproven(t, "the oldest", first, "no trainer of this user")
	if err := last.Prove(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestSlowHome: a call returns although the home does not answer.
func TestSlowHome(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		answer := make(chan struct{})
		_, err := within(t.Context(), func() (bool, error) {
			<-answer
			return true, nil
		})
		if err == nil || !strings.Contains(err.Error(), "does not answer within 5s") {
			t.Errorf("%v", err)
		}
		close(answer)
	})
}
