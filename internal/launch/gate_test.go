package launch_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/ckptstore/ckptstore/internal/data"
)

// gate is a filesystem in which the first creation of one file or directory
// blocks until the test releases it. The test names it by a part of its name, or
// of its path if that part has a separator.
type gate struct {
	vfs.FS
	part    string
	reached chan struct{} // closed when the making has begun
	open    chan struct{} // closed to let it through
	err     error         // with which the making then ends; nil: it is made

	once sync.Once
}

func newGate(part string) *gate {
	return &gate{FS: vfs.Default, part: part, reached: make(chan struct{}), open: make(chan struct{})}
}

func (g *gate) pass(path string) (err error) {
	name := path
	if !strings.Contains(g.part, "/") {
		name = filepath.Base(path)
	}
	if !strings.Contains(name, g.part) {
		return nil
	}
	g.once.Do(func() {
		close(g.reached)
		<-g.open
		err = g.err
	})
	return err
}

// Create implements vfs.FS.
func (g *gate) Create(path string, c vfs.DiskWriteCategory) (vfs.File, error) {
	if err := g.pass(path); err != nil {
		return nil, err
	}
	return g.FS.Create(path, c)
}

// OpenReadWrite implements vfs.FS.
func (g *gate) OpenReadWrite(path string, c vfs.DiskWriteCategory, o ...vfs.OpenOption) (vfs.File, error) {
	if err := g.pass(path); err != nil {
		return nil, err
	}
	return g.FS.OpenReadWrite(path, c, o...)
}

// Open implements vfs.FS. A gate for "read:" and a part of the name stops the
// first reading of a file that is open.
func (g *gate) Open(path string, o ...vfs.OpenOption) (vfs.File, error) {
	f, err := g.FS.Open(path, o...)
	if part, ok := strings.CutPrefix(g.part, "read:"); ok && err == nil && strings.Contains(filepath.Base(path), part) {
		return gatedFile{f, g}, nil
	}
	return f, err
}

// gatedFile is a file whose reading is stopped.
type gatedFile struct {
	vfs.File
	gate *gate
}

// ReadAt implements vfs.File.
func (f gatedFile) ReadAt(p []byte, off int64) (int, error) {
	if err := f.gate.pass(f.gate.part); err != nil {
		return 0, err
	}
	return f.File.ReadAt(p, off)
}

// MkdirAll implements vfs.FS.
func (g *gate) MkdirAll(path string, mode os.FileMode) error {
	if err := g.pass(path); err != nil {
		return err
	}
	return g.FS.MkdirAll(path, mode)
}

// gated puts a gate between a job and its files.
func (j *job) gated(part string) *gate {
	j.t.Helper()
	g := newGate(part)
	var err error
	if j.store.Data, err = data.Open(g, home.Data.Dir()); err != nil {
		j.t.Fatal(err)
	}
	j.store.Data.OfStore(home.ID)
	return g
}

func (g *gate) await(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	await(ctx, t, g.reached)
}

func await(ctx context.Context, t *testing.T, c <-chan struct{}) {
	t.Helper()
	select {
	case <-c:
	case <-ctx.Done():
		t.Fatal("what the test waits for did not happen")
	}
}

// The wait of a test that shows that something does not happen.
const shortly = 250 * time.Millisecond

// saveEnds bounds a save in tests that wait for its end. Other saves of such a test must be whole by then, on a
// busy machine too.
const saveEnds = (2 + 3*raceFactor) * time.Second
