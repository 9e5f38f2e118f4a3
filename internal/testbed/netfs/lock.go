package netfs

import (
	"errors"
	"math"
	"os"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// lockEvery is how often a client asks again for a lock that it waits for. NFS clients
// ask again, too.
const lockEvery = 5 * time.Millisecond

// lockGrace is how long a request that does not wait asks again before it fails. FUSE
// reports the last close of a file after the close has returned, so a lock that a
// process has just freed may still be there.
const lockGrace = 50 * time.Millisecond

// lockOwner identifies the holder of locks within one client. Each has an open file of
// its own at the server, so the locks of the server's filesystem do the work: flock for
// flock, and locks of open files (OFD) for those of fcntl.
type lockOwner struct {
	file  key
	owner uint64
	flock bool
}

// lockFile returns the open file of an owner.
func (c *Client) lockFile(n *inode, o lockOwner) (*os.File, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if f := c.locks[o]; f != nil {
		return f, nil
	}
	f, err := os.OpenFile(n.path(), os.O_RDWR, 0)
	if err == nil {
		c.locks[o] = f
	}
	return f, err
}

// unlock frees all locks of an owner.
func (c *Client) unlock(o lockOwner) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if f := c.locks[o]; f != nil {
		f.Close()
		delete(c.locks, o)
	}
}

// SetLk takes or frees a lock, or returns EAGAIN.
func (c *Client) SetLk(cancel <-chan struct{}, in *fuse.LkIn) fuse.Status {
	grace := time.NewTimer(lockGrace)
	defer grace.Stop()
	return c.lockUntil(cancel, grace.C, in)
}

// SetLkw waits for a lock until the caller is interrupted.
func (c *Client) SetLkw(cancel <-chan struct{}, in *fuse.LkIn) fuse.Status {
	return c.lockUntil(cancel, nil, in)
}

// lockUntil asks for a lock until it is free, the limit passes (EAGAIN) or the request is
// canceled (EINTR).
func (c *Client) lockUntil(cancel <-chan struct{}, limit <-chan time.Time, in *fuse.LkIn) fuse.Status {
	tick := time.NewTicker(lockEvery)
	defer tick.Stop()
	for {
		if s := c.traffic.request(OpLock, in.Pid); !s.Ok() {
			return s
		}
		if err := c.lock(in); !errors.Is(err, unix.EAGAIN) {
			return fuse.ToStatus(err)
		}
		select {
		case <-tick.C:
		case <-limit:
			return fuse.EAGAIN
		case <-cancel:
			return fuse.EINTR
		}
	}
}

// lock asks the server's filesystem once.
func (c *Client) lock(in *fuse.LkIn) error {
	n := c.inode(in.NodeId)
	o := lockOwner{n.key, in.Owner, in.LkFlags&fuse.FUSE_LK_FLOCK != 0}
	f, err := c.lockFile(n, o)
	if err != nil {
		return err
	}
	if !o.flock {
		return unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, flockT(in))
	}
	how := map[uint32]int{unix.F_RDLCK: unix.LOCK_SH, unix.F_WRLCK: unix.LOCK_EX, unix.F_UNLCK: unix.LOCK_UN}[in.Lk.Typ]
	return unix.Flock(int(f.Fd()), how|unix.LOCK_NB)
}

// flockT translates a lock: the protocol names its last byte, fcntl its length, with 0
// for up to the end of the file.
func flockT(in *fuse.LkIn) *unix.Flock_t {
	l := &unix.Flock_t{Type: int16(in.Lk.Typ), Start: int64(in.Lk.Start)}
	if in.Lk.End < math.MaxInt64 {
		l.Len = int64(in.Lk.End-in.Lk.Start) + 1
	}
	return l
}

// GetLk returns a lock that conflicts with the given one. Its process is not named: it
// may be on another node.
func (c *Client) GetLk(_ <-chan struct{}, in *fuse.LkIn, out *fuse.LkOut) fuse.Status {
	if s := c.traffic.request(OpLock, in.Pid); !s.Ok() {
		return s
	}
	n := c.inode(in.NodeId)
	f, err := c.lockFile(n, lockOwner{n.key, in.Owner, false})
	if err != nil {
		return fuse.ToStatus(err)
	}
	l := flockT(in)
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, l); err != nil {
		return fuse.ToStatus(err)
	}
	out.Lk = fuse.FileLock{Start: uint64(l.Start), End: math.MaxInt64, Typ: uint32(l.Type)}
	if l.Len > 0 {
		out.Lk.End = uint64(l.Start + l.Len - 1)
	}
	return fuse.OK
}
