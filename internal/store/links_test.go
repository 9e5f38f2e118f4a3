package store

import (
	"bytes"
	"errors"
	"io/fs"
	"log/slog"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/store/collection"
	"github.com/ckptstore/ckptstore/internal/store/space"
)

func noise(n int) []byte {
	data := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{}).Read(data)
	return data
}

// linkable makes a store with a checkpoint, a blob, an archive and output, and closes it.
func linkable(t *testing.T) (dir string, blob events.Blob) {
	t.Helper()
	dir = made(t)
	s := open(t, dir)
	committed(t, s, "run", 1)
	blob, err := s.Blobs.Put(t.Context(), noise(events.MaxInline+1))
	if err != nil {
		t.Fatal(err)
	}
	shut(t, s)
	write(t, filepath.Join(dir, "logs", "run", "job", "a1-r0.out"), "")
	if err := os.MkdirAll(archiveDir(dir), 0o700); err != nil {
		t.Fatal(err)
	}
	return dir, blob
}

// moveAway moves a path out of the store and puts a link in its place, through which everything
// would work.
func moveAway(t *testing.T, path string) (away string) {
	t.Helper()
	away = filepath.Join(t.TempDir(), "away")
	if err := errors.Join(os.Rename(path, away), os.Symlink(away, path)); err != nil {
		t.Fatal(err)
	}
	return away
}

// within20s fails the test if do has not ended by then: it waits for a pipe.
func within20s(t *testing.T, what string, do func() error) error {
	t.Helper()
	ended := make(chan error, 1)
	go func() { ended <- do() }()
	select {
	case err := <-ended:
		return err
	case <-time.After(20 * time.Second):
		t.Fatalf("%s waits", what)
		return nil
	}
}

// opened opens and closes a store.
func opened(t *testing.T, dir string) (said string, err error) {
	t.Helper()
	var text bytes.Buffer
	err = within20s(t, "opening the store", func() error {
		s, err := Open(t.Context(), Options{Location: dir, Logger: slog.New(slog.NewTextHandler(&text, &slog.HandlerOptions{Level: slog.LevelWarn}))})
		if err == nil {
			err = s.Close()
		}
		return err
	})
	return text.String(), err
}

// TestLinksOfTheStore: a store whose identity, lock or log is behind a symbolic link or is a pipe
// does not open, and the error names the path.
func TestLinksOfTheStore(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"store.json", lockName, "log", "log/jetstream", "log/sealed", endName} {
		for _, pipe := range []bool{false, true} {
			t.Run(strings.ReplaceAll(name, "/", "-"), func(t *testing.T) {
				t.Parallel()
				dir, _ := linkable(t)
				path := filepath.Join(dir, name)
				away := moveAway(t, path)
				if pipe {
					if err := errors.Join(os.Remove(path), unix.Mkfifo(path, 0o600)); err != nil {
						t.Fatal(err)
					}
				}
				before := snapshot(t, away)
				_, err := opened(t, dir)
				var is *beneath.TypeError
				if !errors.As(err, &is) || is.Path != path || is.Link() == pipe || !errors.Is(err, fs.ErrPermission) {
					t.Errorf("opened with %s: %v", path, err)
				}
				if after := snapshot(t, away); !maps.Equal(before, after) {
					t.Errorf("behind the link there is %d files, there were %d, or others", len(after), len(before))
				}
			})
		}
	}
}

// TestLinkedViews: views behind a link are neither read nor written. The store opens with views in
// memory and logs the reason.
func TestLinkedViews(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"views", "views/LINK"} {
		dir, _ := linkable(t)
		away := filepath.Join(dir, "views")
		path := filepath.Join(dir, name)
		if name == "views" {
			away = moveAway(t, path)
		} else if err := os.Symlink(t.TempDir(), path); err != nil {
			t.Fatal(err)
		}
		before := viewFiles(t, away)
		said, err := opened(t, dir)
		if err != nil || !strings.Contains(said, "views kept in memory") || !strings.Contains(said, path+" is a symbolic link") {
			t.Errorf("%s: %v; logged %s", name, err, said)
		}
		if after := viewFiles(t, away); before != after {
			t.Errorf("%s: the views had %s, and have %s", name, before, after)
		}
	}
}

// viewFiles are the names in a directory.
func viewFiles(t *testing.T, dir string) string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return strings.Join(names, " ")
}

