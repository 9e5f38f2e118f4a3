package beneath_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/beneath"
)

// scene is a root with directories, and a directory outside it that must not
// change.
type scene struct {
	root     beneath.Root
	dir      string // of the root, which a link leads to
	precious string
}

func newScene(t *testing.T) scene {
	t.Helper()
	top := t.TempDir()
	s := scene{dir: filepath.Join(top, "store"), precious: filepath.Join(top, "precious")}
	put(t, filepath.Join(top, "disk", "data", "run", "step", "file"), "mine")
	put(t, filepath.Join(s.precious, "run", "step", "file"), "precious")
	put(t, filepath.Join(s.precious, "file"), "precious")
	if err := os.Symlink("disk", s.dir); err != nil {
		t.Fatal(err)
	}
	s.root = beneath.At(s.dir)
	return s
}

func put(t *testing.T, path, text string) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o600)); err != nil {
		t.Fatal(err)
	}
}

// at returns a path below the root.
func (s scene) at(name string) string { return filepath.Join(s.dir, name) }

// whole fails the test if anything outside the root has changed.
func (s scene) whole(t *testing.T) {
	t.Helper()
	var found []string
	if err := filepath.WalkDir(s.precious, func(path string, e fs.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			text, rerr := os.ReadFile(path)
			found, err = append(found, strings.TrimPrefix(path, s.precious)+"="+string(text)), rerr
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if want := []string{"/file=precious", "/run/step/file=precious"}; !slices.Equal(found, want) {
		t.Fatalf("outside of the root there is %q, want %q", found, want)
	}
}

// calls returns the operations on a path.
func calls(r beneath.Root, free string) map[string]func(path string) error {
	return map[string]func(string) error{
		"open":    func(p string) error { f, err := r.Open(p); return closed(f, err) },
		"create":  func(p string) error { f, err := r.OpenFile(p, os.O_RDWR|os.O_CREATE, 0o600); return closed(f, err) },
		"append":  func(p string) error { f, err := r.OpenFile(p, os.O_WRONLY|os.O_APPEND, 0); return closed(f, err) },
		"read":    func(p string) error { _, err := r.ReadFile(p); return err },
		"opendir": func(p string) error { f, err := r.OpenDir(p); return closed(f, err) },
		"readdir": func(p string) error { _, err := r.ReadDir(p); return err },
		"sync":    r.SyncDir,
		"stat":    func(p string) error { _, err := r.Stat(p); return err },
		"mkdir":   func(p string) error { return r.MkdirAll(filepath.Join(p, "new"), 0o755) },
		"link":    func(p string) error { return r.Link(p, r, free) },
		"glob":    func(p string) error { _, err := r.Glob(p, "*"); return err },
	}
}

func closed(f *os.File, err error) error {
	if err == nil {
		err = f.Close()
	}
	return err
}

// No operation passes through a link, wherever in the path it is and wherever it
// leads.
func TestLinks(t *testing.T) {
	for _, at := range []string{"data", "data/run", "data/run/step", "data/run/step/file"} {
		for i := range 4 {
			s := newScene(t)
			inside := i%2 == 0
			if i > 1 {
				s.root = s.root.Walking()
			}
			real := filepath.Join(filepath.Dir(s.dir), "disk", at)
			if err := os.Rename(real, s.at("aside")); err != nil {
				t.Fatal(err)
			}
			target := filepath.Join(s.precious, strings.TrimPrefix(strings.TrimPrefix(at, "data"), "/"))
			if inside {
				target = s.at("aside")
			}
			if err := os.Symlink(target, real); err != nil {
				t.Fatal(err)
			}
			deep := s.at("data/run/step/file")
			ops := calls(s.root, s.at("free"))
			if at != "data/run/step/file" { // these act on the link itself
				ops["lstat"] = func(p string) error { _, err := s.root.Lstat(p); return err }
				ops["remove"] = s.root.Remove
				ops["remove all"] = s.root.RemoveAll
				ops["chtimes"] = func(p string) error { return s.root.Chtimes(p, time.Unix(1, 0)) }
				ops["rename"] = func(p string) error { return s.root.Rename(p, s.at("free")) }
				ops["rename to"] = func(p string) error { return s.root.Rename(s.at("aside"), p) }
			}
			for op, do := range ops {
				err := do(deep)
				var is *beneath.TypeError
				if !errors.As(err, &is) || !is.Link() || is.Path != s.at(at) || !errors.Is(err, fs.ErrPermission) {
					t.Errorf("%s with a link at %s: %v", op, at, err)
				}
				if err != nil && !strings.Contains(err.Error(), s.at(at)+" is a symbolic link") {
					t.Errorf("%s: the error does not name the link: %v", op, err)
				}
			}
			if _, err := os.Lstat(s.at("free")); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("a link at %s was given another name: %v", at, err)
			}
			s.whole(t)
		}
	}
}

// A removal takes the link itself, at the top and below.
func TestRemoveLinks(t *testing.T) {
	s := newScene(t)
	for _, link := range []string{"data/planted", "data/run/step/planted"} {
		if err := os.Symlink(s.precious, s.at(link)); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.root.RemoveAll(s.at("data/planted")); err != nil {
		t.Fatal(err)
	}
	if err := s.root.RemoveAll(s.at("data/run")); err != nil {
		t.Fatal(err)
	}
	if entries, err := os.ReadDir(s.at("data")); err != nil || len(entries) > 0 {
		t.Errorf("left over: %v, %v", entries, err)
	}
	if err := os.Symlink(s.precious, s.at("data/planted")); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(s.root.Remove(s.at("data/planted")), s.root.RemoveAll(s.at("data/not/there"))); err != nil {
		t.Error(err)
	}
	if err := s.root.Remove(s.at("data/planted")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("removed again: %v", err)
	}
	s.whole(t)
}

// Directories that are swapped for links while they are emptied and read lead
// nowhere.
func TestRace(t *testing.T) {
	for i, at := range []string{"x", "x/run", "x", "x/run"} {
		s := newScene(t)
		if i > 1 {
			s.root = s.root.Walking()
		}
		y := s.at("y")
		stop, ended := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(ended)
			for {
				select {
				case <-stop:
					return
				default: // one of them is often missing, which does not matter
					_ = unix.Renameat2(unix.AT_FDCWD, s.at(at), unix.AT_FDCWD, y, unix.RENAME_EXCHANGE)
				}
			}
		}()
		for range 40 {
			for _, name := range []string{"x/run/step/file", "x/run/step/more", "x/run/other", "x/file"} {
				_ = s.root.MkdirAll(filepath.Dir(s.at(name)), 0o755) // the link may be there already
				if f, err := s.root.OpenFile(s.at(name), os.O_WRONLY|os.O_CREATE, 0o600); err == nil {
					_ = f.Close()
				}
			}
			_ = os.Symlink(s.precious, y)
			if text, err := s.root.ReadFile(s.at("x/run/step/file")); err == nil && len(text) > 0 {
				t.Errorf("with links at %s a file outside was read: %s", at, text)
			}
			// Entries that have appeared meanwhile may remain, which is an error then.
			_, _ = s.root.RemoveAll(s.at("x")), s.root.RemoveAll(y)
		}
		close(stop)
		<-ended
		s.whole(t)
	}
}

// Opening anything but a regular file returns at once.
func TestPipes(t *testing.T) {
	s := newScene(t)
	if err := unix.Mkfifo(s.at("pipe"), 0o600); err != nil {
		t.Fatal(err)
	}
	for op, do := range calls(s.root, s.at("free")) {
		if op == "stat" {
			continue
		}
		said := make(chan error, 1)
		go func() { said <- do(s.at("pipe")) }()
		select {
		case err := <-said:
			var is *beneath.TypeError
			switch op {
			case "mkdir", "glob", "readdir", "opendir", "sync", "open", "read", "create", "append", "link":
				if !errors.As(err, &is) || is.Link() || !strings.Contains(err.Error(), "pipe is not a regular file (p") {
					t.Errorf("%s of a pipe: %v", op, err)
				}
			}
		case <-time.After(20 * time.Second):
			t.Fatalf("%s waits for the other end of a pipe", op)
		}
	}
	if _, err := os.Lstat(s.at("free")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a pipe was given another name: %v", err)
	}
	if _, err := s.root.Open(s.at("data")); !errors.Is(err, unix.EISDIR) {
		t.Errorf("a directory was opened as a file: %v", err)
	}
	if err := s.root.RemoveAll(s.at("pipe")); err != nil {
		t.Error(err)
	}
}

// Below a root, files work as with the functions of package os.
func TestOperations(t *testing.T) {
	for _, walks := range []bool{false, true} {
		s := newScene(t)
		if walks {
			s.root = s.root.Walking()
		}
		s.operations(t)
	}
}

func (s scene) operations(t *testing.T) {
	r := s.root
	if err := r.MkdirAll(s.at("a/b/c"), 0o755); err != nil {
		t.Fatal(err)
	}
	f, err := r.OpenFile(s.at("a/b/c/f"), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o640)
	if err != nil {
		t.Fatal(err)
	}
	if flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFL, 0); err != nil || flags&unix.O_NONBLOCK != 0 {
		t.Errorf("flags %o, %v: a file must not be nonblocking", flags, err)
	}
	if _, err := f.WriteString("text"); err != nil || f.Close() != nil {
		t.Fatal(err)
	}
	if err := errors.Join(r.Rename(s.at("a/b/c/f"), s.at("a/g")), r.Link(s.at("a/g"), r, s.at("a/b/h")),
		r.Chtimes(s.at("a/g"), time.Unix(1000, 7)), r.SyncDir(s.at("a"))); err != nil {
		t.Fatal(err)
	}
	info, err := r.Stat(s.at("a/b/h"))
	if err != nil || info.Size() != 4 || !info.ModTime().Equal(time.Unix(1000, 7)) || info.Name() != "h" {
		t.Errorf("stat: %v, %v", info, err)
	}
	if text, err := r.ReadFile(s.at("a/b/h")); string(text) != "text" || err != nil {
		t.Errorf("read %q, %v", text, err)
	}
	var walked []string
	if err := r.WalkDir(s.at("a"), func(path string, e fs.DirEntry, err error) error {
		walked = append(walked, strings.TrimPrefix(path, s.dir+"/"))
		if e.Name() == "c" {
			return fs.SkipDir
		}
		return err
	}); err != nil || strings.Join(walked, " ") != "a a/b a/b/c a/b/h a/g" {
		t.Errorf("walked %q, %v", walked, err)
	}
	if found, err := r.Glob(s.at("a"), "[bg]*"); err != nil || !slices.Equal(found, []string{s.at("a/b"), s.at("a/g")}) {
		t.Errorf("matched %q, %v", found, err)
	}
	if err := r.Link(s.at("a/g"), r, s.at("a/b/h")); !errors.Is(err, fs.ErrExist) {
		t.Errorf("linked over a file: %v", err)
	}
	if err := r.Remove(s.at("a")); !errors.Is(err, unix.ENOTEMPTY) {
		t.Errorf("removed a directory with files: %v", err)
	}
	for _, path := range []string{s.precious, filepath.Join(s.dir, "..", "precious"), s.at("a\x00b"), "relative"} {
		if err := r.RemoveAll(path); !errors.Is(err, fs.ErrInvalid) {
			t.Errorf("%q is not below the root: %v", path, err)
		}
	}
	if f, err := r.OpenFile(s.at("a/g"), os.O_WRONLY|os.O_TRUNC, 0); !errors.Is(err, fs.ErrInvalid) {
		t.Errorf("opened with O_TRUNC: %v, %v", f, err)
	}
	if err := r.RemoveAll(s.at("a")); err != nil {
		t.Error(err)
	}
	if _, err := r.Lstat(s.at("a")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("it is still there: %v", err)
	}
	s.whole(t)
}

