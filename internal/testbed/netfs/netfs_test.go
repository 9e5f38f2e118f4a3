//go:build testbed || outlive

package netfs_test

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/testbed/netfs"
)

// TestCloseToOpen: another node sees written data after a close or an fsync, and not
// before. The writer sees it at once.
func TestCloseToOpen(t *testing.T) {
	for name, sync := range map[string]func(*os.File) error{"close": (*os.File).Close, "fsync": (*os.File).Sync} {
		t.Run(name, func(t *testing.T) {
			nodes := share(t, netfs.NFS(), netfs.NFS())
			a, b := nodes[0], nodes[1]
			a.write("f", "old")
			if got := b.content("f"); got != "old" {
				t.Errorf("b reads %q", got)
			}
			f := a.open("f", os.O_RDWR)
			if _, err := f.WriteString("newer"); err != nil {
				t.Fatal(err)
			}
			if got := a.content("f"); got != "newer" {
				t.Errorf("the writer reads %q", got)
			}
			if info, err := f.Stat(); err != nil || info.Size() != 5 {
				t.Errorf("the writer sees %v %v", info, err)
			}
			if got := b.content("f"); got != "old" {
				t.Errorf("before %s b reads %q", name, got)
			}
			if err := sync(f); err != nil {
				t.Fatal(err)
			}
			if got := b.content("f"); got != "newer" {
				t.Errorf("after %s b reads %q", name, got)
			}
		})
	}
}

// TestWriteThrough: without WriteBack and caches, all nodes see every write.
func TestWriteThrough(t *testing.T) {
	nodes := share(t, netfs.Options{}, netfs.Options{})
	a, b := nodes[0], nodes[1]
	f := a.open("f", os.O_CREATE|os.O_WRONLY)
	for _, want := range []string{"x", "xx", "xxx"} {
		if _, err := f.WriteString("x"); err != nil {
			t.Fatal(err)
		}
		if got := b.content("f"); got != want {
			t.Errorf("b reads %q, want %q", got, want)
		}
	}
}

// TestNegativeCache: a node that has not found a name keeps not finding it, although
// it exists.
func TestNegativeCache(t *testing.T) {
	t.Run("by time only", func(t *testing.T) {
		nodes := share(t, netfs.NFS(), netfs.Options{NegativeCache: forever})
		a, b := nodes[0], nodes[1]
		if b.exists("f") {
			t.Fatal("f is there")
		}
		a.write("f", "text")
		if b.exists("f") {
			t.Error("b finds f, which it had not found before")
		}
		entries, err := os.ReadDir(b.path(""))
		if err != nil || len(entries) != 1 || entries[0].Name() != "f" {
			t.Errorf("b lists %v, %v", entries, err)
		}
		if b.exists("f") {
			t.Error("b finds f after a listing")
		}
		if f, err := os.OpenFile(b.path("f"), os.O_CREATE|os.O_EXCL, 0o644); !errors.Is(err, os.ErrExist) {
			t.Errorf("b creates f, which exists: %v %v", f, err)
		}
	})
	t.Run("until a listing", func(t *testing.T) {
		nodes := share(t, netfs.NFS(), netfs.Options{NegativeCache: forever, ListingRevalidates: true})
		a, b := nodes[0], nodes[1]
		if b.exists("f") {
			t.Fatal("f is there")
		}
		a.write("f", "text")
		if b.exists("f") {
			t.Error("b finds f, which it had not found before")
		}
		if _, err := os.ReadDir(b.path("")); err != nil {
			t.Fatal(err)
		}
		if !b.exists("f") {
			t.Error("b does not find f after a listing")
		}
	})
	t.Run("until the time has passed", func(t *testing.T) {
		nodes := share(t, netfs.NFS(), netfs.Options{NegativeCache: 200 * time.Millisecond})
		a, b := nodes[0], nodes[1]
		if b.exists("f") {
			t.Fatal("f is there")
		}
		a.write("f", "text")
		eventually(t, "f on b", func() bool { return b.exists("f") })
	})
}

// TestMadeName: a listing does not take the name from an open file that was missing before
// it was made.
func TestMadeName(t *testing.T) {
	a := share(t, netfs.NFS())[0]
	for name, create := range map[string]func(string) *os.File{
		"made": func(name string) *os.File { return a.open(name, os.O_CREATE|os.O_WRONLY) },
		"renamed": func(name string) *os.File {
			f := a.open("other", os.O_CREATE|os.O_WRONLY)
			if err := os.Rename(a.path("other"), a.path(name)); err != nil {
				t.Fatal(err)
			}
			return f
		},
	} {
		if _, err := os.Stat(a.path(name)); err == nil {
			t.Fatal("it exists already")
		}
		f := create(name)
		if _, err := os.ReadDir(a.path(".")); err != nil {
			t.Fatal(err)
		}
		if got, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", f.Fd())); err != nil || strings.HasSuffix(got, "(deleted)") {
			t.Errorf("the open file is %q, %v", got, err)
		}
	}
}

// TestAttrCache: a stat shows the old size until the file is opened.
func TestAttrCache(t *testing.T) {
	nodes := share(t, netfs.NFS(), netfs.Options{AttrCache: forever, EntryCache: forever})
	a, b := nodes[0], nodes[1]
	size := func() int64 {
		info, err := os.Stat(b.path("f"))
		if err != nil {
			t.Fatal(err)
		}
		return info.Size()
	}
	a.write("f", "1")
	if size() != 1 {
		t.Fatalf("the size is %d", size())
	}
	a.write("f", "12345")
	if size() != 1 {
		t.Errorf("the size is %d within the time of the cache", size())
	}
	if got := b.content("f"); got != "12345" {
		t.Errorf("an open file has %q", got)
	}
	if size() != 5 {
		t.Errorf("the size is %d after an open", size())
	}
}