// TestLinksOfData: a store whose data is behind links opens, and nothing behind them is read,
// repaired or collected.
func TestLinksOfData(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"data/run", "data/run/main", "data/run/main/step-1.a1", "blobs", "blobs/BB"} {
		t.Run(strings.ReplaceAll(name, "/", "-"), func(t *testing.T) {
			t.Parallel()
			dir, blob := linkable(t)
			path := filepath.Join(dir, strings.Replace(name, "BB", blob.Digest[:2], 1))
			away := moveAway(t, path)
			before := snapshot(t, away)
			s := open(t, dir)
			_, err := s.Blobs.Get(t.Context(), blob)
			if strings.HasPrefix(name, "blobs") {
				_, put := s.Blobs.Put(t.Context(), noise(events.MaxInline+1))
				for what, err := range map[string]error{"read": err, "written": put} {
					if !errors.As(err, new(*beneath.TypeError)) || !strings.Contains(err.Error(), path+" is a symbolic link") {
						t.Errorf("a blob was %s: %v", what, err)
					}
				}
			} else {
				reports, err := s.VerifyAll(t.Context(), slices.Collect(maps.Values(listedCommitted(t, s))), VerifyOptions{})
				if err != nil || len(reports) != 1 || reports[0].Clean() || !strings.Contains(reports[0].Findings[0].Problem, path+" is a symbolic link") {
					t.Errorf("verified: %+v, %v", reports, err)
				}
				if _, err := collection.MeasureFiles(t.Context(), s.Data, refOf("run", "step-1.a1")); err == nil && name != "data/run/main/step-1.a1" {
					t.Error("measured")
				}
			}
			to := filepath.Join(t.TempDir(), "backup")
			if b, err := s.Backup(t.Context(), to, BackupOptions{}); err == nil && len(b.Incomplete) == 0 || err != nil && !errors.As(err, new(*beneath.TypeError)) {
				t.Errorf("backed up: %+v, %v", b, err)
			}
			shut(t, s)
			if after := snapshot(t, away); !maps.Equal(before, after) {
				t.Errorf("files behind the link have changed")
			}
		})
	}
}

// TestAbortedSaveIsALink: opening a store removes a link in the place of an aborted save, or deep in
// its leftovers, and nothing behind the link.
func TestAbortedSaveIsALink(t *testing.T) {
	t.Parallel()
	dir := made(t)
	s := open(t, dir)
	must(t, s, "run", begun("step-1"), events.CheckpointAborted{Attempt: 1, Checkpoint: "step-1.a1", Reason: "test"},
		begun("step-2"), events.CheckpointAborted{Attempt: 1, Checkpoint: "step-2.a1", Reason: "test"})
	shut(t, s)
	away := t.TempDir()
	write(t, filepath.Join(away, "thesis.tex"), "thesis")
	write(t, filepath.Join(away, "sub", "id_rsa"), "key")
	before := snapshot(t, away)
	one, two := filepath.Join(s.Data.Dir(), refOf("run", "step-1.a1").String()), filepath.Join(s.Data.Dir(), refOf("run", "step-2.a1").String())
	if err := errors.Join(os.MkdirAll(two, 0o700), os.Symlink(away, one), os.Symlink(away, filepath.Join(two, "sub"))); err != nil {
		t.Fatal(err)
	}
	if said, err := opened(t, dir); err != nil {
		t.Error(said, err)
	}
	for _, path := range []string{one, two} {
		if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is still there: %v", path, err)
		}
	}
	if !maps.Equal(before, snapshot(t, away)) {
		t.Error("files behind a link were removed")
	}
}

// TestPlantedBallast: a link in the place of a new file is not written through.
func TestPlantedBallast(t *testing.T) {
	t.Parallel()
	dir := made(t)
	precious := filepath.Join(t.TempDir(), "precious")
	write(t, precious, "precious")
	if err := os.Symlink(precious, filepath.Join(dir, ".tmp-"+space.BallastName)); err != nil {
		t.Fatal(err)
	}
	s := open(t, dir)
	eventually(t, "the owner has made its ballast", func() bool { return exists(filepath.Join(dir, space.BallastName)) })
	shut(t, s)
	if got := read(t, precious); got != "precious" {
		t.Errorf("%d bytes were written through a link", len(got))
	}
}

// TestEvidenceOfPipes: a pipe among the copies of damaged logs does not block.
func TestEvidenceOfPipes(t *testing.T) {
	t.Parallel()
	dir, _ := linkable(t)
	kept := filepath.Join(dir, damagedName)
	if err := errors.Join(os.MkdirAll(filepath.Join(kept, "msgs"), 0o700), unix.Mkfifo(filepath.Join(kept, "msgs", "1.blk"), 0o600),
		unix.Mkfifo(filepath.Join(kept, notKeptName), 0o600)); err != nil {
		t.Fatal(err)
	}
	said, err := opened(t, dir)
	if err != nil || !strings.Contains(said, "1.blk is not a regular file") {
		t.Errorf("%v; logged %s", err, said)
	}
}

// TestRestoreOfLinks: links in a backup are not followed out of it.
func TestRestoreOfLinks(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"data/run", "data/run/main", "blobs", "logs", "logs/run", "log", "log/sealed", "data/run/main/step-1.a1"} {
		t.Run(strings.ReplaceAll(name, "/", "-"), func(t *testing.T) {
			t.Parallel()
			dir, _ := linkable(t)
			s := open(t, dir)
			backup := filepath.Join(t.TempDir(), "backup")
			if _, err := s.Backup(t.Context(), backup, BackupOptions{}); err != nil {
				t.Fatal(err)
			}
			shut(t, s)
			path := filepath.Join(backup, name)
			away := moveAway(t, path)
			before := snapshot(t, away)
			to := filepath.Join(t.TempDir(), "restored")
			out, err := Restore(t.Context(), RestoreOptions{Backup: backup, Location: to})
			if !errors.As(err, new(*beneath.TypeError)) || !strings.Contains(err.Error(), path+" is a symbolic link") {
				t.Errorf("restored %+v, %v", out, err)
			}
			if _, err := os.Stat(filepath.Join(to, "store.json")); err == nil {
				t.Error("there is a store")
			}
			if !maps.Equal(before, snapshot(t, away)) {
				t.Error("files behind the link have changed")
			}
		})
	}
}
