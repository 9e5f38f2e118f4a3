//go:build testbed || outlive

package netfs_test

import (
	"bytes"
	"io"
	"maps"
	"os"
	"slices"
	"testing"

	"github.com/hanwen/go-fuse/v2/posixtest"
	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/internal/testbed/netfs"
)

// TestPOSIX: for the processes of one node, a disk is a POSIX filesystem, whatever it
// caches. The tests are those of go-fuse.
func TestPOSIX(t *testing.T) {
	absent := []string{
		"XAttr", "XAttrLarge", // a deliberate difference
		"FcntlFlockLocksFile", // expects the fcntl locks of one process to conflict
	}
	nodes := share(t, netfs.Options{}, netfs.NFS())
	for i, name := range []string{"coherent", "NFS"} {
		for _, test := range slices.Sorted(maps.Keys(posixtest.All)) {
			if slices.Contains(absent, test) {
				continue
			}
			dir := nodes[i].path(name + test)
			if err := os.Mkdir(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			t.Run(name+"/"+test, func(t *testing.T) { posixtest.All[test](t, dir) })
		}
	}
}

// TestWriteBackModel: the writer sees what it has written, however it is spread over
// extents, and the other node sees what was written before the last sync.
func TestWriteBackModel(t *testing.T) {
	nodes := share(t, netfs.NFS(), netfs.Options{})
	a, b := nodes[0], nodes[1]
	rapid.Check(t, func(r *rapid.T) {
		f, err := os.OpenFile(a.path("f"), os.O_CREATE|os.O_TRUNC|os.O_RDWR, 0o644)
		if err != nil {
			r.Fatal(err)
		}
		defer f.Close()
		var own, synced []byte // the file as a and b must see it
		r.Repeat(map[string]func(*rapid.T){
			"write": func(r *rapid.T) {
				at := rapid.IntRange(0, 20_000).Draw(r, "at")
				data := bytes.Repeat([]byte{rapid.Byte().Draw(r, "byte")}, rapid.IntRange(1, 9000).Draw(r, "length"))
				if _, err := f.WriteAt(data, int64(at)); err != nil {
					r.Fatal(err)
				}
				own = append(own, make([]byte, max(0, at+len(data)-len(own)))...)
				copy(own[at:], data)
			},
			"truncate": func(r *rapid.T) {
				size := rapid.IntRange(0, 20_000).Draw(r, "size")
				if err := f.Truncate(int64(size)); err != nil {
					r.Fatal(err)
				}
				own = append(own, make([]byte, max(0, size-len(own)))...)[:size]
				synced = slices.Clone(own)
			},
			"sync": func(r *rapid.T) {
				if err := f.Sync(); err != nil {
					r.Fatal(err)
				}
				synced = slices.Clone(own)
			},
			"compare": func(r *rapid.T) {
				got, err := io.ReadAll(io.NewSectionReader(f, 0, 1<<20))
				if err != nil || !bytes.Equal(got, own) {
					r.Fatalf("the writer reads %d bytes, want %d (%v)", len(got), len(own), err)
				}
				if info, err := f.Stat(); err != nil || info.Size() != int64(len(own)) {
					r.Fatalf("the writer sees the size %d, want %d (%v)", info.Size(), len(own), err)
				}
				if got, err := os.ReadFile(b.path("f")); err != nil || !bytes.Equal(got, synced) {
					r.Fatalf("the other node reads %d bytes, want %d (%v)", len(got), len(synced), err)
				}
			},
		})
	})
}
