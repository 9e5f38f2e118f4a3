package store

import (
	"encoding/json"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/query"
)

func TestOpenRefuses(t *testing.T) {
	t.Parallel()
	rewrite := func(change func(*identity)) func(*testing.T, string) {
		return func(t *testing.T, dir string) {
			path := filepath.Join(dir, "store.json")
			var id identity
			if err := json.Unmarshal([]byte(read(t, path)), &id); err != nil {
				t.Fatal(err)
			}
			change(&id)
			text, err := json.Marshal(id)
			if err != nil {
				t.Fatal(err)
			}
			write(t, path, string(text))
		}
	}
	text := func(s string) func(*testing.T, string) {
		return func(t *testing.T, dir string) { write(t, filepath.Join(dir, "store.json"), s) }
	}
	for _, c := range []struct {
		name  string
		spoil func(t *testing.T, dir string)
		is    error
		says  string
	}{
		{"no directory", func(t *testing.T, dir string) { remove(t, dir, ".", "") }, ErrNoStore, "ckptstore init"},
		{"no store", func(t *testing.T, dir string) { remove(t, dir, "store.json") }, ErrNoStore, "ckptstore init"},
		{"a foreign product", rewrite(func(id *identity) { id.Product = "restic" }), ErrForeign, `"restic"`},
		{"a newer format", rewrite(func(id *identity) { id.Format++ }), ErrNewer, "upgrade"},
		{"no format", rewrite(func(id *identity) { id.Format = 0 }), ErrDamaged, "backup"},
		{"no identity", rewrite(func(id *identity) { id.Store = "" }), ErrDamaged, "backup"},
		{"a short identity", rewrite(func(id *identity) { id.Store = "x" }), ErrDamaged, `"x"`},
		{"an identity with a path", rewrite(func(id *identity) { id.Store = strings.Repeat("../", 12) }), ErrDamaged, "../"},
		{"no JSON", text("{\"product\": "), ErrDamaged, "backup"},
		{"an empty file", text(""), ErrDamaged, "backup"},
		{"another store's identity", rewrite(func(id *identity) { id.Store = NewID() }), ErrForeign, "two stores"},
		{"another store's log", func(t *testing.T, dir string) {
			other := made(t)
			remove(t, dir, "log")
			if err := os.Rename(filepath.Join(other, "log"), filepath.Join(dir, "log")); err != nil {
				t.Fatal(err)
			}
		}, ErrForeign, "two stores"},
		{"no log", func(t *testing.T, dir string) { remove(t, dir, "log") }, ErrDamaged, "backup"},
		{"an empty log", func(t *testing.T, dir string) { remove(t, dir, "log/jetstream") }, ErrDamaged, "backup"},
		{"no file for the lock", func(t *testing.T, dir string) {
			remove(t, dir, lockName)
			if err := os.Mkdir(filepath.Join(dir, lockName), 0o700); err != nil {
				t.Fatal(err)
			}
		}, nil, lockName},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dir := made(t)
			shut(t, open(t, dir))
			c.spoil(t, dir)
			refused(t, Options{Location: dir}, c.is, dir, c.says)
			if _, err := os.Stat(filepath.Join(dir, "log")); c.name == "no log" && err == nil {
				t.Error("a log was made")
			}
			if f, err := tryLock(dir); err == nil && f == nil {
				t.Error("the lock is still held")
			} else if f != nil {
				f.Close()
			}
		})
	}
}

// TestViews deletes and damages views, which are rebuilt.
func TestViews(t *testing.T) {
	t.Parallel()
	dir := made(t)
	s := open(t, dir)
	committed(t, s, "run", 1)
	must(t, s, "other", begun("step-1"))
	want := digest(t, s)
	shut(t, s)

	views := filepath.Join(dir, "views")
	whole := snapshot(t, views)
	for path := range whole {
		name := filepath.Base(path)
		if strings.HasSuffix(path, "/") || strings.HasPrefix(name, "LOCK") || strings.HasPrefix(name, "marker.") {
			continue // these have no content
		}
		t.Run(name, func(t *testing.T) {
			put(t, views, whole)
			write(t, path, "garbage "+strings.Repeat("\xff\x00", 100))
			damagedViews(t, dir, want)
		})
	}
	t.Run("no directory", func(t *testing.T) {
		remove(t, dir, "views")
		write(t, views, "a file")
		damagedViews(t, dir, want)
	})
	t.Run("deleted", func(t *testing.T) {
		remove(t, dir, "views")
		s := open(t, dir)
		if got := digest(t, s); got != want {
			t.Errorf("digest %s, want %s", got, want)
		}
		shut(t, s)
	})
	t.Run("another store's", func(t *testing.T) {
		other := made(t)
		shut(t, open(t, other))
		remove(t, dir, "views")
		if err := os.Rename(filepath.Join(other, "views"), views); err != nil {
			t.Fatal(err)
		}
		refused(t, Options{Location: dir}, ErrDamaged, views, "delete")
	})
}

