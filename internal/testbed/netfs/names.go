package netfs

import (
	"errors"
	"os"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// Lookup finds a name at the server. The kernel caches the answer, also that there is
// no such name.
func (c *Client) Lookup(_ <-chan struct{}, in *fuse.InHeader, name string, out *fuse.EntryOut) fuse.Status {
	if s := c.traffic.request(OpLookup, in.Pid); !s.Ok() {
		return s
	}
	dir := c.inode(in.NodeId)
	s := c.entry(dir, name, out)
	if s != fuse.ENOENT || c.options.NegativeCache == 0 {
		return s
	}
	if c.options.ListingRevalidates {
		dir.mu.Lock()
		dir.missing[name] = true
		dir.mu.Unlock()
	}
	out.NodeId = 0
	out.SetEntryTimeout(c.options.NegativeCache)
	return fuse.OK
}

// entry fills the answer to a request that leads to a name.
func (c *Client) entry(dir *inode, name string, out *fuse.EntryOut) fuse.Status {
	c.names.RLock()
	defer c.names.RUnlock()
	fd, err := unix.Openat(dir.fd, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return fuse.ToStatus(err)
	}
	var st syscall.Stat_t
	if err := syscall.Fstat(fd, &st); err != nil {
		_ = unix.Close(fd)
		return fuse.ToStatus(err)
	}
	n := c.remember(fd, keyOf(&st))
	dir.found(name)
	out.NodeId, out.Generation = n.number, 1
	out.SetEntryTimeout(c.options.EntryCache)
	out.SetAttrTimeout(c.options.AttrCache)
	n.attributes(&st, &out.Attr)
	return fuse.OK
}

// found notes that the kernel knows a name to exist. It must not be told to forget that: an
// open file would look deleted.
func (n *inode) found(name string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.missing, name)
}

// made completes the creation of a name for its caller and fills the answer.
func (c *Client) made(in *fuse.InHeader, name string, mode uint32, out *fuse.EntryOut) fuse.Status {
	dir := c.inode(in.NodeId)
	if err := own(dir.fd, name, in, mode); err != nil {
		return fuse.ToStatus(err)
	}
	return c.entry(dir, name, out)
}

// own gives a new file to the caller of a request, with the mode that it asked for.
// Symbolic links have no mode.
func own(dir int, name string, in *fuse.InHeader, mode uint32) error {
	if in.Uid != 0 || in.Gid != 0 {
		if err := unix.Fchownat(dir, name, int(in.Uid), int(in.Gid), unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return err
		}
	}
	if mode&unix.S_IFMT == unix.S_IFLNK {
		return nil
	}
	return unix.Fchmodat(dir, name, mode&0o7777, 0)
}

// Mknod makes a file, a device, a pipe or a socket.
func (c *Client) Mknod(_ <-chan struct{}, in *fuse.MknodIn, name string, out *fuse.EntryOut) fuse.Status {
	if s := c.traffic.request(OpCreate, in.Pid); !s.Ok() {
		return s
	}
	if err := unix.Mknodat(c.inode(in.NodeId).fd, name, in.Mode, int(in.Rdev)); err != nil {
		return fuse.ToStatus(err)
	}
	return c.made(&in.InHeader, name, in.Mode, out)
}

// Mkdir makes a directory.
func (c *Client) Mkdir(_ <-chan struct{}, in *fuse.MkdirIn, name string, out *fuse.EntryOut) fuse.Status {
	if s := c.traffic.request(OpMkdir, in.Pid); !s.Ok() {
		return s
	}
	if err := unix.Mkdirat(c.inode(in.NodeId).fd, name, in.Mode); err != nil {
		return fuse.ToStatus(err)
	}
	return c.made(&in.InHeader, name, unix.S_IFDIR|in.Mode, out)
}

// Symlink makes a symbolic link.
func (c *Client) Symlink(_ <-chan struct{}, in *fuse.InHeader, target, name string, out *fuse.EntryOut) fuse.Status {
	if s := c.traffic.request(OpSymlink, in.Pid); !s.Ok() {
		return s
	}
	if err := unix.Symlinkat(target, c.inode(in.NodeId).fd, name); err != nil {
		return fuse.ToStatus(err)
	}
	return c.made(in, name, unix.S_IFLNK, out)
}

