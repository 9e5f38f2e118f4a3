package netfs

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// unmountLimit bounds the end of a mount. It passes only if a process still uses it.
const unmountLimit = 10 * time.Second

// maxTransfer is the largest read or write of one request.
const maxTransfer = 1 << 20

// Client is one mount of a server's files.
type Client struct {
	fuse.RawFileSystem // answers every request that Client does not know

	server  *Server
	options Options
	at      string
	kernel  *fuse.Server
	ended   chan struct{} // closed when the kernel sends no further request
	traffic *traffic

	// names is held while a name is resolved, and exclusively while this client removes
	// one: its own removals do not make a file stale.
	names sync.RWMutex

	mu      sync.Mutex
	inodes  map[uint64]*inode // by the number that the kernel knows
	known   map[key]*inode
	last    uint64 // number of an inode or a handle
	handles map[uint64]*handle
	locks   map[lockOwner]*os.File
}

var _ fuse.RawFileSystem = (*Client)(nil)

// inode is a file that the kernel knows. Like an NFS file handle it stands for the file
// itself, whatever names it has.
type inode struct {
	number uint64
	key    key
	fd     int    // O_PATH; it keeps the key from being used for another file
	refs   uint64 // of the kernel; guarded by Client.mu

	mu       sync.Mutex
	dirty    *dirty
	seen     version         // of the content that the kernel may have cached
	writers  int             // handles that can write
	missing  map[string]bool // names for which the kernel may have cached their absence
	unlinked bool            // this client removed the last name, or is about to
}

// path returns a path of the file that can be opened.
func (n *inode) path() string { return fmt.Sprintf("/proc/self/fd/%d", n.fd) }

// handle is an open file or directory.
type handle struct {
	inode    *inode
	file     *os.File
	writable bool
	entries  []fuse.DirEntry // of a directory
}

// Mount mounts the server's files at a directory, in the mount namespace of the calling
// thread. That namespace need not contain the server's directory.
func (s *Server) Mount(at string, o Options) (*Client, error) {
	root, err := unix.FcntlInt(s.root.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("mount %s: %w", s.root.Name(), err)
	}
	c := &Client{
		RawFileSystem: fuse.NewDefaultRawFileSystem(),
		server:        s, options: o, at: at, ended: make(chan struct{}), traffic: newTraffic(),
		inodes: map[uint64]*inode{}, known: map[key]*inode{}, last: fuse.FUSE_ROOT_ID,
		handles: map[uint64]*handle{}, locks: map[lockOwner]*os.File{},
	}
	var st syscall.Stat_t
	if err = syscall.Fstat(root, &st); err == nil {
		n := &inode{number: fuse.FUSE_ROOT_ID, key: keyOf(&st), fd: root, refs: 1, missing: map[string]bool{}}
		c.inodes[n.number], c.known[n.key] = n, n
		err = c.serve()
	}
	if err != nil {
		_ = unix.Close(root)
		return nil, fmt.Errorf("mount %s at %s: %w", s.root.Name(), at, err)
	}
	return c, nil
}

// serve mounts and starts to answer the kernel. Package fuse could do all of that, but
// commands of nodes would inherit its descriptor, and a client whose process was killed
// would then look like a server that is silent for ever.
func (c *Client) serve() error {
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	options := fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions,max_read=%d", fd, maxTransfer)
	if err := unix.Mount(c.server.root.Name(), c.at, "fuse.netfs", unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
		_ = unix.Close(fd)
		return err
	}
	c.kernel, err = fuse.NewServer(c, fmt.Sprintf("/dev/fd/%d", fd), &fuse.MountOptions{
		DisableXAttrs: true, DisableReadDirPlus: true, EnableLocks: !c.options.LocalLocks, MaxWrite: maxTransfer,
	})
	if err != nil {
		return errors.Join(err, unix.Unmount(c.at, unix.MNT_DETACH))
	}
	go func() {
		defer close(c.ended)
		c.kernel.Serve()
	}()
	if err := refusePolls(c.at); err != nil {
		err = errors.Join(err, unix.Unmount(c.at, unix.MNT_DETACH))
		<-c.ended
		return err
	}
	return nil
}

// refusePolls has the kernel learn that the files of a mount cannot be polled. Otherwise
// this process could block in a request to poll a file that it serves itself.
func refusePolls(mount string) error {
	// Package fuse answers for this name itself.
	fd, err := unix.Open(mount+"/.go-fuse-epoll-hack", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	_, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
	return errors.Join(err, unix.Close(fd))
}

// Abort fails all requests from now on, also those that hang, and drops what was not
// written back: the client has lost its power.
func (c *Client) Abort() { c.traffic.set(nil, true) }

// Unmount ends the mount. It must be called like [Server.Mount], in the same mount
// namespace. Files that are open stay usable until they are closed, and Unmount waits
// for that, within limits.
func (c *Client) Unmount() error {
	if err := unix.Unmount(c.at, unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount %s: %w", c.at, err)
	}
	limit := time.NewTimer(unmountLimit)
	defer limit.Stop()
	select {
	case <-c.ended:
	case <-limit.C:
		return fmt.Errorf("unmount %s: a process has used it for %v; close its files", c.at, unmountLimit)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, h := range c.handles {
		h.file.Close()
	}
	for _, l := range c.locks {
		l.Close()
	}
	for _, n := range c.inodes {
		n.close()
	}
	return nil
}

// close frees what the inode holds.
func (n *inode) close() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.dirty != nil {
		n.dirty.data.Close()
		n.dirty = nil
	}
	_ = unix.Close(n.fd)
}

// inode returns the inode of a number that the kernel sent.
func (c *Client) inode(number uint64) *inode {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.inodes[number]
}

// find returns the inode of a file, if the kernel knows it.
func (c *Client) find(k key) *inode {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.known[k]
}

// remember returns the inode of a file for one more reference of the kernel. It takes
// over fd.
func (c *Client) remember(fd int, k key) *inode {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.known[k]
	if n == nil {
		c.last++
		n = &inode{number: c.last, key: k, fd: fd, missing: map[string]bool{}}
		c.inodes[n.number], c.known[k] = n, n
	} else {
		_ = unix.Close(fd)
	}
	n.refs++
	return n
}

// Forget drops references of the kernel.
func (c *Client) Forget(number, refs uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.inodes[number]
	if n == nil || number == fuse.FUSE_ROOT_ID {
		return
	}
	if n.refs -= refs; n.refs == 0 {
		delete(c.inodes, number)
		delete(c.known, n.key)
		n.close()
	}
}

// open registers an open file and returns its number.
func (c *Client) open(h *handle) uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.last++
	c.handles[c.last] = h
	return c.last
}

func (c *Client) handle(number uint64) *handle {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.handles[number]
}

// release forgets an open file and closes it.
func (c *Client) release(number uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if h := c.handles[number]; h != nil {
		h.file.Close()
		delete(c.handles, number)
	}
}

// String names the filesystem in messages of package fuse.
func (c *Client) String() string { return "netfs " + c.server.root.Name() }
