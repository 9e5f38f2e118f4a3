//go:build testbed || outlive

package netfs_test

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/ckptstore/ckptstore/internal/testbed"
	"github.com/ckptstore/ckptstore/internal/testbed/netfs"
)

func TestMain(m *testing.M) {
	testbed.Main()
	goleak.VerifyTestMain(m)
}

// limit bounds every wait of a test.
const limit = 30 * time.Second

// forever is a cache time that no test reaches.
const forever = time.Hour

// at is where the nodes have their disk.
const at = "/srv/disk"

// node is a node with a disk that it shares with the others of its test.
type node struct {
	*testbed.Node
	t *testing.T
}

// share starts a node for each of the options, with one disk for all.
func share(t *testing.T, options ...netfs.Options) (nodes []node) {
	t.Helper()
	bed, err := testbed.New(testbed.Options{})
	if err != nil {
		t.Fatal(err)
	}
	server, err := netfs.NewServer(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(bed.Close(), server.Close()); err != nil {
			t.Error(err)
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	for i, o := range options {
		n, err := bed.Start(ctx, testbed.Config{Name: string(rune('a' + i)), Disks: []testbed.Disk{{At: at, Server: server, Options: o}}})
		if err != nil {
			t.Fatal(err)
		}
		nodes = append(nodes, node{n, t})
	}
	return nodes
}

// path returns the path of a file of the node's disk.
func (n node) path(name string) string {
	n.t.Helper()
	path, err := n.Path(filepath.Join(at, name))
	if err != nil {
		n.t.Fatal(err)
	}
	return path
}

// content returns what the node reads from a file.
func (n node) content(name string) string {
	n.t.Helper()
	text, err := os.ReadFile(n.path(name))
	if err != nil {
		n.t.Errorf("read %s on %s: %v", name, n.Name(), err)
	}
	return string(text)
}

// write writes a file and closes it.
func (n node) write(name, text string) {
	n.t.Helper()
	if err := os.WriteFile(n.path(name), []byte(text), 0o644); err != nil {
		n.t.Fatalf("write %s on %s: %v", name, n.Name(), err)
	}
}

// open opens a file until the test ends.
func (n node) open(name string, flags int) *os.File {
	n.t.Helper()
	f, err := os.OpenFile(n.path(name), flags, 0o644)
	if err != nil {
		n.t.Fatalf("open %s on %s: %v", name, n.Name(), err)
	}
	n.t.Cleanup(func() { f.Close() })
	return f
}

// exists reports whether the node finds a name.
func (n node) exists(name string) bool {
	n.t.Helper()
	_, err := os.Lstat(n.path(name))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		n.t.Fatal(err)
	}
	return err == nil
}

// eventually polls until done returns true.
func eventually(t *testing.T, what string, done func() bool) {
	t.Helper()
	deadline := time.NewTimer(limit)
	defer deadline.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !done() {
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatalf("%s: not within %v", what, limit)
		}
	}
}
