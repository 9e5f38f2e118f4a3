package share_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/ckptstore/ckptstore/internal/share"
)

const gid = 30000

// team is a directory of a group.
func team(t *testing.T) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("run this test as root: it gives a directory to a group")
	}
	dir := filepath.Join(t.TempDir(), "team")
	must(t, os.Mkdir(dir, 0o700))
	must(t, os.Chown(dir, -1, gid))
	must(t, os.Chmod(dir, 0o770|fs.ModeSetgid))
	return dir
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func mode(t *testing.T, path string) fs.FileMode {
	t.Helper()
	info, err := os.Lstat(path)
	must(t, err)
	return info.Mode() & (fs.ModePerm | fs.ModeSetgid)
}

// TestWhatIsMadeIsTheGroups makes files and directories with modes that keep the
// group out, in a group's directory and outside it.
func TestWhatIsMadeIsTheGroups(t *testing.T) {
	for _, c := range []struct {
		name      string
		in        string
		file, dir fs.FileMode
	}{
		{"of a group", team(t), 0o660, 0o770 | fs.ModeSetgid},
		{"of one user", t.TempDir(), 0o600, 0o700},
	} {
		f, err := os.OpenFile(filepath.Join(c.in, "file"), os.O_CREATE|os.O_WRONLY, 0o600)
		must(t, err)
		must(t, share.File(f))
		must(t, f.Close())
		if got := mode(t, f.Name()); got != c.file {
			t.Errorf("%s: a file has %v, want %v", c.name, got, c.file)
		}
		must(t, share.MkdirAll(filepath.Join(c.in, "a", "b"), 0o700))
		for _, name := range []string{"a", "a/b"} {
			if got := mode(t, filepath.Join(c.in, name)); got != c.dir {
				t.Errorf("%s: %s has %v, want %v", c.name, name, got, c.dir)
			}
		}
	}
}

// TestTree shares everything in a tree with the group, and nothing outside it, however
// the tree links to it.
func TestTree(t *testing.T) {
	dir, home := team(t), t.TempDir()
	must(t, os.MkdirAll(filepath.Join(dir, "a", "b"), 0o700))
	must(t, os.WriteFile(filepath.Join(dir, "a", "b", "file"), nil, 0o600))
	others := filepath.Join(dir, "a", "others")
	must(t, os.WriteFile(others, nil, 0o600))
	must(t, os.Chown(others, 20002, gid))

	private, secret := filepath.Join(home, "private"), filepath.Join(home, "private", "secret")
	must(t, os.Mkdir(private, 0o700))
	must(t, os.WriteFile(secret, nil, 0o600))
	must(t, os.Chown(secret, -1, gid)) // otherwise its group alone would exclude it
	must(t, os.Symlink(private, filepath.Join(dir, "a", "link")))
	must(t, os.Symlink(secret, filepath.Join(dir, "a", "filelink")))
	must(t, os.Link(secret, filepath.Join(dir, "a", "hard")))
	moved := filepath.Join(dir, "a", "moved") // from a directory of another group
	must(t, os.WriteFile(moved, nil, 0o600))
	must(t, os.Chown(moved, -1, 0))
	must(t, syscall.Mkfifo(filepath.Join(dir, "a", "pipe"), 0o600))

	visited := 0
	must(t, share.Tree(dir, func(string) error { visited++; return nil }))
	if visited != 3 {
		t.Errorf("%d directories were visited", visited)
	}
	for path, want := range map[string]fs.FileMode{
		filepath.Join(dir, "a"):              0o770 | fs.ModeSetgid,
		filepath.Join(dir, "a", "b"):         0o770 | fs.ModeSetgid,
		filepath.Join(dir, "a", "b", "file"): 0o660,
		filepath.Join(dir, "a", "pipe"):      0o600,
		others:                               0o600,
		moved:                                0o600,
		private:                              0o700,
		secret:                               0o600,
	} {
		if got := mode(t, path); got != want {
			t.Errorf("%s has %v, want %v", path, got, want)
		}
	}
	must(t, share.Dirs(dir, filepath.Join(dir, "a", "b")))
	if err := share.Dirs(dir, filepath.Join(dir, "a", "link", "x")); err == nil {
		t.Error("a link was followed")
	}
	if got := mode(t, private); got != 0o700 {
		t.Errorf("a directory behind a link has %v", got)
	}
}
