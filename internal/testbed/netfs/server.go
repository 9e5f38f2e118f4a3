// Package netfs is a network filesystem for tests: one directory that several clients
// mount, with the caches and the visibility rules of NFS.
//
//	server   a directory of this machine, and who changed which file last
//	client   one mount of it, in user space (FUSE), with caches, unwritten data and
//	         locks of its own
//	fault    what a client's requests meet: an error, a full disk, silence
//
// # Caches
//
// A client trusts attributes, names, and the absence of names for the times of its
// [Options]. Until then another client's change is invisible to it: a file that it has
// not found stays missing, a stat shows the old size. Opening a file asks the server
// (close-to-open): after an open, attributes and data are those of the last close. The
// kernel keeps these caches, per mount, as it does for NFS.
//
// With WriteBack, written data stays at the client until close, fsync, rename, link,
// truncate or chmod. Names and truncation reach the server at once. A client that dies
// loses what it has not written back.
//
// Creation with O_EXCL, mkdir, link and rename are one step at the server, so of two
// clients one succeeds.
//
// A file that another client has removed is stale: an open descriptor returns ESTALE.
// A client that removes its own open file can still use it.
//
// # What differs from NFS
//
// A client never writes back early. A real one does when it is short of memory or has
// held data for 30 s; a test sees the latest moment that the protocol permits. Locks of a client
// that dies are free at once, not after a lease, and clients never lose locks. There are
// no delegations, no .nfsXXXX names for removed open files, no uid squashing and no
// extended attributes. The server never restarts. Timestamps are those of this machine's
// clock for all.
package netfs

import (
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Options are how one client mounts the filesystem. With the zero value it caches
// nothing and writes at once, so all clients agree, as the processes of one machine do.
type Options struct {
	// AttrCache is how long sizes, times and modes are trusted (acregmin to acregmax).
	AttrCache time.Duration
	// EntryCache is how long a name is trusted to lead to the same file (acdirmin to
	// acdirmax).
	EntryCache time.Duration
	// NegativeCache is how long a name is trusted not to exist (lookupcache).
	NegativeCache time.Duration
	// ListingRevalidates has the opening of a directory forget the names that were
	// missing in it, as a client does that finds a directory changed. Without it only
	// time helps.
	ListingRevalidates bool
	// WriteBack holds written data until close or fsync.
	WriteBack bool
	// LocalLocks keeps flock and fcntl locks on the client (local_lock=all, localflock),
	// so two clients can hold one lock.
	LocalLocks bool
}

// NFS returns the behavior of a mount with default options: caches of 3 s for files
// and 30 s for directories, and data written back on close.
func NFS() Options {
	return Options{
		AttrCache: 3 * time.Second, EntryCache: 30 * time.Second, NegativeCache: 30 * time.Second,
		ListingRevalidates: true, WriteBack: true,
	}
}

// key identifies a file of the server.
type key struct{ dev, ino uint64 }

func keyOf(st *syscall.Stat_t) key { return key{uint64(st.Dev), st.Ino} } //nolint:unconvert // Dev is 32 bits wide on some machines

// Server is the directory that clients mount, and their common state.
type Server struct {
	root *os.File

	mu       sync.Mutex
	versions map[key]uint64 // changes of content, by clients
	rate     int64          // bytes that all clients together read in a second; 0: any number
	busy     time.Time      // until when the reads so far take
}

// Throttle limits what all clients together read in a second, from now on; 0: not at all.
func (s *Server) Throttle(bytesPerSecond int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rate, s.busy = bytesPerSecond, time.Time{}
}

// pace waits as long as a read of n bytes takes, or until the kernel no longer waits for it.
func (s *Server) pace(n int, cancelled <-chan struct{}) {
	s.mu.Lock()
	if s.rate == 0 {
		s.mu.Unlock()
		return
	}
	if now := time.Now(); s.busy.Before(now) {
		s.busy = now
	}
	s.busy = s.busy.Add(time.Duration(float64(n) / float64(s.rate) * float64(time.Second)))
	until := s.busy
	s.mu.Unlock()
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-cancelled:
	}
}

// NewServer returns a server of the files of dir. The directory may also be used
// directly: that is another client, without caches.
func NewServer(dir string) (*Server, error) {
	root, err := os.OpenFile(dir, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, fmt.Errorf("serve files: %w", err)
	}
	return &Server{root: root, versions: map[key]uint64{}}, nil
}

// Close ends the server. Clients that are mounted keep working.
func (s *Server) Close() error { return s.root.Close() }

// changed records that a client has changed the content of a file.
func (s *Server) changed(k key) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.versions[k]++
}

// version is the state of a file's content. It does not rest on timestamps alone: two
// changes may fall into one tick of the clock.
type version struct {
	size         int64
	mtime, ctime syscall.Timespec
	count        uint64
}

// version returns the state of the open file fd.
func (s *Server) version(fd int) (v version, err error) {
	var st syscall.Stat_t
	if err := syscall.Fstat(fd, &st); err != nil {
		return v, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return version{st.Size, st.Mtim, st.Ctim, s.versions[keyOf(&st)]}, nil
}
