package netfs

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// Op is a kind of request to the server.
type Op string

// The kinds of requests. Requests that the kernel answers from its caches are none.
const (
	OpLookup   Op = "lookup"
	OpGetAttr  Op = "getattr"
	OpSetAttr  Op = "setattr"
	OpCreate   Op = "create" // files, devices and sockets
	OpMkdir    Op = "mkdir"
	OpSymlink  Op = "symlink"
	OpReadlink Op = "readlink"
	OpLink     Op = "link"
	OpRename   Op = "rename"
	OpRemove   Op = "remove" // unlink and rmdir
	OpOpen     Op = "open"
	OpRead     Op = "read"
	OpWrite    Op = "write" // the transfer to the server: with WriteBack at close or fsync
	OpFsync    Op = "fsync" // of a file or a directory
	OpAllocate Op = "allocate"
	OpList     Op = "list" // the opening of a directory
	OpLock     Op = "lock"
	OpStatFS   Op = "statfs"
)

// killedEvery is how often a hanging request looks whether its process was killed.
const killedEvery = 10 * time.Millisecond

// Fault is what requests of a client meet.
type Fault struct {
	// Ops are the requests that meet the fault; none stands for all.
	Ops []Op
	// Err is their error.
	Err syscall.Errno
	// Hang has them wait instead of returning Err, until the fault is healed or the
	// calling process is killed: a hard mount whose server is silent.
	Hang bool
	// AfterBytes lets this many bytes be written first. If it is not 0, only writes meet
	// the fault; see [Full].
	AfterBytes int64
}

// Full returns the fault of a disk that has room for so many more bytes.
func Full(room int64) Fault {
	if room <= 0 {
		return Fault{Ops: []Op{OpWrite}, Err: unix.ENOSPC}
	}
	return Fault{Err: unix.ENOSPC, AfterBytes: room}
}

// Counters are what a client has requested from the server since it was mounted.
type Counters struct {
	Ops          map[Op]int64
	BytesRead    int64
	BytesWritten int64
	Hanging      int // requests that hang now
}

// traffic counts the requests of a client and applies its fault.
type traffic struct {
	mu     sync.Mutex
	count  Counters
	fault  *Fault
	left   int64         // of the fault's AfterBytes
	healed chan struct{} // closed when the fault is replaced
	off    bool          // the client has no power: requests fail
}

func newTraffic() *traffic {
	return &traffic{count: Counters{Ops: map[Op]int64{}}, healed: make(chan struct{})}
}

// Break has requests of the client meet a fault from now on, instead of any earlier
// fault.
func (c *Client) Break(f Fault) { c.traffic.set(&f, false) }

// Heal ends the fault. Requests that hang continue.
func (c *Client) Heal() { c.traffic.set(nil, false) }

// Counters returns what the client has requested so far.
func (c *Client) Counters() Counters {
	c.traffic.mu.Lock()
	defer c.traffic.mu.Unlock()
	n := c.traffic.count
	n.Ops = maps.Clone(n.Ops)
	return n
}

func (t *traffic) set(f *Fault, off bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.fault, t.off = f, t.off || off
	if f != nil {
		t.left = f.AfterBytes
	}
	close(t.healed)
	t.healed = make(chan struct{})
}

// request counts a request of a thread and returns the error it meets. thread is 0 for
// requests that no process waits for.
func (t *traffic) request(op Op, thread uint32) fuse.Status {
	for first := true; ; first = false {
		t.mu.Lock()
		if first {
			t.count.Ops[op]++
		}
		f, healed := t.fault, t.healed
		switch {
		case t.off:
			t.mu.Unlock()
			return fuse.EIO
		case f == nil || f.AfterBytes > 0 || len(f.Ops) > 0 && !slices.Contains(f.Ops, op):
			t.mu.Unlock()
			return fuse.OK
		case !f.Hang:
			t.mu.Unlock()
			return fuse.Status(f.Err)
		}
		t.count.Hanging++
		t.mu.Unlock()
		killed := hang(healed, thread)
		t.mu.Lock()
		t.count.Hanging--
		t.mu.Unlock()
		if killed {
			return fuse.EINTR
		}
	}
}

// hang returns when the fault is healed, or true when the calling thread has been
// killed. FUSE announces only the first signal of a request, and a hard mount is
// interrupted by SIGKILL only, so /proc is asked.
func hang(healed <-chan struct{}, thread uint32) bool {
	tick := time.NewTicker(killedEvery)
	defer tick.Stop()
	for {
		select {
		case <-healed:
			return false
		case <-tick.C:
			if thread != 0 && killed(thread) {
				return true
			}
		}
	}
}

// killed reports whether SIGKILL is pending for a thread, or the thread has ended.
func killed(thread uint32) bool {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", thread))
	if err != nil {
		return true
	}
	for line := range strings.Lines(string(status)) {
		name, mask, _ := strings.Cut(line, ":")
		if name == "SigPnd" || name == "ShdPnd" {
			pending, err := strconv.ParseUint(strings.TrimSpace(mask), 16, 64)
			if err == nil && pending&(1<<(unix.SIGKILL-1)) != 0 {
				return true
			}
		}
	}
	return false
}

// room returns how many of n bytes may be written to the server, and the error that
// the others meet.
func (t *traffic) room(n int) (int, fuse.Status) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.off {
		return 0, fuse.EIO
	}
	status := fuse.OK
	if t.fault != nil && t.fault.AfterBytes > 0 {
		if int64(n) > t.left {
			n, status = int(t.left), fuse.Status(t.fault.Err)
		}
		t.left -= int64(n)
	}
	t.count.BytesWritten += int64(n)
	return n, status
}

func (t *traffic) read(n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.count.BytesRead += int64(n)
}