// TestEntryCache: a name leads to the file that it led to, also after another node has
// renamed a new file over it. Opening finds that the old one is stale.
func TestEntryCache(t *testing.T) {
	nodes := share(t, netfs.NFS(), netfs.Options{EntryCache: forever, AttrCache: forever})
	a, b := nodes[0], nodes[1]
	a.write("latest", "1")
	if got := b.content("latest"); got != "1" {
		t.Fatalf("latest is %q", got)
	}
	before, err := os.Stat(b.path("latest"))
	if err != nil {
		t.Fatal(err)
	}
	a.write("new", "2")
	if err := os.Rename(a.path("new"), a.path("latest")); err != nil {
		t.Fatal(err)
	}
	after, err := os.Stat(b.path("latest"))
	if err != nil || !os.SameFile(before, after) {
		t.Errorf("the name leads to another file within the time of the cache: %v", err)
	}
	if got := b.content("latest"); got != "2" {
		t.Errorf("latest is %q", got)
	}
}

// TestStale: a file that another node has removed is stale. The node that removed it can
// use its open descriptors.
func TestStale(t *testing.T) {
	nodes := share(t, netfs.Options{}, netfs.Options{})
	a, b := nodes[0], nodes[1]
	a.write("f", "text")
	own, other := a.open("f", os.O_RDONLY), b.open("f", os.O_RDONLY)
	if err := os.Remove(a.path("f")); err != nil {
		t.Fatal(err)
	}
	if text, err := io.ReadAll(own); string(text) != "text" || err != nil {
		t.Errorf("the node that removed the file reads %q, %v", text, err)
	}
	if text, err := io.ReadAll(other); !errors.Is(err, unix.ESTALE) {
		t.Errorf("another node reads %q, %v", text, err)
	}
}

// TestOneWins: of many that create a name on two nodes, one succeeds.
func TestOneWins(t *testing.T) {
	nodes := share(t, netfs.NFS(), netfs.NFS())
	nodes[0].write("source", "")
	for name, create := range map[string]func(node, string) error{
		"O_EXCL": func(n node, name string) error {
			f, err := os.OpenFile(n.path(name), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
			f.Close()
			return err
		},
		"mkdir":   func(n node, name string) error { return os.Mkdir(n.path(name), 0o700) },
		"link":    func(n node, name string) error { return os.Link(n.path("source"), n.path(name)) },
		"symlink": func(n node, name string) error { return os.Symlink("source", n.path(name)) },
	} {
		var won, lost int
		var mu sync.Mutex
		var all sync.WaitGroup
		for i := range 16 {
			all.Go(func() {
				err := create(nodes[i%2], "by-"+name)
				mu.Lock()
				defer mu.Unlock()
				switch {
				case err == nil:
					won++
				case errors.Is(err, os.ErrExist):
					lost++
				default:
					t.Errorf("%s: %v", name, err)
				}
			})
		}
		all.Wait()
		if won != 1 || lost != 15 {
			t.Errorf("%s: %d have won and %d lost", name, won, lost)
		}
	}
}

// TestLocks: with LocalLocks two nodes hold one lock, otherwise one of them.
func TestLocks(t *testing.T) {
	flock := func(f *os.File) error { return unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) }
	fcntl := func(f *os.File) error {
		return unix.FcntlFlock(f.Fd(), unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Start: 10, Len: 5})
	}
	for name, lock := range map[string]func(*os.File) error{"flock": flock, "fcntl": fcntl} {
		for _, local := range []bool{false, true} {
			nodes := share(t, netfs.Options{LocalLocks: local}, netfs.Options{LocalLocks: local})
			nodes[0].write("lock", "")
			f, g := nodes[0].open("lock", os.O_RDWR), nodes[1].open("lock", os.O_RDWR)
			if err := lock(f); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			switch err := lock(g); {
			case local && err != nil:
				t.Errorf("local %s: the other node's lock is seen: %v", name, err)
			case !local && !errors.Is(err, syscall.EAGAIN):
				t.Errorf("shared %s: the other node takes the lock as well: %v", name, err)
			}
			f.Close()
			eventually(t, name+" after the owner has closed the file", func() bool { return lock(g) == nil })
		}
	}
}

// TestLockIsWaitedFor: a lock is taken by a waiting node when its owner loses power.
func TestLockIsWaitedFor(t *testing.T) {
	nodes := share(t, netfs.NFS(), netfs.NFS())
	a, b := nodes[0], nodes[1]
	a.write("lock", "")
	ctx := t.Context()
	c := a.Command(ctx, "flock", at+"/lock", "sleep", "1000")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	f := b.open("lock", os.O_RDWR)
	eventually(t, "the lock of a", func() bool {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			_ = unix.Flock(int(f.Fd()), unix.LOCK_UN)
		}
		return errors.Is(err, syscall.EAGAIN)
	})
	w := b.Command(ctx, "flock", at+"/lock", "echo", "mine")
	got := make(chan string)
	go func() {
		out, err := w.CombinedOutput()
		if err != nil {
			t.Error(err)
		}
		got <- string(out)
	}()
	asked := b.Disk(at).Counters().Ops[netfs.OpLock]
	eventually(t, "b to ask again", func() bool { return b.Disk(at).Counters().Ops[netfs.OpLock] > asked+2 })
	if err := a.PowerOff(); err != nil {
		t.Fatal(err)
	}
	if out := <-got; out != "mine\n" {
		t.Errorf("b prints %q", out)
	}
}
