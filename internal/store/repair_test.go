package store

import (
	"bytes"
	"errors"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/query"
)

const strange = "run with/odd.name %"

// TestRepairReceipts: opening the store writes the receipts of committed checkpoints, byte for byte
// as their writer would have.
func TestRepairReceipts(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(t *testing.T, path string){
		"missing":   func(t *testing.T, path string) { remove(t, path, "") },
		"empty":     func(t *testing.T, path string) { write(t, path, "") },
		"truncated": func(t *testing.T, path string) { write(t, path, read(t, path)[:100]) },
		"a flipped bit": func(t *testing.T, path string) {
			text := []byte(read(t, path))
			text[40] ^= 1
			write(t, path, string(text))
		},
		"half written": func(t *testing.T, path string) {
			write(t, path+".tmp", "{")
			remove(t, path, "")
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := made(t)
			s := open(t, dir)
			whole := committed(t, s, strange, 1)
			spoiled := committed(t, s, strange, 2)
			want := read(t, filepath.Join(spoiled, checkpoint.ReceiptFile))
			other := read(t, filepath.Join(whole, checkpoint.ReceiptFile))
			shut(t, s)
			spoil(t, filepath.Join(spoiled, checkpoint.ReceiptFile))
			if list := listed(t, dir); list != "step-1.a1" {
				t.Fatalf("without the receipt it lists %s", list)
			}
			// A takeover repairs as well.
			shut(t, open(t, dir))
			if got := read(t, filepath.Join(spoiled, checkpoint.ReceiptFile)); got != want {
				t.Errorf("repaired to\n%s, want\n%s", got, want)
			}
			if got := read(t, filepath.Join(whole, checkpoint.ReceiptFile)); got != other {
				t.Errorf("the whole one became\n%s", got)
			}
			if list := listed(t, dir); list != "step-1.a1step-2.a1" {
				t.Errorf("it lists %s", list)
			}
		})
	}
}

func listed(t *testing.T, dir string) string {
	t.Helper()
	ids, err := list(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	return ids
}

// TestUnrepairable: a checkpoint that cannot be repaired is logged and does not affect the others.
func TestUnrepairable(t *testing.T) {
	t.Parallel()
	dir := made(t)
	s := open(t, dir)
	lost := committed(t, s, "run", 1)
	mendable := filepath.Join(committed(t, s, "run", 2), checkpoint.ReceiptFile)
	moved := committed(t, s, "run", 3)
	shut(t, s)
	remove(t, lost, "")
	remove(t, mendable, "")
	manifests, err := filepath.Glob(filepath.Join(moved, "manifest-*"))
	if err != nil || len(manifests) != 1 {
		t.Fatal(manifests, err)
	}
	write(t, manifests[0], "garbage")
	remove(t, moved, checkpoint.ReceiptFile)

	var said bytes.Buffer
	s, err = Open(t.Context(), Options{Location: dir, Logger: slog.New(slog.NewTextHandler(&said, &slog.HandlerOptions{Level: slog.LevelWarn}))})
	if err != nil {
		t.Fatal(err)
	}
	shut(t, s)
	if list := listed(t, dir); list != "step-2.a1" {
		t.Errorf("it lists %s", list)
	}
	for _, id := range []string{"run@step-1.a1", "run@step-3.a1", "ckptstore verify"} {
		if !strings.Contains(said.String(), id) {
			t.Errorf("nothing is logged about %s:\n%s", id, said.String())
		}
	}
	if strings.Contains(said.String(), "step-2") {
		t.Errorf("logged about a repaired checkpoint:\n%s", said.String())
	}
	if _, err := os.Stat(lost); err == nil {
		t.Error("a checkpoint's directory was made for a receipt alone")
	}
}

// TestSweep removes aborted and deleted checkpoints, and nothing else.
func TestSweep(t *testing.T) {
	t.Parallel()
	dir := made(t)
	s := open(t, dir)
	kept := committed(t, s, "run", 1)
	deleted := committed(t, s, "run", 2)
	_, aborted := written(t, s, "run", 3)
	_, going := written(t, s, "run", 4)
	// It has a manifest, but no commit.
	w, m := written(t, s, "run", 5)
	if _, err := w.Finish(t.Context(), m, refuse); err == nil {
		t.Fatal("committed without the log")
	}
	_, taken := written(t, s, "run", 6)
	must(t, s, "run",
		events.CheckpointAborted{Attempt: 1, Checkpoint: taken.Checkpoint, Reason: "test"},
		events.CheckpointDeleted{Checkpoint: "step-2.a1", Reason: "test"},
		events.CheckpointAborted{Attempt: 1, Checkpoint: aborted.Checkpoint, Reason: "test"})
	before := snapshot(t, filepath.Join(dir, "data"))
	shut(t, s)
	if !maps.Equal(before, snapshot(t, filepath.Join(dir, "data"))) {
		t.Error("files changed while the store was closed")
	}

	// A copy under another name, and one of a run that the log does not know, with intact
	// receipts; the same without receipts, as made by a user who copies only the data; and one in
	// the place of an aborted save.
	for to, bare := range map[string]bool{
		"run/main/copy": false, "elsewhere/main/step-1.a1": false,
		"run/main/bare": true, "elsewhere/main/step-2.a1": true, refOf("run", taken.Checkpoint).String(): true,
	} {
		to = filepath.Join(dir, "data", to)
		if err := errors.Join(os.RemoveAll(to), os.CopyFS(to, os.DirFS(kept))); err != nil {
			t.Fatal(err)
		}
		if bare {
			remove(t, to, checkpoint.ReceiptFile)
		}
	}
	write(t, filepath.Join(dir, "data", "run", "main", "step-9.a1", "notes.txt"), "mine")
	write(t, filepath.Join(dir, "data", "notes.txt"), "mine")
	expected := snapshot(t, filepath.Join(dir, "data"))
	for path := range expected {
		if strings.HasPrefix(path, deleted) || strings.Contains(path, refOf("run", aborted.Checkpoint).String()) {
			delete(expected, path)
		}
	}
	s = open(t, dir)
	got := snapshot(t, filepath.Join(dir, "data"))
	if !maps.Equal(got, expected) {
		for path := range got {
			if _, ok := expected[path]; !ok {
				t.Errorf("%s is left", path)
			}
			delete(expected, path)
		}
		for path := range expected {
			t.Errorf("%s was removed or changed", path)
		}
	}
	rows := ask(t, s, query.Checkpoints, query.Params{Run: "run"})
	if len(rows) != 1 || rows[0].ID != "step-1.a1" {
		t.Errorf("it lists %+v", rows)
	}
	if open := ask(t, s, query.OpenCheckpoints, query.Params{Run: "run", Trial: trialName}); len(open) != 2 || open[1].ID != going.Checkpoint {
		t.Errorf("open are %+v", open)
	}
}

// TestRepairAtTakeover: the next owner of the store repairs it too.
func TestRepairAtTakeover(t *testing.T) {
	t.Parallel()
	dir := made(t)
	owner := actors(t, dir, 1)[0]
	s := open(t, dir)
	receipt := filepath.Join(committed(t, s, "run", 1), checkpoint.ReceiptFile)
	want := read(t, receipt)
	remove(t, receipt, "")
	owner.kill()
	eventually(t, "it owns the store", s.Owns)
	if got := read(t, receipt); got != want {
		t.Errorf("repaired to %s", got)
	}
}
