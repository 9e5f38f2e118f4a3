package logpeers

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/problem/system"
)

// A copy is gone for good, and another copy lacks events that the lost copy had acknowledged. The
// copy is made again from the others. Then the copy with all those events may fail too: the copy
// that lacked them and the new one serve the whole log. The old copy is refused when it comes back.
func TestReplacedCopy(t *testing.T) {
	t.Parallel()
	j, l := newLog(t)
	want := []string{"created"}
	add := func(n int) {
		t.Helper()
		for range n {
			id := fmt.Sprint("event-", len(want))
			if _, err := l.Append(t.Context(), fact(t, id)); err != nil {
				t.Fatal(err)
			}
			want = append(want, id)
		}
	}
	add(20)
	replace := func(k int) error {
		return Replace(t.Context(), j.store, k, 100*time.Millisecond, slog.New(slog.NewTextHandler(t.Output(), nil)))
	}
	if err := replace(2); !errors.Is(err, ErrCopyThere) {
		t.Errorf("a copy that is there is replaced: %v", err)
	}
	j.peers[1].Close()
	add(200)
	j.peers[0].Close()
	j.peers[2].Close()
	l.Close()

	aside := filepath.Join(t.TempDir(), "old")
	if err := os.Rename(CopyDir(j.store, 2), aside); err != nil {
		t.Fatal(err)
	}
	// With one of the two others out of reach, nothing is made.
	away := filepath.Join(t.TempDir(), "away")
	if err := os.Rename(CopyDir(j.store, 0), away); err != nil {
		t.Fatal(err)
	}
	if err := replace(2); !slices.Contains(system.Kinds(err), problem.Locked) {
		t.Errorf("replaced from one copy: %v", err)
	}
	if hasCopy(CopyDir(j.store, 2)) {
		t.Error("a copy was begun from one other")
	}
	if err := os.Rename(away, CopyDir(j.store, 0)); err != nil {
		t.Fatal(err)
	}
	if err := replace(2); err != nil {
		t.Fatal(err)
	}
	if err := replace(2); !errors.Is(err, ErrCopyThere) {
		t.Errorf("the new copy is replaced: %v", err)
	}

	old := config(j.store, 2)
	old.Formed, old.Dir, old.Wait = true, aside, 5*time.Second
	if p, _, err := Join(t.Context(), old); !errors.Is(err, ErrForeignCopy) {
		t.Errorf("the old copy is served: %v", err)
		if p != nil {
			p.Close()
		}
	}
	j.together(true, 1, 2) // without the copy that had everything
	if got := ids(t, j.connect(j.access)); !slices.Equal(got, want) {
		t.Errorf("%d events, want %d", len(got), len(want))
	}
}

// While a job uses the log, no copy is replaced.
func TestNoCopyReplacedUnderLoad(t *testing.T) {
	t.Parallel()
	j, _ := newLog(t)
	j.peers[2].Close()
	if err := os.RemoveAll(CopyDir(j.store, 2)); err != nil {
		t.Fatal(err)
	}
	err := Replace(t.Context(), j.store, 2, 100*time.Millisecond, quiet)
	if !slices.Contains(system.Kinds(err), problem.Locked) {
		t.Errorf("replaced under a running job: %v", err)
	}
}
