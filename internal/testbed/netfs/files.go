package netfs

import (
	"errors"
	"io"
	"os"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// stale returns ESTALE if another client has removed the file. The caller holds n.mu.
func (n *inode) stale(st *syscall.Stat_t) error {
	if st.Nlink == 0 && !n.unlinked {
		return unix.ESTALE
	}
	return nil
}

// stat returns the server's attributes, or ESTALE. The caller holds n.mu.
func (n *inode) stat() (st syscall.Stat_t, err error) {
	if err := syscall.Fstat(n.fd, &st); err != nil {
		return st, err
	}
	return st, n.stale(&st)
}

// attributes fills in what the client believes about a file: the server's attributes,
// with the data that it holds back.
func (n *inode) attributes(st *syscall.Stat_t, out *fuse.Attr) {
	n.mu.Lock()
	defer n.mu.Unlock()
	out.FromStat(st)
	if n.dirty != nil {
		out.Size = max(out.Size, uint64(n.dirty.size()))
		out.Blocks = (out.Size + 511) / 512
		out.SetTimes(nil, &n.dirty.changed, nil)
	}
}

// GetAttr returns attributes, which the kernel caches.
func (c *Client) GetAttr(_ <-chan struct{}, in *fuse.GetAttrIn, out *fuse.AttrOut) fuse.Status {
	if s := c.traffic.request(OpGetAttr, in.Pid); !s.Ok() {
		return s
	}
	return c.answer(c.inode(in.NodeId), out)
}

func (c *Client) answer(n *inode, out *fuse.AttrOut) fuse.Status {
	n.mu.Lock()
	st, err := n.stat()
	n.mu.Unlock()
	if err != nil {
		return fuse.ToStatus(err)
	}
	out.SetTimeout(c.options.AttrCache)
	n.attributes(&st, &out.Attr)
	return fuse.OK
}

// SetAttr changes attributes or the size at the server, after data was written back.
func (c *Client) SetAttr(_ <-chan struct{}, in *fuse.SetAttrIn, out *fuse.AttrOut) fuse.Status {
	if s := c.traffic.request(OpSetAttr, in.Pid); !s.Ok() {
		return s
	}
	n := c.inode(in.NodeId)
	if s := c.writeBack(n, in.Pid); !s.Ok() {
		return s
	}
	if err := c.setAttr(n, in); err != nil {
		return fuse.ToStatus(err)
	}
	return c.answer(n, out)
}

func (c *Client) setAttr(n *inode, in *fuse.SetAttrIn) error {
	if size, ok := in.GetSize(); ok {
		if err := unix.Truncate(n.path(), int64(size)); err != nil {
			return err
		}
		c.server.changed(n.key)
	}
	if mode, ok := in.GetMode(); ok {
		if err := unix.Chmod(n.path(), mode); err != nil {
			return err
		}
	}
	uid, changeUID := in.GetUID()
	gid, changeGID := in.GetGID()
	if changeUID || changeGID {
		// An ID that is not changed is -1, also for chown.
		if err := unix.Fchownat(n.fd, "", int(int32(uid)), int(int32(gid)), unix.AT_EMPTY_PATH); err != nil {
			return err
		}
	}
	times := []unix.Timespec{{Nsec: unix.UTIME_OMIT}, {Nsec: unix.UTIME_OMIT}}
	atime, setAtime := in.GetATime()
	mtime, setMtime := in.GetMTime()
	if !setAtime && !setMtime {
		return nil
	}
	for i, t := range []time.Time{atime, mtime} {
		if i == 0 && setAtime || i == 1 && setMtime {
			times[i] = unix.NsecToTimespec(t.UnixNano())
		}
	}
	return unix.UtimesNanoAt(n.fd, "", times, unix.AT_EMPTY_PATH)
}

// Open opens a file. If the server's content is not what the kernel has seen last, the
// kernel forgets attributes and data (close-to-open).
func (c *Client) Open(_ <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	if s := c.traffic.request(OpOpen, in.Pid); !s.Ok() {
		return s
	}
	return c.openFile(c.inode(in.NodeId), in.Flags, out)
}

func (c *Client) openFile(n *inode, flags uint32, out *fuse.OpenOut) fuse.Status {
	// The kernel sends the offset of an append, and truncates by SetAttr.
	mode := int(flags) & unix.O_ACCMODE
	n.mu.Lock()
	_, err := n.stat()
	n.mu.Unlock()
	if err != nil {
		return fuse.ToStatus(err) // for ESTALE the kernel looks the name up again
	}
	f, err := os.OpenFile(n.path(), mode, 0)
	if err != nil {
		return fuse.ToStatus(err)
	}
	now, err := c.server.version(int(f.Fd()))
	if err != nil {
		f.Close()
		return fuse.ToStatus(err)
	}
	n.mu.Lock()
	same := n.seen == now
	n.seen = now
	if mode != unix.O_RDONLY {
		n.writers++
	}
	n.mu.Unlock()
	if same {
		out.OpenFlags |= fuse.FOPEN_KEEP_CACHE
	} else {
		_ = c.kernel.InodeNotify(n.number, -1, 0) // attributes; the open drops the data
	}
	out.Fh = c.open(&handle{inode: n, file: f, writable: mode != unix.O_RDONLY})
	return fuse.OK
}

// Read reads from the server and lays the data over it that the client holds back.
func (c *Client) Read(cancelled <-chan struct{}, in *fuse.ReadIn, buf []byte) (fuse.ReadResult, fuse.Status) {
	if s := c.traffic.request(OpRead, in.Pid); !s.Ok() {
		return nil, s
	}
	h := c.handle(in.Fh)
	n := h.inode
	c.server.pace(int(in.Size), cancelled)
	n.mu.Lock()
	defer n.mu.Unlock()
	if _, err := n.stat(); err != nil {
		return nil, fuse.ToStatus(err)
	}
	buf = buf[:min(len(buf), int(in.Size))]
	at := int64(in.Offset)
	read, err := h.file.ReadAt(buf, at)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, fuse.ToStatus(err)
	}
	c.traffic.read(read)
	if n.dirty != nil {
		clear(buf[read:])
		read = max(read, int(min(n.dirty.size()-at, int64(len(buf)))))
		if err := n.dirty.read(buf[:read], at); err != nil {
			return nil, fuse.ToStatus(err)
		}
	}
	return fuse.ReadResultData(buf[:read]), fuse.OK
}

