package store

import (
	"context"
	"encoding/json"
	"iter"
	"os"
	"path/filepath"
	"testing"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/durable"
	"github.com/ckptstore/ckptstore/projections/viewdb"
)

// altered is a log in which one event differs, which makes wrong views.
type altered struct{ *jetlog.Log }

func (l altered) Read(ctx context.Context, from, until uint64) iter.Seq2[events.Recorded, error] {
	return func(yield func(events.Recorded, error) bool) {
		for r, err := range l.Log.Read(ctx, from, until) {
			if r.Sequence == 2 {
				r.Data = json.RawMessage(`{"job":"J","host":"another"}`)
			}
			if !yield(r, err) {
				return
			}
		}
	}
}

// Views that do not follow from the log are detected, also by a process that does not own the store,
// and a rebuild replaces them.
func TestWrongViewsAreFoundAndReplaced(t *testing.T) {
	ctx := t.Context()
	dir := shortDir(t, "store")
	id, err := Init(ctx, dir, "")
	if err != nil {
		t.Fatal(err)
	}
	within := func(do func(*Store)) {
		t.Helper()
		s, err := Open(ctx, Options{Location: dir})
		if err != nil {
			t.Fatal(err)
		}
		do(s)
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	wrong := filepath.Join(filepath.Dir(dir), "wrong")
	within(func(s *Store) {
		fact, err := events.NewFact(Stamp("test"), events.Scope{Run: "a", Actor: events.Node(0)}, &events.JobStarted{Job: "J", Host: "one"})
		if err == nil {
			_, err = s.Log.Append(ctx, fact)
		}
		if err != nil {
			t.Fatal(err)
		}
		db, err := viewdb.Open(wrong, viewdb.Options{Store: id})
		if err != nil {
			t.Fatal(err)
		}
		if err := db.CatchUp(ctx, altered{s.Log}); err != nil {
			t.Fatal(err)
		}
		if err := db.Close(); err != nil {
			t.Fatal(err)
		}
	})
	verify := func(want bool) {
		t.Helper()
		within(func(s *Store) {
			out, err := s.VerifyViews(ctx)
			if err != nil || out.Equal != want || out.Sequence != 2 || (out.Had == out.Digest) != want {
				t.Errorf("verified %+v (%v), want equal %v at 2", out, err, want)
			}
			read, found, err := s.LastFullRead()
			if err != nil || !found || read.Sequence != 2 {
				t.Errorf("the log was last read to %+v (%v, %v)", read, found, err)
			}
		})
	}
	verify(true)
	views := filepath.Join(dir, "views")
	if err := os.RemoveAll(views); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(wrong, views); err != nil {
		t.Fatal(err)
	}
	verify(false)
	for _, want := range []bool{false, true} {
		out, err := RebuildViews(ctx, Options{Location: dir})
		if err != nil || out.Equal != want || out.Had == "" || out.Problem != "" {
			t.Errorf("rebuilt %+v (%v), want equal %v", out, err, want)
		}
	}
	verify(true)
	left, err := filepath.Glob(filepath.Join(dir, durable.TempPrefix+"*"))
	if err != nil || len(left) != 0 {
		t.Errorf("left behind: %v (%v)", left, err)
	}
}
