package store

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/store/trusted"
)

// TestOthersCanWrite makes each part of a store writable to others, or gives it to another user. The
// store is refused until that is undone.
func TestOthersCanWrite(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("run this test as root: it gives files to other users")
	}
	t.Setenv("XDG_CONFIG_HOME", t.TempDir())
	dir := filepath.Join(t.TempDir(), "store")
	if _, err := Init(t.Context(), dir, ""); err != nil {
		t.Fatal(err)
	}
	if err := open(t, dir).Close(); err != nil { // makes the views
		t.Fatal(err)
	}
	okay := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range append(slices.Clone(parts), viewsPart) {
		if name == runName { // of a shared store
			continue
		}
		path := filepath.Join(dir, name)
		info, err := os.Lstat(path)
		okay(err)
		undo := func() {
			okay(os.Chown(path, os.Geteuid(), os.Getegid()))
			okay(os.Chmod(path, info.Mode()))
		}
		for how, do := range map[string]func() error{
			"every user can write": func() error { return os.Chmod(path, info.Mode()|0o002) },
			"can write to":         func() error { return errors.Join(os.Chown(path, -1, 20002), os.Chmod(path, info.Mode()|0o020)) },
			"belongs to user":      func() error { return os.Chown(path, 20002, -1) },
		} {
			okay(do())
			_, err := Open(t.Context(), Options{Location: dir})
			if !errors.Is(err, ErrUntrusted) || !strings.Contains(err.Error(), how) || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "config trust") {
				t.Errorf("%s, %s: %v", name, how, err)
			}
			if why := ReadOnly(dir); !errors.Is(why, ErrUntrusted) {
				t.Errorf("%s, %s: it is read by receipts because of %v", name, how, why)
			}
			undo()
		}
	}
	okay(open(t, dir).Close())

	okay(os.Chmod(dir, 0o777))
	t.Setenv(trusted.Env, filepath.Join(dir, "elsewhere")+":"+filepath.Join(dir, "store.json", "no")+":"+dir)
	okay(open(t, dir).Close())
	t.Setenv(trusted.Env, filepath.Dir(dir))
	if err := mayWrite(dir); !errors.Is(err, ErrUntrusted) {
		t.Errorf("the directory above is trusted: %v", err)
	}
	t.Setenv(trusted.Env, "")
	if _, err := trusted.Add(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	okay(open(t, dir).Close())
	// Another user's directory of the same name is not what was trusted.
	okay(os.Chown(dir, 20002, -1))
	if err := mayWrite(dir); !errors.Is(err, ErrUntrusted) {
		t.Errorf("another user's directory: %v", err)
	}
	okay(os.Chown(dir, os.Geteuid(), -1))
	okay(trusted.Remove(t.Context(), dir))
	if err := mayWrite(dir); !errors.Is(err, ErrUntrusted) {
		t.Errorf("trusted no longer: %v", err)
	}
}

// TestPartIsALink: a part of a store that is a link is refused, even if its user made it.
func TestPartIsALink(t *testing.T) {
	t.Setenv("XDG_CONFIG_HOME", t.TempDir())
	for _, part := range []string{"data", "log"} {
		dir := made(t)
		path, elsewhere := filepath.Join(dir, part), filepath.Join(t.TempDir(), part)
		if err := errors.Join(os.Rename(path, elsewhere), os.Symlink(elsewhere, path)); err != nil {
			t.Fatal(err)
		}
		var link *beneath.TypeError
		if s, err := Open(t.Context(), Options{Location: dir}); !errors.As(err, &link) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s is a link: %v", part, err)
			if err == nil {
				_ = s.Close()
			}
		}
	}
}

// TestListOfOthers does not accept a list that another user could have written.
func TestListOfOthers(t *testing.T) {
	config := t.TempDir()
	t.Setenv("XDG_CONFIG_HOME", config)
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	if _, err := trusted.Add(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	if err := mayWrite(dir); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(config, "ckptstore", "trusted")
	for how, do := range map[string]func() error{
		"readable":       func() error { return os.Chmod(path, 0o644) },
		"another user's": func() error { return os.Chown(path, 20002, -1) },
		"a link":         func() error { return errors.Join(os.Rename(path, path+".moved"), os.Symlink(path+".moved", path)) },
	} {
		if err := do(); err != nil {
			t.Fatal(err)
		}
		if err := mayWrite(dir); !errors.Is(err, ErrUntrusted) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v", how, err)
		}
		_ = os.Remove(path)
		_ = os.Remove(path + ".moved")
		if _, err := trusted.Add(t.Context(), dir); err != nil {
			t.Fatal(err)
		}
	}
}
