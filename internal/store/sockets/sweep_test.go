package sockets

import (
	"errors"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"
)

// TestSweepRuntimeDirectories: an owner removes what dead processes of other stores have left, and
// nothing of a living process.
func TestSweepRuntimeDirectories(t *testing.T) {
	t.Parallel()
	base := short(t, "")
	old := time.Now().Add(-2 * SweepAge)
	long := time.Now().Add(-48 * time.Hour)
	socket := func(path string, alive bool) {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		if alive {
			t.Cleanup(func() { _ = l.Close() })
			return
		}
		l.SetUnlinkOnClose(false) // as when it is killed
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
	job := func(dir string, at time.Time) string {
		path := filepath.Join(dir, "job-1")
		if err := errors.Join(os.Mkdir(path, 0o700), os.WriteFile(filepath.Join(path, "a1-r0.error.json"), nil, 0o600), os.Chtimes(path, at, at)); err != nil {
			t.Fatal(err)
		}
		return path
	}
	locked := func(path string, how int) {
		f, err := os.OpenFile(path, os.O_RDONLY, 0)
		if err == nil {
			err = unix.Flock(int(f.Fd()), how)
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = f.Close() })
	}
	touch := func(path string) {
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	goes := map[string]bool{}
	for name, c := range map[string]struct {
		goes bool
		age  time.Time
		fill func(dir string)
	}{
		"empty":        {true, old, func(string) {}},
		"killed-owner": {true, old, func(d string) { socket(filepath.Join(d, "o1.log"), false); socket(filepath.Join(d, "o1.api"), false) }},
		"killed-agent": {true, old, func(d string) {
			touch(filepath.Join(d, "agent.lock"))
			socket(filepath.Join(d, "agent.sock"), false)
		}},
		"killed-job": {true, old, func(d string) { socket(filepath.Join(job(d, old), "a1-r0.sock"), false) }},
		"old-job":    {true, old, func(d string) { job(d, long) }},
		"new":        {false, time.Now(), func(string) {}},
		"open":       {false, old, func(d string) { locked(d, unix.LOCK_SH) }},
		"alive":      {false, old, func(d string) { socket(filepath.Join(d, "o1.log"), true) }},
		"alive-agent": {false, old, func(d string) {
			touch(filepath.Join(d, "agent.lock"))
			locked(filepath.Join(d, "agent.lock"), unix.LOCK_EX)
		}},
		"alive-job": {false, old, func(d string) { socket(filepath.Join(job(d, old), "a1-r0.sock"), true) }},
		"between":   {false, old, func(d string) { job(d, old) }},
		"of-a-user": {false, old, func(d string) {
			touch(filepath.Join(base, "notes"))
			_ = os.Symlink(base, filepath.Join(d, "x"))
		}},
	} {
		dir := filepath.Join(base, "ckptstore-"+(name + "____________")[:12])
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		c.fill(dir)
		if err := os.Chtimes(dir, c.age, c.age); err != nil {
			t.Fatal(err)
		}
		goes[dir] = c.goes
	}
	own := filepath.Join(base, "ckptstore-own_________")
	SweepOthers(own, slog.New(slog.DiscardHandler))
	for dir, gone := range goes {
		if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) != gone {
			t.Errorf("%s: %v, want it gone: %t", filepath.Base(dir), err, gone)
		}
	}
	if _, err := os.Stat(filepath.Join(base, "notes")); err != nil {
		t.Error(err)
	}
}

// TestSweepRacesNoOwner: while a directory is made, held, released and swept all the time, every
// holder can make files in it.
func TestSweepRacesNoOwner(t *testing.T) {
	t.Parallel()
	id := uuid.NewString()
	dir, err := Dir(id)
	if err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var sweeper sync.WaitGroup
	swept := 0
	sweeper.Go(func() {
		old := time.Now().Add(-2 * SweepAge)
		for {
			select {
			case <-stop:
				return
			default:
			}
			_ = os.Chtimes(dir, old, old) // it may not be there
			before, _ := os.Lstat(dir)
			if err := sweep(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
				t.Error(err)
			}
			if after, err := os.Lstat(dir); before != nil && (err != nil || !os.SameFile(before, after)) {
				swept++
			}
		}
	})
	var holders sync.WaitGroup
	for n := range 4 {
		holders.Go(func() {
			for i := range 500 {
				h, err := Hold(id)
				if err != nil {
					t.Error(err)
					return
				}
				path := filepath.Join(h.Path, string(rune('a'+n)))
				if err := os.WriteFile(path, nil, 0o600); err != nil {
					t.Errorf("round %d: %v", i, err)
				}
				if n == 0 && i%2 == 0 { // as a process that is killed
					_ = h.lock.Close()
					continue
				}
				_ = os.Remove(path)
				if err := h.Release(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	holders.Wait()
	close(stop)
	sweeper.Wait()
	t.Logf("swept %d times", swept)
}

// TestSweepJobs: only directories whose sockets all refuse are removed, and not at once.
func TestSweepJobs(t *testing.T) {
	t.Parallel()
	dir := short(t, "sweep")
	old := time.Now().Add(-2 * SweepAge)
	made := func(name string, age time.Time, listening ...bool) {
		t.Helper()
		job := filepath.Join(dir, name)
		if err := os.Mkdir(job, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(job, "a1-r0.error.json"), []byte("{}"), 0o600); err != nil {
			t.Fatal(err)
		}
		for i, on := range listening {
			l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(job, string(rune('a'+i))), Net: "unix"})
			if err != nil {
				t.Fatal(err)
			}
			if on {
				t.Cleanup(func() { _ = l.Close() })
				continue
			}
			l.SetUnlinkOnClose(false) // as when it is killed
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.Chtimes(job, age, age); err != nil {
			t.Fatal(err)
		}
	}
	made("job-dead", old, false, false)
	made("job-new", time.Now(), false)
	made("job-half", old, true, false)
	made("job-between", old)
	if err := SweepJobs(dir); err != nil {
		t.Fatal(err)
	}
	left, err := filepath.Glob(filepath.Join(dir, "job-*"))
	if err != nil || len(left) != 3 || strings.Contains(strings.Join(left, " "), "dead") {
		t.Errorf("left: %v, %v", left, err)
	}
}
