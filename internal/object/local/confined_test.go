package local_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/object/local"
)

// TestLinks: a directory of data does nothing behind a symbolic link, at any level,
// not even below its own name.
func TestLinks(t *testing.T) {
	for _, at := range []string{"data", "data/run", "data/run/main", "data/run/main/f"} {
		top := t.TempDir()
		outside := filepath.Join(top, "outside")
		write(t, filepath.Join(top, "data", "run", "main", "f"), "stored")
		write(t, filepath.Join(top, "data", "g"), "stored")
		if err := errors.Join(os.Rename(filepath.Join(top, at), outside), os.Symlink(outside, filepath.Join(top, at))); err != nil {
			t.Fatal(err)
		}
		before := contents(t, outside)
		d, ctx := local.New(vfs.Default, filepath.Join(top, "data")), t.Context()
		const f = "run/main/f"
		calls := map[string]func() error{
			"open":   func() error { _, err := d.Open(ctx, f); return err },
			"stat":   func() error { _, err := d.Stat(ctx, f); return err },
			"grow":   func() error { _, err := d.Grow(ctx, f); return err },
			"list":   func() error { _, err := d.List(ctx, f); return err },
			"make":   func() error { return d.MakeDir(ctx, f+"/new") },
			"link":   func() error { return d.Link(ctx, f, "linked", object.Exclusive) },
			"link 2": func() error { return d.Link(ctx, f, "linked", object.Replace) },
		}
		if at != "data/run/main/f" {
			calls["create"] = func() error { _, err := d.Create(ctx, f, 2<<20, object.Replace); return err }
			calls["sync"] = func() error { return d.Sync(ctx, "run/main") }
			calls["remove"] = func() error { return d.Remove(ctx, f) }
			calls["link to"] = func() error { return d.Link(ctx, "g", "run/main/h", object.Exclusive) }
		}
		for name, call := range calls {
			var is *beneath.TypeError
			if err := call(); !errors.As(err, &is) || !is.Link() || is.Path != filepath.Join(top, at) {
				t.Errorf("%s with a link at %s: %v", name, at, err)
			}
		}
		if after := contents(t, outside); after != before {
			t.Errorf("behind a link at %s there was\n%s, and is\n%s", at, before, after)
		}
		if _, err := os.Lstat(filepath.Join(top, "data", "linked")); at != "data" && !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the link at %s has a second name: %v", at, err)
		}
	}
}

// TestSecondName: a file that has a second name, perhaps in another directory, is
// not written to.
func TestSecondName(t *testing.T) {
	top := t.TempDir()
	precious := filepath.Join(top, "precious")
	write(t, precious, "precious")
	write(t, filepath.Join(top, "data", "g"), "stored")
	if err := os.Link(precious, filepath.Join(top, "data", "f")); err != nil {
		t.Fatal(err)
	}
	g, err := local.New(vfs.Default, filepath.Join(top, "data")).Grow(t.Context(), "f")
	if err == nil {
		_, _ = g.WriteAt([]byte("written"), 0)
		g.Abort()
		t.Error("it was opened for writing")
	}
	if got := contents(t, precious); got != precious+"=precious\n" {
		t.Error(got)
	}
}

// TestStoreBehindALink: the way to the data's parent is the user's.
func TestStoreBehindALink(t *testing.T) {
	top := t.TempDir()
	write(t, filepath.Join(top, "disk", "store", "data", "f"), "stored")
	if err := os.Symlink("disk", filepath.Join(top, "link")); err != nil {
		t.Fatal(err)
	}
	d := local.New(vfs.Default, filepath.Join(top, "link", "store", "data"))
	if err := d.MakeDir(t.Context(), "run"); err != nil {
		t.Error(err)
	}
	if info, err := d.Stat(t.Context(), "f"); err != nil || info.Size != 6 {
		t.Errorf("%+v, %v", info, err)
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o600)); err != nil {
		t.Fatal(err)
	}
}

// contents is all that is at a path and below it.
func contents(t *testing.T, path string) (all string) {
	t.Helper()
	err := filepath.WalkDir(path, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		all += path
		if e.Type().IsRegular() {
			var text []byte
			text, err = os.ReadFile(path)
			all += "=" + string(text)
		}
		all += "\n"
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}
