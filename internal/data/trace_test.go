package data_test

import (
	"flag"
	"fmt"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/ckptstore/ckptstore/tensor"
	"github.com/cockroachdb/pebble/v2/vfs"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// traceFS notes every operation that changes the filesystem.
type traceFS struct {
	vfs.FS
	mu    sync.Mutex
	lines strings.Builder
}

func (t *traceFS) note(format string, args ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	fmt.Fprintf(&t.lines, format+"\n", args...)
}

func (t *traceFS) file(name string, f vfs.File, err error) (vfs.File, error) {
	if err != nil {
		return nil, err
	}
	return &traceFile{File: f, fs: t, name: name}, nil
}

func (t *traceFS) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	t.note("create %s", name)
	f, err := t.FS.Create(name, c)
	return t.file(name, f, err)
}

func (t *traceFS) OpenReadWrite(name string, c vfs.DiskWriteCategory, opts ...vfs.OpenOption) (vfs.File, error) {
	t.note("open-rw %s", name)
	f, err := t.FS.OpenReadWrite(name, c, opts...)
	return t.file(name, f, err)
}

func (t *traceFS) OpenDir(name string) (vfs.File, error) {
	f, err := t.FS.OpenDir(name)
	return t.file(name+"/", f, err)
}

func (t *traceFS) Link(from, to string) error {
	t.note("link %s -> %s", from, to)
	return t.FS.Link(from, to)
}

func (t *traceFS) Rename(from, to string) error {
	t.note("rename %s -> %s", from, to)
	return t.FS.Rename(from, to)
}

func (t *traceFS) Remove(name string) error {
	t.note("remove %s", name)
	return t.FS.Remove(name)
}

func (t *traceFS) RemoveAll(name string) error {
	t.note("remove-all %s", name)
	return t.FS.RemoveAll(name)
}

func (t *traceFS) MkdirAll(name string, perm os.FileMode) error {
	t.note("mkdir %s", name)
	return t.FS.MkdirAll(name, perm)
}

type traceFile struct {
	vfs.File
	fs   *traceFS
	name string
}

func (f *traceFile) Write(p []byte) (int, error) {
	f.fs.note("write %s %d bytes", f.name, len(p))
	return f.File.Write(p)
}

func (f *traceFile) WriteAt(p []byte, off int64) (int, error) {
	f.fs.note("write %s %d bytes at %d", f.name, len(p), off)
	return f.File.WriteAt(p, off)
}

func (f *traceFile) Sync() error {
	f.fs.note("sync %s", f.name)
	return f.File.Sync()
}

// TestTrace holds the order of operations of a save and a removal: every
// change of the order is a change of what survives a crash.
func TestTrace(t *testing.T) {
	m := newModel()
	m.full(0, "w", tensor.Float32, 2_200_000) // more than two pieces
	m.full(0, "b", tensor.Float32, 3)
	m.value("step", 0, 9, false)
	fs := &traceFS{FS: memory(t)}
	root := open(t, fs)
	w := root.Writer(ref)
	step := func(name string, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		fs.note("# %s returned", name)
	}
	written, err := m.write(t.Context(), root)
	step("SetUp, plans and WriteData", err)
	_, err = w.Finish(t.Context(), m.manifest(written), commit)
	step("Finish", err)
	m.check(t, root.Reader(ref), m.wantAll())
	step("ReadData", nil)
	step("Remove", root.RemoveCommitted(t.Context(), ref))

	got := regexp.MustCompile(`manifest-[0-9a-f]{64}`).ReplaceAllString(fs.lines.String(), "manifest-DIGEST")
	got = regexp.MustCompile(`\.[0-9a-f]{16}\.tmp`).ReplaceAllString(got, ".RANDOM.tmp")
	golden(t, "testdata/commit.trace", []byte(got))
}

// golden compares got with a file.
func golden(t *testing.T, path string, got []byte) {
	t.Helper()
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != string(want) {
		t.Errorf("%s differs; got:\n%s", path, got)
	}
}
