package logpeers

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// The directory of a copy belongs to one copy of one log. That of another log, of another
// copy, or of something else is refused.
func TestCopyIdentity(t *testing.T) {
	t.Parallel()
	ours, err := newSecret(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	theirs, err := newSecret(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	hold := func(dir string, id copyID, formed bool) error {
		h, err := holdCopy(t.Context(), dir, id, formed, time.Minute, quiet)
		if err == nil {
			err = h.release()
		}
		return err
	}
	dir := filepath.Join(t.TempDir(), "copy")
	for range 2 { // the second job forms the log after the first did not
		if err := hold(dir, ours.copy(1), false); err != nil {
			t.Fatal(err)
		}
	}
	if err := hold(dir, ours.copy(1), true); !errors.Is(err, ErrCopyLost) {
		t.Errorf("an empty copy: %v", err)
	}
	if err := os.Mkdir(filepath.Join(dir, "jetstream"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := hold(dir, ours.copy(1), true); err != nil {
		t.Error(err)
	}
	other := t.TempDir()
	if err := os.Mkdir(filepath.Join(other, "jetstream"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		dir  string
		id   copyID
		want string
	}{
		{dir, theirs.copy(1), "another store's log"},
		{dir, ours.copy(0), "copy 1 of this log"},
		{other, ours.copy(1), "no copy.json"},
	} {
		for _, formed := range []bool{false, true} {
			if err := hold(c.dir, c.id, formed); !errors.Is(err, ErrForeignCopy) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("formed %v, want %q: %v", formed, c.want, err)
			}
		}
	}
	if _, err := os.Stat(filepath.Join(other, copyName)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the directory was changed: %v", err)
	}
}

// The secret of a copied store leads nowhere: the servers of the original would let in who
// shows it. A renamed store keeps its log.
func TestCopiedStore(t *testing.T) {
	t.Parallel()
	store := filepath.Join(t.TempDir(), "store")
	if err := os.MkdirAll(joinDir(store), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := sharedSecret(store); err != nil {
		t.Fatal(err)
	}
	moved := store + "-moved"
	if err := os.Rename(store, moved); err != nil {
		t.Fatal(err)
	}
	if _, err := readSecret(moved); err != nil {
		t.Errorf("after a rename: %v", err)
	}
	twin := store + "-twin"
	if err := os.CopyFS(twin, os.DirFS(moved)); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(secretPath(twin), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Find(t.Context(), twin); !errors.Is(err, ErrCopied) {
		t.Errorf("found: %v", err)
	}
	if _, _, err := Serve(t.Context(), twin, time.Minute, quiet); !errors.Is(err, ErrCopied) {
		t.Errorf("served: %v", err)
	}
	if _, _, err := Join(t.Context(), config(twin, 0)); !errors.Is(err, ErrCopied) || !strings.Contains(err.Error(), "ckptstore recover --store "+twin) {
		t.Errorf("joined: %v", err)
	}
}