// Readlink reads a symbolic link.
func (c *Client) Readlink(_ <-chan struct{}, in *fuse.InHeader) ([]byte, fuse.Status) {
	if s := c.traffic.request(OpReadlink, in.Pid); !s.Ok() {
		return nil, s
	}
	buf := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(c.inode(in.NodeId).fd, "", buf)
	return buf[:max(n, 0)], fuse.ToStatus(err)
}

// Link gives a file another name, after its data was written back.
func (c *Client) Link(_ <-chan struct{}, in *fuse.LinkIn, name string, out *fuse.EntryOut) fuse.Status {
	if s := c.traffic.request(OpLink, in.Pid); !s.Ok() {
		return s
	}
	n, dir := c.inode(in.Oldnodeid), c.inode(in.NodeId)
	if s := c.writeBack(n, in.Pid); !s.Ok() {
		return s
	}
	if err := unix.Linkat(unix.AT_FDCWD, n.path(), dir.fd, name, unix.AT_SYMLINK_FOLLOW); err != nil {
		return fuse.ToStatus(err)
	}
	return c.entry(dir, name, out)
}

// Rename moves a name, after the file's data was written back.
func (c *Client) Rename(_ <-chan struct{}, in *fuse.RenameIn, from, to string) fuse.Status {
	if s := c.traffic.request(OpRename, in.Pid); !s.Ok() {
		return s
	}
	dir, target := c.inode(in.NodeId), c.inode(in.Newdir)
	if n := c.child(dir, from); n != nil {
		if s := c.writeBack(n, in.Pid); !s.Ok() {
			return s
		}
	}
	s := c.removes(target, to, func() error { return unix.Renameat2(dir.fd, from, target.fd, to, uint(in.Flags)) })
	if s.Ok() {
		target.found(to)
	}
	return s
}

// Unlink removes a file's name.
func (c *Client) Unlink(_ <-chan struct{}, in *fuse.InHeader, name string) fuse.Status {
	if s := c.traffic.request(OpRemove, in.Pid); !s.Ok() {
		return s
	}
	dir := c.inode(in.NodeId)
	return c.removes(dir, name, func() error { return unix.Unlinkat(dir.fd, name, 0) })
}

// Rmdir removes an empty directory.
func (c *Client) Rmdir(_ <-chan struct{}, in *fuse.InHeader, name string) fuse.Status {
	if s := c.traffic.request(OpRemove, in.Pid); !s.Ok() {
		return s
	}
	return fuse.ToStatus(unix.Unlinkat(c.inode(in.NodeId).fd, name, unix.AT_REMOVEDIR))
}

// child returns the inode that a name leads to, if the kernel knows it.
func (c *Client) child(dir *inode, name string) *inode {
	var st unix.Stat_t
	if err := unix.Fstatat(dir.fd, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return nil
	}
	return c.find(key{uint64(st.Dev), st.Ino}) //nolint:unconvert // as in keyOf
}

// removes calls a function that takes a name from a file. If that is its last name, this
// client can still use the file, others cannot.
func (c *Client) removes(dir *inode, name string, call func() error) fuse.Status {
	c.names.Lock()
	defer c.names.Unlock()
	n := c.child(dir, name)
	if n == nil {
		return fuse.ToStatus(call())
	}
	// Before the call: a request for the file's attributes may come in between.
	var st syscall.Stat_t
	last := syscall.Fstat(n.fd, &st) == nil && st.Nlink == 1
	n.setUnlinked(last)
	err := call()
	if err != nil {
		n.setUnlinked(false)
	}
	return fuse.ToStatus(err)
}

func (n *inode) setUnlinked(to bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.unlinked = to
}

