//go:build outlive

package cmd_test

import (
	"os"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// silent makes the calls of a [brokenDisk] hang instead of returning an error.
const silent = syscall.EINPROGRESS

// brokenDisk is a file system that keeps its files in another directory until it
// breaks. Then every call returns an error or hangs, except that open files can be
// closed: a process could not end otherwise.
type brokenDisk struct {
	fuse.RawFileSystem
	why  atomic.Pointer[syscall.Errno] // nil while it is whole
	hits atomic.Int64                  // calls that found it broken
}

// mountBroken mounts a brokenDisk until the test ends. The caller must have its own
// mount namespace.
func mountBroken(t *testing.T, at string) *brokenDisk {
	t.Helper()
	root, err := fs.NewLoopbackRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	d := &brokenDisk{RawFileSystem: fs.NewNodeFS(root, &fs.Options{NullPermissions: true})}
	server, err := fuse.NewServer(d, at, &fuse.MountOptions{DirectMountStrict: true, FsName: "broken", Name: "broken"})
	if err != nil {
		t.Fatalf("mount a file system in user space on %s: %v", at, err)
	}
	ended := make(chan struct{})
	go func() { server.Serve(); close(ended) }()
	t.Cleanup(func() {
		d.why.Store(nil)
		if err := unix.Unmount(at, unix.MNT_DETACH); err != nil {
			t.Error(err)
			return
		}
		<-ended
	})
	if err := server.WaitMount(); err != nil {
		t.Fatal(err)
	}
	return d
}

// breaks makes every call return an error from now on, or hang with silent.
func (d *brokenDisk) breaks(why syscall.Errno) { d.why.Store(&why) }

// fails returns the error of a broken call. With silent it returns only when the
// calling process ends.
func (d *brokenDisk) fails(cancel <-chan struct{}) fuse.Status {
	why := d.why.Load()
	if why == nil {
		return fuse.OK
	}
	d.hits.Add(1)
	if *why == silent {
		<-cancel
		return fuse.EINTR
	}
	return fuse.Status(*why)
}

func (d *brokenDisk) Lookup(cancel <-chan struct{}, in *fuse.InHeader, name string, out *fuse.EntryOut) fuse.Status {
	if s := d.fails(cancel); !s.Ok() {
		return s
	}
	return d.RawFileSystem.Lookup(cancel, in, name, out)
}

func (d *brokenDisk) GetAttr(cancel <-chan struct{}, in *fuse.GetAttrIn, out *fuse.AttrOut) fuse.Status {
	if s := d.fails(cancel); !s.Ok() {
		return s
	}
	return d.RawFileSystem.GetAttr(cancel, in, out)
}

func (d *brokenDisk) SetAttr(cancel <-chan struct{}, in *fuse.SetAttrIn, out *fuse.AttrOut) fuse.Status {
	if s := d.fails(cancel); !s.Ok() {
		return s
	}
	return d.RawFileSystem.SetAttr(cancel, in, out)
}

func (d *brokenDisk) Mkdir(cancel <-chan struct{}, in *fuse.MkdirIn, name string, out *fuse.EntryOut) fuse.Status {
	if s := d.fails(cancel); !s.Ok() {
		return s
	}
	return d.RawFileSystem.Mkdir(cancel, in, name, out)
}

func (d *brokenDisk) Unlink(cancel <-chan struct{}, in *fuse.InHeader, name string) fuse.Status {
	if s := d.fails(cancel); !s.Ok() {
		return s
	}
	return d.RawFileSystem.Unlink(cancel, in, name)
}

func (d *brokenDisk) Rename(cancel <-chan struct{}, in *fuse.RenameIn, from, to string) fuse.Status {
	if s := d.fails(cancel); !s.Ok() {
		return s
	}
	return d.RawFileSystem.Rename(cancel, in, from, to)
}

func (d *brokenDisk) Link(cancel <-chan struct{}, in *fuse.LinkIn, name string, out *fuse.EntryOut) fuse.Status {
	if s := d.fails(cancel); !s.Ok() {
		return s
	}
	return d.RawFileSystem.Link(cancel, in, name, out)
}

func (d *brokenDisk) Create(cancel <-chan struct{}, in *fuse.CreateIn, name string, out *fuse.CreateOut) fuse.Status {
	if s := d.fails(cancel); !s.Ok() {
		return s
	}
	return d.RawFileSystem.Create(cancel, in, name, out)
}

func (d *brokenDisk) Open(cancel <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	if s := d.fails(cancel); !s.Ok() {
		return s
	}
	return d.RawFileSystem.Open(cancel, in, out)
}

func (d *brokenDisk) OpenDir(cancel <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	if s := d.fails(cancel); !s.Ok() {
		return s
	}
	return d.RawFileSystem.OpenDir(cancel, in, out)
}

func (d *brokenDisk) Read(cancel <-chan struct{}, in *fuse.ReadIn, buf []byte) (fuse.ReadResult, fuse.Status) {
	if s := d.fails(cancel); !s.Ok() {
		return nil, s
	}
	return d.RawFileSystem.Read(cancel, in, buf)
}

func (d *brokenDisk) Write(cancel <-chan struct{}, in *fuse.WriteIn, data []byte) (uint32, fuse.Status) {
	if s := d.fails(cancel); !s.Ok() {
		return 0, s
	}
	return d.RawFileSystem.Write(cancel, in, data)
}

func (d *brokenDisk) Fallocate(cancel <-chan struct{}, in *fuse.FallocateIn) fuse.Status {
	if s := d.fails(cancel); !s.Ok() {
		return s
	}
	return d.RawFileSystem.Fallocate(cancel, in)
}

func (d *brokenDisk) Fsync(cancel <-chan struct{}, in *fuse.FsyncIn) fuse.Status {
	if s := d.fails(cancel); !s.Ok() {
		return s
	}
	return d.RawFileSystem.Fsync(cancel, in)
}

func (d *brokenDisk) FsyncDir(cancel <-chan struct{}, in *fuse.FsyncIn) fuse.Status {
	if s := d.fails(cancel); !s.Ok() {
		return s
	}
	return d.RawFileSystem.FsyncDir(cancel, in)
}

// canMount reports whether this machine supports FUSE. Without it, .ci/run lists the
// tests that are not run.
func canMount() bool {
	_, err := os.Stat("/dev/fuse")
	return err == nil
}
