package store

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/projections"
)

// A checkpoint with a damaged or missing manifest, and a receipt of an older version, for which the
// manifest is read, hides none of the others. A complete receipt needs no manifest.
func TestReceiptsOfDamaged(t *testing.T) {
	t.Parallel()
	dir := made(t)
	s := open(t, dir)
	for step := range 3 {
		committed(t, s, "run", int64(step+1))
	}
	shut(t, s)
	for step, damage := range map[string]func(string) error{
		"step-1.a1": os.Remove,
		"step-2.a1": func(path string) error { return os.WriteFile(path, []byte("else"), 0o600) },
	} {
		paths, err := filepath.Glob(filepath.Join(dir, "data", "run", "*", step, "manifest-*"))
		if err != nil || len(paths) != 1 {
			t.Fatal(paths, err)
		}
		if err := os.Chmod(paths[0], 0o600); err != nil {
			t.Fatal(err)
		}
		if err := damage(paths[0]); err != nil {
			t.Fatal(err)
		}
	}
	complete, err := OpenReceipts(dir, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if rows, err := complete.List(t.Context(), "run", false); err != nil || len(rows) != 3 || rows[0].WorldSize != 1 || rows[0].Bytes != 16 {
		t.Errorf("listed %+v, %v", rows, err)
	}
	for _, step := range []string{"step-1.a1", "step-2.a1"} {
		paths, err := filepath.Glob(filepath.Join(dir, "data", "run", "*", step, checkpoint.ReceiptFile))
		if err != nil || len(paths) != 1 {
			t.Fatal(paths, err)
		}
		older(t, paths[0])
	}
	var said strings.Builder
	r, err := OpenReceipts(dir, slog.New(slog.NewTextHandler(&said, nil)))
	if err != nil {
		t.Fatal(err)
	}
	for _, run := range []string{"", "run"} {
		rows, err := r.List(t.Context(), run, false)
		if err != nil || len(rows) != 1 || rows[0].ID != "step-3.a1" {
			t.Errorf("run %q: listed %+v, %v", run, rows, err)
		}
	}
	for _, id := range []string{"run@step-1.a1", "run@step-2.a1"} {
		if !strings.Contains(said.String(), id) {
			t.Errorf("nothing was logged about %s:\n%s", id, said.String())
		}
	}
	_, err = r.List(t.Context(), "other", false)
	wrong(t, err, projections.ErrNotFound, "receipt")
}

// older rewrites a receipt as older versions wrote it.
func older(t *testing.T, path string) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	r, err := checkpoint.DecodeReceipt(text)
	if err != nil {
		t.Fatal(err)
	}
	r.WorldSize, r.Bytes = 0, 0
	if text, err = checkpoint.EncodeReceipt(r); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Chmod(path, 0o600), os.WriteFile(path, text, 0o600)); err != nil {
		t.Fatal(err)
	}
}