// Write holds data back, or sends it to the server.
func (c *Client) Write(_ <-chan struct{}, in *fuse.WriteIn, data []byte) (uint32, fuse.Status) {
	h := c.handle(in.Fh)
	n := h.inode
	if c.options.WriteBack {
		n.mu.Lock()
		defer n.mu.Unlock()
		if n.dirty == nil {
			d, err := newDirty()
			if err != nil {
				return 0, fuse.ToStatus(err)
			}
			n.dirty = d
		}
		return uint32(len(data)), fuse.ToStatus(n.dirty.write(data, int64(in.Offset)))
	}
	if s := c.traffic.request(OpWrite, in.Pid); !s.Ok() {
		return 0, s
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if _, err := n.stat(); err != nil {
		return 0, fuse.ToStatus(err)
	}
	written, s := c.transfer(n, h.file, data, int64(in.Offset))
	if written > 0 {
		return uint32(written), fuse.OK
	}
	return 0, s
}

// transfer writes to the server as much as the client's fault permits. The caller holds
// n.mu.
func (c *Client) transfer(n *inode, to *os.File, data []byte, at int64) (int, fuse.Status) {
	room, s := c.traffic.room(len(data))
	written, err := to.WriteAt(data[:room], at)
	c.server.changed(n.key)
	n.seen = version{}
	if err != nil {
		return written, fuse.ToStatus(err)
	}
	return written, s
}

// writeBack sends the data that the client holds back of a file to the server. An error
// loses it, and is returned once, as NFS does.
func (c *Client) writeBack(n *inode, thread uint32) fuse.Status {
	n.mu.Lock()
	held := n.dirty != nil
	n.mu.Unlock()
	if !held {
		return fuse.OK
	}
	// Without the lock: the request may hang, and another thread may ask for attributes.
	if s := c.traffic.request(OpWrite, thread); !s.Ok() {
		if s != fuse.EINTR {
			n.mu.Lock()
			defer n.mu.Unlock()
			n.drop()
		}
		return s
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.dirty == nil {
		return fuse.OK
	}
	defer n.drop()
	if _, err := n.stat(); err != nil {
		return fuse.ToStatus(err)
	}
	to, err := os.OpenFile(n.path(), os.O_WRONLY, 0)
	if err != nil {
		return fuse.ToStatus(err)
	}
	defer to.Close()
	buf := make([]byte, 1<<20)
	for _, e := range n.dirty.extents {
		for at := e.start; at < e.end; {
			part := buf[:min(int64(len(buf)), e.end-at)]
			if _, err := n.dirty.data.ReadAt(part, at); err != nil {
				return fuse.ToStatus(err)
			}
			if _, s := c.transfer(n, to, part, at); !s.Ok() {
				return s
			}
			at += int64(len(part))
		}
	}
	return fuse.OK
}

// drop forgets the data that is held back. The caller holds n.mu.
func (n *inode) drop() {
	if n.dirty != nil {
		n.dirty.data.Close()
		n.dirty = nil
	}
}

// Flush is called for each close of a descriptor.
func (c *Client) Flush(_ <-chan struct{}, in *fuse.FlushIn) fuse.Status {
	h := c.handle(in.Fh)
	c.unlock(lockOwner{h.inode.key, in.LockOwner, false})
	if !h.writable {
		return fuse.OK
	}
	return c.writeBack(h.inode, in.Pid)
}

// Fsync makes a file durable at the server.
func (c *Client) Fsync(_ <-chan struct{}, in *fuse.FsyncIn) fuse.Status {
	if s := c.traffic.request(OpFsync, in.Pid); !s.Ok() {
		return s
	}
	h := c.handle(in.Fh)
	if s := c.writeBack(h.inode, in.Pid); !s.Ok() {
		return s
	}
	return fuse.ToStatus(h.file.Sync())
}

// Release is called when the last descriptor of an open file is closed, and the last
// mapping ended.
func (c *Client) Release(_ <-chan struct{}, in *fuse.ReleaseIn) {
	h := c.handle(in.Fh)
	if in.ReleaseFlags&fuse.FUSE_RELEASE_FLOCK_UNLOCK != 0 {
		c.unlock(lockOwner{h.inode.key, in.LockOwner, true})
	}
	if h.writable && h.inode.lastWriter() {
		_ = c.writeBack(h.inode, 0) // of a mapping; no caller waits for the result
	}
	c.release(in.Fh)
}

// lastWriter removes a handle that can write and reports whether it was the last one. A
// release comes late: a file that was opened again since may hold data back already.
func (n *inode) lastWriter() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.writers--
	return n.writers == 0
}

// Fallocate reserves room at the server.
func (c *Client) Fallocate(_ <-chan struct{}, in *fuse.FallocateIn) fuse.Status {
	if s := c.traffic.request(OpAllocate, in.Pid); !s.Ok() {
		return s
	}
	h := c.handle(in.Fh)
	if s := c.writeBack(h.inode, in.Pid); !s.Ok() {
		return s
	}
	c.server.changed(h.inode.key)
	return fuse.ToStatus(unix.Fallocate(int(h.file.Fd()), in.Mode, int64(in.Offset), int64(in.Length)))
}
