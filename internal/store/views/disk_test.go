package views

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// TestPatience: an owner learns of a failure of the views for as long as their directory is
// left alone, and only from a file.
func TestPatience(t *testing.T) {
	t.Parallel()
	store, now := t.TempDir(), time.Now()
	o := Options{Dir: filepath.Join(store, "views"), Logger: slog.New(slog.DiscardHandler)}
	want := func(what string, at time.Time, want time.Duration) {
		t.Helper()
		if got := patienceOf(store, at); got != want {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
	want("no file", now, 0)
	o.noteFailed(errors.New("the disk does not answer"))
	now = time.Now()
	want("a new file", now.Add(time.Second), shortPatience)
	want("an old one", now.Add(Retry+time.Minute), 0)
	want("one of the future", now.Add(-time.Hour), 0)
	o.noteWorks()
	want("removed", now, 0)
	if err := os.Symlink(os.Args[0], filepath.Join(store, failedName)); err != nil {
		t.Fatal(err)
	}
	want("a link", now, 0)
	other := t.TempDir()
	reader := Options{Dir: filepath.Join(other, "views"), ReadOnly: true, Logger: o.Logger}
	reader.noteFailed(errors.New("the disk is full"))
	if left, err := os.ReadDir(other); err != nil || len(left) > 0 {
		t.Errorf("a reader wrote %v, %v", left, err)
	}
}