// OpenDir reads a directory. It first has the kernel forget the names that were
// missing, if the options ask for that.
func (c *Client) OpenDir(_ <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	if s := c.traffic.request(OpList, in.Pid); !s.Ok() {
		return s
	}
	n := c.inode(in.NodeId)
	n.mu.Lock()
	missing := n.missing
	n.missing = map[string]bool{}
	n.mu.Unlock()
	for name := range missing {
		_ = c.kernel.EntryNotify(n.number, name) // it may have forgotten the name already
	}
	f, err := os.Open(n.path())
	if err != nil {
		return fuse.ToStatus(err)
	}
	h := &handle{inode: n, file: f}
	if err := h.list(); err != nil {
		f.Close()
		return fuse.ToStatus(err)
	}
	out.Fh = c.open(h)
	return fuse.OK
}

// list reads the entries of a directory.
func (h *handle) list() error {
	if _, err := h.file.Seek(0, 0); err != nil {
		return err
	}
	entries, err := h.file.ReadDir(-1)
	h.entries = nil
	for _, e := range entries {
		mode := uint32(unix.S_IFREG)
		switch t := e.Type(); {
		case t.IsDir():
			mode = unix.S_IFDIR
		case t&os.ModeSymlink != 0:
			mode = unix.S_IFLNK
		case t != 0:
			mode = 0
		}
		h.entries = append(h.entries, fuse.DirEntry{Name: e.Name(), Mode: mode})
	}
	return err
}

// ReadDir returns entries. From the first one on, it reads the directory again.
func (c *Client) ReadDir(_ <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	h := c.handle(in.Fh)
	h.inode.mu.Lock()
	defer h.inode.mu.Unlock()
	if in.Offset == 0 {
		if err := h.list(); err != nil {
			return fuse.ToStatus(err)
		}
	}
	for i := int(in.Offset); i < len(h.entries); i++ {
		e := h.entries[i]
		e.Off = uint64(i + 1)
		if !out.AddDirEntry(e) {
			break
		}
	}
	return fuse.OK
}

// ReleaseDir closes a directory.
func (c *Client) ReleaseDir(in *fuse.ReleaseIn) { c.release(in.Fh) }

// FsyncDir makes the names of a directory durable at the server.
func (c *Client) FsyncDir(_ <-chan struct{}, in *fuse.FsyncIn) fuse.Status {
	if s := c.traffic.request(OpFsync, in.Pid); !s.Ok() {
		return s
	}
	return fuse.ToStatus(c.handle(in.Fh).file.Sync())
}

// StatFs returns the room of the server's filesystem.
func (c *Client) StatFs(_ <-chan struct{}, in *fuse.InHeader, out *fuse.StatfsOut) fuse.Status {
	if s := c.traffic.request(OpStatFS, in.Pid); !s.Ok() {
		return s
	}
	var st syscall.Statfs_t
	if err := syscall.Statfs(c.inode(in.NodeId).path(), &st); err != nil {
		return fuse.ToStatus(err)
	}
	out.FromStatfsT(&st)
	return fuse.OK
}

// Create makes and opens a file. Without O_EXCL an existing one is opened.
func (c *Client) Create(_ <-chan struct{}, in *fuse.CreateIn, name string, out *fuse.CreateOut) fuse.Status {
	if s := c.traffic.request(OpCreate, in.Pid); !s.Ok() {
		return s
	}
	dir := c.inode(in.NodeId)
	fd, err := unix.Openat(dir.fd, name, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_CLOEXEC, in.Mode&0o7777)
	switch {
	case err == nil:
		_ = unix.Close(fd)
		if err := own(dir.fd, name, &in.InHeader, in.Mode); err != nil {
			return fuse.ToStatus(err)
		}
	case errors.Is(err, unix.EEXIST) && in.Flags&unix.O_EXCL == 0:
	default:
		return fuse.ToStatus(err)
	}
	if s := c.entry(dir, name, &out.EntryOut); !s.Ok() {
		return s
	}
	s := c.openFile(c.inode(out.NodeId), in.Flags, &out.OpenOut)
	if !s.Ok() {
		c.Forget(out.NodeId, 1) // the kernel does not see the entry
	}
	return s
}