// damagedViews opens a store whose views are damaged in a file that may not be needed. If it is
// needed, the store keeps its views in memory and logs that.
func damagedViews(t *testing.T, dir, want string) {
	t.Helper()
	said := &lines{}
	s, err := Open(t.Context(), Options{Location: dir, Logger: slog.New(slog.NewTextHandler(said, nil))})
	if err != nil {
		t.Fatal(err)
	}
	defer shut(t, s)
	if got := digest(t, s); got != want {
		t.Errorf("digest %s, want %s", got, want)
	}
	if text := said.String(); text != "" && (!strings.Contains(text, "views kept in memory") || !strings.Contains(text, filepath.Join(dir, "views")) || !strings.Contains(text, "delete")) {
		t.Errorf("it logs %s", text)
	}
}

// TestRolledBackLog: views that are ahead of the log mean that the log has lost events.
func TestRolledBackLog(t *testing.T) {
	t.Parallel()
	dir := made(t)
	log := filepath.Join(dir, "log")
	early := snapshot(t, log)
	s := open(t, dir)
	must(t, s, "run", begun("step-1"))
	digest(t, s)
	shut(t, s)
	put(t, log, early)
	refused(t, Options{Location: dir}, ErrDamaged, "rolled back")
}

// TestReadOnly opens a store as a user with read permission only.
func TestReadOnly(t *testing.T) {
	t.Parallel()
	top := shortDir(t, "")
	t.Cleanup(func() { chmod(t, top, 0o700, 0o600) }) // to be removed
	dir := filepath.Join(top, "store")
	if _, err := Init(t.Context(), dir, ""); err != nil {
		t.Fatal(err)
	}
	s := open(t, dir)
	committed(t, s, "run", 1)
	shut(t, s)
	chmod(t, top, 0o555, 0o444)
	tmp := shortDir(t, "")
	if err := os.Chmod(tmp, 0o777); err != nil {
		t.Fatal(err)
	}
	before := snapshot(t, dir)

	p := start(t, "actor", "XDG_RUNTIME_DIR=", "TMPDIR="+tmp)
	if os.Getuid() == 0 { // root ignores modes
		p.do(request{Do: "become", Count: 65534})
	}
	got := p.try(request{Do: "open", Location: dir, Patience: time.Second})
	if !strings.Contains(got.Error, lockName+": permission denied") || !strings.Contains(got.Error, "--offline") {
		t.Errorf("open returns %+v", got)
	}
	if got := p.try(request{Do: "list", Location: dir}); got.Text != "step-1.a1" {
		t.Errorf("without the lock it lists %+v", got)
	}
	p.end()
	if after := snapshot(t, dir); len(after) != len(before) {
		t.Errorf("%d files became %d", len(before), len(after))
	}
}

func chmod(t *testing.T, top string, dirs, files fs.FileMode) {
	t.Helper()
	err := filepath.WalkDir(top, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if e.IsDir() {
			return os.Chmod(path, dirs)
		}
		return os.Chmod(path, files)
	})
	if err != nil {
		t.Error(err)
	}
}

func TestOpenData(t *testing.T) {
	t.Parallel()
	dir := made(t)
	s := open(t, dir)
	committed(t, s, "run", 1)
	// A manifest without a commit, and a directory that the log does not know.
	w, m := written(t, s, "run", 2)
	if _, err := w.Finish(t.Context(), m, refuse); err == nil {
		t.Fatal("committed without the log")
	}
	shut(t, s)
	remove(t, dir, "log", "views", "store.json", "blobs")
	root, err := OpenData(dir)
	if err != nil {
		t.Fatal(err)
	}
	receipts, damaged, err := root.Checkpoints(t.Context())
	if err != nil || len(damaged) > 0 || len(receipts) != 1 || receipts[0].Checkpoint != "step-1.a1" || receipts[0].Store != s.ID {
		t.Errorf("listed %+v, %+v, %v", receipts, damaged, err)
	}
	_, err = OpenData(filepath.Join(dir, "nothing"))
	wrong(t, err, ErrNoStore, "--store")
	_, err = OpenData("nats://127.0.0.1:1")
	wrong(t, err, nil, "directory")
}

// TestPatienceIsForOthers: the owner's own work may take longer than the patience.
func TestPatienceIsForOthers(t *testing.T) {
	t.Parallel()
	s, err := Open(t.Context(), Options{Location: made(t), Patience: 1})
	if err != nil {
		t.Fatal(err)
	}
	if !s.Owns() {
		t.Error("it is not the owner")
	}
	shut(t, s)
}

func TestClose(t *testing.T) {
	t.Parallel()
	dir := made(t)
	owner, second := open(t, dir), open(t, dir)
	// Simulate a deleted owner.json.
	remove(t, dir, cardName)
	for range 2 {
		shut(t, second)
		shut(t, owner)
	}
	for _, s := range []*Store{owner, second} {
		_, err := query.Ask(t.Context(), s.Views(), query.Runs, query.Params{})
		wrong(t, err, nil, "closed")
		_, err = s.Log.Last(t.Context())
		wrong(t, err, jetlog.ErrClosed)
		if s.Owns() {
			t.Error("a closed store is owned")
		}
	}
}
