package logpeers

import (
	"encoding/json"
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

// generation returns how often a copy was replaced.
func generation(t *testing.T, store string, k int) int {
	t.Helper()
	g, err := readGenerations(store)
	if err != nil {
		t.Fatal(err)
	}
	return g[k]
}

// A copy that a process serves from the disk of its node is not replaced, and neither is one whose
// directory another process has. The copy is not refused afterwards: its generation is the same.
func TestServedCopyNotReplaced(t *testing.T) {
	t.Parallel()
	j := &joined{t: t, store: t.TempDir(), log: slog.DiscardHandler}
	j.on[2] = filepath.Join(t.TempDir(), "copy")
	j.form().Close()
	j.peers[0].Close()
	j.peers[1].Close()
	refused := func(what string) {
		t.Helper()
		err := Replace(t.Context(), j.store, 2, 100*time.Millisecond, quiet)
		if g := generation(t, j.store, 2); !slices.Contains(system.Kinds(err), problem.Locked) || g != 0 {
			t.Errorf("%s: %v; its generation is %d", what, err, g)
		}
	}
	refused("a copy that is served")
	j.peers[2].Close()
	h, err := lockCopy(t.Context(), CopyDir(j.store, 2), copyID{}, false)
	if err != nil {
		t.Fatal(err)
	}
	refused("a directory that another process has")
	if err := h.release(); err != nil {
		t.Fatal(err)
	}
	j.together(true, 0, 1, 2)
}

// A call of Replace was killed. The next one ends, from every state of the directory that the first
// one can leave.
func TestReplacedAfterKill(t *testing.T) {
	t.Parallel()
	j, l := newLog(t)
	l.Close()
	for _, p := range j.peers {
		p.Close()
	}
	dir := CopyDir(j.store, 2)
	s, err := readSecret(j.store)
	if err != nil {
		t.Fatal(err)
	}
	write := func(name string, text []byte) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		name  string
		leave func()
	}{ // before it has files, the directory has the name of the copy, and then the mark; the next call removes them in this order
		{"the copy of the generation before is named", func() {
			old := s.copy(2)
			old.Generation = generation(t, j.store, 2) - 1
			text, err := json.Marshal(old)
			if err != nil {
				t.Fatal(err)
			}
			write(copyName, text)
		}},
		{"only the mark is left", func() { write(fillingName, nil) }},
	} {
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		c.leave()
		if err := Replace(t.Context(), j.store, 2, time.Second, slog.New(slog.NewTextHandler(t.Output(), nil))); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		if isFilling(dir) || !hasCopy(dir) {
			t.Errorf("%s: the copy is not there", c.name)
		}
	}

	// Killed while the copy was filled: the next job fills it.
	write(fillingName, nil)
	if states, err := States(j.store); err != nil || states[2].State != CopyFilling {
		t.Errorf("%+v, %v", states, err)
	}
	j.together(true, 0, 1, 2)
	await(t, "the copy has caught up", func() bool {
		states, err := States(j.store)
		return err == nil && states[2].State == CopyHere
	})
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

// Copies agree only if they have the same entries in the same term, all of them applied.
func TestAgree(t *testing.T) {
	t.Parallel()
	at := position{term: 3, lastTerm: 3, last: 9, committed: 9, applied: 9}
	changed := func(change func(*position)) position {
		p := at
		change(&p)
		return p
	}
	of := func(p position) map[string]position { return map[string]position{"meta": at, "log": p} }
	for name, c := range map[string]struct {
		a, b map[string]position
		want bool
	}{
		"same":                      {of(at), of(at), true},
		"no group":                  {nil, nil, false},
		"one without a leader":      {of(at), nil, false},
		"a group is missing":        {of(at), map[string]position{"meta": at}, false},
		"another group":             {of(at), map[string]position{"meta": at, "other": at}, false},
		"one is behind":             {of(at), of(changed(func(p *position) { p.last, p.committed, p.applied = 8, 8, 8 })), false},
		"another term":              {of(at), of(changed(func(p *position) { p.term = 2 })), false},
		"other entries":             {of(at), of(changed(func(p *position) { p.lastTerm = 2 })), false},
		"both have not committed":   {of(changed(func(p *position) { p.committed = 8 })), of(changed(func(p *position) { p.committed = 8 })), false},
		"both have not yet applied": {of(changed(func(p *position) { p.applied = 8 })), of(changed(func(p *position) { p.applied = 8 })), false},
	} {
		if got := agree([]map[string]position{c.a, c.b}); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}
