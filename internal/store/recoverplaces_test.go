package store

import (
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestRecoverFromRefuses: recovery makes no second store of a store that is not lost, and no store
// in a place that belongs to it. It changes neither.
func TestRecoverFromRefuses(t *testing.T) {
	t.Parallel()
	dir, _ := ruined(t)
	beside := filepath.Join(filepath.Dir(dir), "new")
	before := snapshot(t, dir)
	refuses := func(o RecoverOptions, is error, parts ...string) {
		t.Helper()
		_, err := Recover(t.Context(), o)
		wrong(t, err, is, parts...)
		if left, err := os.ReadDir(beside); err == nil && len(left) > 0 {
			t.Errorf("%v is left in %s", left, beside)
		}
	}
	refuses(RecoverOptions{Location: beside, From: dir}, ErrExists, "its log opens", "verify --log", "move log/ away")
	refuses(RecoverOptions{Location: filepath.Join(dir, "sub", "sub"), From: dir}, ErrLocation, "overlap")
	refuses(RecoverOptions{Location: filepath.Dir(dir), From: dir}, ErrLocation, "overlap")
	link := filepath.Join(filepath.Dir(dir), "link")
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	refuses(RecoverOptions{Location: filepath.Join(link, "sub"), From: dir}, ErrLocation, "overlap")
	refuses(RecoverOptions{Location: link, From: dir}, ErrLocation, "in place")
	if !maps.Equal(before, snapshot(t, dir)) {
		t.Error("the store was changed")
	}
	owner := open(t, dir)
	refuses(RecoverOptions{Location: beside, From: dir}, ErrLocked, "in use is not lost")
	if err := os.Remove(filepath.Join(dir, lockName)); err != nil {
		t.Fatal(err)
	}
	refuses(RecoverOptions{Location: beside, From: dir}, ErrLocked, "in use is not lost")
	shut(t, owner)
}

// TestRecoverFromRolledBack: a log that lacks a receipt's event counts as lost, as on open.
func TestRecoverFromRolledBack(t *testing.T) {
	t.Parallel()
	dir := made(t)
	early := snapshot(t, filepath.Join(dir, "log"))
	s := open(t, dir)
	committed(t, s, "a", 1)
	shut(t, s)
	remove(t, dir, "log", "views")
	put(t, filepath.Join(dir, "log"), early)
	before := snapshot(t, dir)
	r, err := Recover(t.Context(), RecoverOptions{Location: filepath.Join(filepath.Dir(dir), "new"), From: dir})
	if err != nil || len(r.Checkpoints) != 1 {
		t.Errorf("%+v %v", r, err)
	}
	if !maps.Equal(before, snapshot(t, dir)) {
		t.Error("what it was made from was changed")
	}
}

// TestRecoverKeepsPasswords: errors about a URL, which may get into logs, omit its password.
func TestRecoverKeepsPasswords(t *testing.T) {
	t.Parallel()
	_, err := Recover(t.Context(), RecoverOptions{Location: filepath.Join(t.TempDir(), "x"), From: "s3://u:HUSH@127.0.0.1:1"})
	if wrong(t, err, ErrLocation, "a URL holds no secrets"); strings.Contains(err.Error(), "HUSH") {
		t.Error(err)
	}
	for _, o := range []RecoverOptions{
		{Location: filepath.Join(t.TempDir(), "x"), From: "nats://u:SECRET@127.0.0.1:1"},
		{Location: "nats://u:SECRET@127.0.0.1:1", From: t.TempDir()},
		{Location: "s3://u:SECRET@127.0.0.1:1"},
	} {
		_, err := Recover(t.Context(), o)
		wrong(t, err, ErrLocation, "127.0.0.1")
		if strings.Contains(err.Error(), "SECRET") || strings.Contains(err.Error(), "recover :") {
			t.Error(err)
		}
	}
}

// TestRecoverLeavesCopies: a store whose log has three copies is not lost because it has no
// store.json. Recovery makes no second log for its checkpoints, in place or elsewhere.
func TestRecoverLeavesCopies(t *testing.T) {
	t.Parallel()
	dir, _ := ruined(t)
	remove(t, dir, "store.json", "log", "views")
	write(t, filepath.Join(dir, "join", "log", "secret.json"), "{}")
	before := snapshot(t, dir)
	elsewhere := filepath.Join(filepath.Dir(dir), "new")
	for _, o := range []RecoverOptions{{Location: dir}, {Location: elsewhere, From: dir}} {
		_, err := Recover(t.Context(), o)
		wrong(t, err, ErrExists, "log.0 to log.2", "ckptstore ls --store "+dir, "--log-replicas 3")
	}
	if !maps.Equal(before, snapshot(t, dir)) {
		t.Error("the store was changed")
	}
	_, err := readIdentity(dir)
	if wrong(t, err, ErrNoStore, "log.0 to log.2"); strings.Contains(err.Error(), "recover") {
		t.Error(err)
	}
}
