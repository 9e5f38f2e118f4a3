package store

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// TestViewsPatience: an owner learns of a failure of the views for as long as their directory is
// left alone, and only from a file.
func TestViewsPatience(t *testing.T) {
	t.Parallel()
	s := &Store{opts: Options{Logger: slog.New(slog.DiscardHandler)}}
	dir, now := t.TempDir(), time.Now()
	want := func(what string, at time.Time, want time.Duration) {
		t.Helper()
		if got := viewsPatience(dir, at); got != want {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
	want("no file", now, 0)
	s.noteViewsFailed(dir, errors.New("the disk does not answer"))
	want("a new file", now.Add(time.Second), shortPatience)
	want("an old one", now.Add(diskRetry+time.Minute), 0)
	want("one of the future", now.Add(-time.Hour), 0)
	s.noteViewsWork(dir)
	want("removed", now, 0)
	if err := os.Symlink(os.Args[0], filepath.Join(dir, viewsFailedName)); err != nil {
		t.Fatal(err)
	}
	want("a link", now, 0)
	reader := &Store{opts: Options{Logger: slog.New(slog.DiscardHandler), Reader: true}}
	other := t.TempDir()
	reader.noteViewsFailed(other, errors.New("the disk is full"))
	if left, err := os.ReadDir(other); err != nil || len(left) > 0 {
		t.Errorf("a reader wrote %v, %v", left, err)
	}
}
