package store

import (
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store/space"
)

// TestReaderChangesNothing opens a store with work left by a crash, for reading and as its owner.
// Nothing changes and nothing can be appended, and the next process that is not a reader does the
// work.
func TestReaderChangesNothing(t *testing.T) {
	t.Parallel()
	dir := made(t)
	s := open(t, dir)
	receipt := filepath.Join(committed(t, s, "run", 1), checkpoint.ReceiptFile)
	deleted := committed(t, s, "run", 2)
	_, aborted := written(t, s, "run", 3)
	must(t, s, "run",
		events.CheckpointDeleted{Checkpoint: "step-2.a1", Reason: "test"},
		events.CheckpointAborted{Attempt: 1, Checkpoint: aborted.Checkpoint, Reason: "test"})
	shut(t, s)
	remove(t, receipt, "")
	remove(t, dir, readName, space.BallastName)
	// Everything except the files of the log's server and of the views.
	seen := func() map[string]string {
		files := snapshot(t, dir)
		maps.DeleteFunc(files, func(path, _ string) bool {
			return strings.HasPrefix(path, filepath.Join(dir, "log")+"/jetstream") || strings.HasPrefix(path, filepath.Join(dir, "views"))
		})
		return files
	}
	before := seen()

	r, err := Open(t.Context(), Options{Location: dir, Reader: true})
	if err != nil {
		t.Fatal(err)
	}
	if !r.Owns() {
		t.Fatal("it does not own the store: nothing is shown")
	}
	list := ask(t, r, query.Checkpoints, query.Params{Run: "run"})
	if len(list) != 1 {
		t.Errorf("it lists %v", list)
	}
	if _, err := r.VerifyLog(t.Context(), nil); err != nil {
		t.Error(err)
	}
	reports, err := r.VerifyAll(t.Context(), list, VerifyOptions{})
	if err != nil || len(reports) != 1 || len(reports[0].Findings) > 0 {
		t.Errorf("it finds %v, %v", reports, err)
	}
	fact, err := metrics("m", "run", 1)
	if err != nil {
		t.Fatal(err)
	}
	_, err = r.Log.Append(t.Context(), fact)
	wrong(t, err, errReading)
	_, err = decide(t.Context(), r, "run", events.CheckpointPinned{Checkpoint: "step-1.a1"})
	wrong(t, err, errReading)
	_, err = r.Log.Lease(t.Context(), "run.run", []byte("{}"), time.Minute)
	wrong(t, err, errReading)
	shut(t, r)
	for path, text := range seen() {
		if old, was := before[path]; !was {
			t.Errorf("%s was made", path)
		} else if old != text {
			t.Errorf("%s was changed", path)
		}
		delete(before, path)
	}
	for path := range before {
		t.Errorf("%s was removed", path)
	}

	shut(t, open(t, dir))
	if _, err := os.Stat(receipt); err != nil {
		t.Errorf("the next owner has not written the receipt: %v", err)
	}
	for _, path := range []string{deleted, filepath.Join(dir, "data", refOf("run", aborted.Checkpoint).String())} {
		if _, err := os.Stat(path); err == nil {
			t.Errorf("the next owner has left %s", path)
		}
	}
}
