package viewdb_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/projections/viewdb"
)

// deletedEnv is set in the process of [TestDeletedInUse]: a database that has
// failed keeps its goroutines, which no other test must find.
const deletedEnv = "CKPTSTORE_TEST_DELETED"

// TestDeletedInUse deletes a view's directory under it and folds on: the
// process lives, and whoever waits or asks gets an error.
func TestDeletedInUse(t *testing.T) {
	if os.Getenv(deletedEnv) == "" {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestDeletedInUse$")
		cmd.Env = append(os.Environ(), deletedEnv+"=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
		return
	}
	dir := filepath.Join(t.TempDir(), "views")
	db, err := viewdb.Open(dir, viewdb.Options{Store: storeID})
	if err != nil {
		t.Fatal(err)
	}
	src := newLog(story()...)
	stopped := make(chan error, 1)
	go func() { stopped <- db.Follow(t.Context(), src) }()
	await(t, db, 6)
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	// More than the database keeps in memory, so that it needs new files.
	at := uint64(6)
	for range 48 {
		at++
		src.append(event(at, lane, events.Metrics{Attempt: 1, Step: int64(at), Metrics: map[string]any{"x": strings.Repeat("y", 1<<20)}}))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	failed := func(what string, err error) {
		t.Helper()
		if !errors.Is(err, viewdb.ErrFailed) || !strings.Contains(err.Error(), "rebuilt when the store is next opened") {
			t.Errorf("%s: %v", what, err)
		}
	}
	failed("wait", db.Wait(ctx, at+1))
	failed("follow", <-stopped)
	failed("view", db.View(func(projections.Reader) error { return nil }))
	failed("catch up", db.CatchUp(t.Context(), src))
	failed("close", db.Close())
	if err := db.Close(); err != nil {
		t.Errorf("closed again: %v", err)
	}
	// Its directory is free for the next, here and now.
	again, err := viewdb.Open(dir, viewdb.Options{Store: storeID})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(again.CatchUp(t.Context(), src), again.Close()); err != nil || again.Cursor() != at {
		t.Errorf("opened again: at event %d, %v", again.Cursor(), err)
	}
}
