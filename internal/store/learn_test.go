package store

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events/jetlog"
	launched "github.com/ckptstore/ckptstore/internal/launch/process"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/projections"
)

// TestOwnerLearns adopts a checkpoint of PyTorch and waits until the owner of
// the store has recorded its digests.
func TestOwnerLearns(t *testing.T) {
	dir := shortDir(t, "s")
	if _, err := Init(t.Context(), dir, ""); err != nil {
		t.Fatal(err)
	}
	s, err := Open(t.Context(), Options{Location: dir})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	saved := filepath.Join(t.TempDir(), "saved")
	if err := os.CopyFS(saved, os.DirFS(filepath.Join("..", "format", "dcp", "testdata", "torch-2.14", "mesh2x2"))); err != nil {
		t.Fatal(err)
	}
	from, err := OpenForeign(t.Context(), saved)
	if err != nil {
		t.Fatal(err)
	}
	_, err = session.Import(t.Context(), session.ImportConfig{
		Run: "r", Trial: projections.DefaultTrial, Job: NewID(), Step: 1, From: from, InPlace: true,
		Reap: launched.ReapEarlier, Logger: slog.New(slog.DiscardHandler), NewID: NewID,
	}, session.Store{
		ID: s.ID, Log: s.Log, Views: Queries{s.Views()}, Blobs: s.Blobs, Data: s.Data,
		Conflict: func(err error) bool { return errors.Is(err, jetlog.ErrConflict) },
	})
	if err != nil {
		t.Fatal(err)
	}
	l := startLearner(s, time.Millisecond)
	defer l.stop()
	deadline := time.After(limit)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		c, err := Queries{s.Views()}.Resolve(t.Context(), "r")
		if err != nil {
			t.Fatal(err)
		}
		if len(c.Attachments) == 4 {
			break
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("the owner has recorded only %v", c.Attachments)
		}
	}
	c, err := Queries{s.Views()}.Resolve(t.Context(), "r")
	if err != nil {
		t.Fatal(err)
	}
	if left, err := s.Data.Unlearned(t.Context(), RefOf(c)); err != nil || len(left) > 0 {
		t.Errorf("unlearned %v, %v", left, err)
	}
}
