package store

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/store/holder"
)

// The lease of a process in another container, such as the killed one of the same pod, is
// taken at once if its witness is there and not locked, and otherwise not before it expires.
func TestWitness(t *testing.T) {
	t.Parallel()
	s := open(t, made(t))
	for i, c := range []struct {
		name   string
		change func(h *holder.Process, path string) error
		taken  bool
	}{
		{"killed", func(*holder.Process, string) error { return nil }, true},
		{"alive", func(_ *holder.Process, path string) error { return lockFor(t, path) }, false},
		{"in another pod", func(_ *holder.Process, path string) error { return os.Remove(path) }, false},
		{"on another machine", func(h *holder.Process, _ string) error { h.Boot = "other"; return nil }, false},
		{"of a version without", func(h *holder.Process, _ string) error { h.Witness = ""; return nil }, false},
		{"a name that leaves the directory", func(h *holder.Process, _ string) error { h.Witness = "witness-/../" + h.Witness; return nil }, false},
		{"a link", func(_ *holder.Process, path string) error {
			return errors.Join(os.Remove(path), os.Symlink("/etc/passwd", path))
		}, false},
	} {
		h, err := holder.This("job-1")
		if err != nil {
			t.Fatal(err)
		}
		h.Space, h.Witness = "pid:[1]", holder.WitnessPrefix+c.name
		path := filepath.Join(s.Runtime, h.Witness)
		err = os.WriteFile(path, nil, 0o600)
		if err = errors.Join(err, c.change(&h, path)); err != nil {
			t.Fatal(err)
		}
		text, err := json.Marshal(h)
		if err != nil {
			t.Fatal(err)
		}
		run := fmt.Sprint("run-", i)
		lease, err := s.Log.Lease(t.Context(), jetlog.RunLease(run), text, time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		live, err := s.LiveJob(t.Context(), run)
		if err != nil || (live == nil) != c.taken {
			t.Errorf("%s: the live job is %v, %v", c.name, live, err)
		}
		_, release, err := s.HoldRun(t.Context(), run, "job-2")
		if running := (*RunningError)(nil); c.taken != (err == nil) || err != nil && !errors.As(err, &running) {
			t.Errorf("%s: %v, want it taken: %v", c.name, err, c.taken)
		}
		if err == nil {
			err = release()
		} else {
			err = lease.Release(t.Context())
		}
		if err != nil {
			t.Error(err)
		}
	}
}

// lockFor locks a file until the test ends, as a living process does.
func lockFor(t *testing.T, path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	t.Cleanup(func() { _ = f.Close() })
	return unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
}

// A process that ends removes its witness. Those of killed ones stay for a day.
func TestWitnessRemoved(t *testing.T) {
	t.Parallel()
	s := open(t, made(t))
	old, young := filepath.Join(s.Runtime, holder.WitnessPrefix+"old"), filepath.Join(s.Runtime, holder.WitnessPrefix+"young")
	for _, path := range []string{old, young} {
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chtimes(old, time.Time{}, time.Now().Add(-2*holder.WitnessAge)); err != nil {
		t.Fatal(err)
	}
	_, release, err := s.HoldRun(t.Context(), "run", "job")
	if err != nil {
		t.Fatal(err)
	}
	left := func() []string {
		t.Helper()
		paths, err := filepath.Glob(filepath.Join(s.Runtime, holder.WitnessPrefix+"*"))
		if err != nil {
			t.Fatal(err)
		}
		return paths
	}
	if got := left(); len(got) != 2 {
		t.Errorf("while a lease is held there are %v", got)
	}
	if err := errors.Join(release(), s.witness.Close()); err != nil {
		t.Fatal(err)
	}
	if got := left(); len(got) != 1 || got[0] != young {
		t.Errorf("after the end there are %v", got)
	}
}

// The witness of a job that began long ago proves its end too: the process that takes the lease does not
// remove it before. A process that renews a lease keeps its witness young.
func TestWitnessOfOldJob(t *testing.T) {
	t.Parallel()
	s := open(t, made(t))
	s.term = briefTerm
	h, err := holder.This("job-1")
	if err != nil {
		t.Fatal(err)
	}
	h.Space, h.Witness = "pid:[1]", holder.WitnessPrefix+"old"
	path := filepath.Join(s.Runtime, h.Witness)
	old := time.Now().Add(-2 * holder.WitnessAge)
	if err := errors.Join(os.WriteFile(path, nil, 0o600), os.Chtimes(path, old, old)); err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(h)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Log.Lease(t.Context(), jetlog.RunLease("run"), text, time.Hour); err != nil {
		t.Fatal(err)
	}
	_, release, err := s.HoldRun(t.Context(), "run", "job-2")
	if err != nil {
		t.Fatal(err)
	}
	name, err := s.witness.Name(s.Runtime)
	if err != nil {
		t.Fatal(err)
	}
	own := filepath.Join(s.Runtime, name)
	if err := os.Chtimes(own, old, old); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the witness is young again", func() bool {
		info, err := os.Stat(own)
		if err != nil {
			t.Fatal(err)
		}
		return info.ModTime().After(old.Add(holder.WitnessAge))
	})
	if err := release(); err != nil {
		t.Fatal(err)
	}
}

// A process holds the lease of its job, and not that of another job.
func TestHolds(t *testing.T) {
	t.Parallel()
	s := open(t, made(t))
	if err := s.Holds(t.Context(), "run", "job-1"); err == nil {
		t.Error("a run that no job has is held")
	}
	_, release, err := s.HoldRun(t.Context(), "run", "job-1")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Holds(t.Context(), "run", "job-1"); err != nil {
		t.Error(err)
	}
	if err := s.Holds(t.Context(), "run", "job-2"); err == nil {
		t.Error("the lease of another job is held")
	}
	if err := release(); err != nil {
		t.Fatal(err)
	}
}