// A chain of directories deeper than any store costs a bounded number of
// descriptors.
func TestDeep(t *testing.T) {
	s := newScene(t)
	if err := os.MkdirAll(s.at("deep/"+strings.Repeat("d/", 100)), 0o755); err != nil {
		t.Fatal(err)
	}
	for op, err := range map[string]error{
		"remove": s.root.RemoveAll(s.at("deep")),
		"walk":   s.root.WalkDir(s.at("deep"), func(_ string, _ fs.DirEntry, err error) error { return err }),
	} {
		if err == nil || !strings.Contains(err.Error(), "more than 64 directories inside one another") {
			t.Errorf("%s: %v", op, err)
		}
	}
}

func BenchmarkOpen(b *testing.B) {
	dir := b.TempDir()
	path := filepath.Join(dir, "data", "run", "main", "step-1.a1", "r00000.idx")
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte("x"), 0o600)); err != nil {
		b.Fatal(err)
	}
	r, walks := beneath.At(dir), beneath.At(dir).Walking()
	for name, open := range map[string]func() error{
		"os":           func() error { f, err := os.Open(path); return closed(f, err) },
		"beneath":      func() error { f, err := r.Open(path); return closed(f, err) },
		"walking":      func() error { f, err := walks.Open(path); return closed(f, err) },
		"stat":         func() error { _, err := os.Stat(path); return err },
		"beneath stat": func() error { _, err := r.Stat(path); return err },
	} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				if err := open(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
