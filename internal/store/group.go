package store

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/share"
)

// A shared store belongs to a group: its members open, own and write it, one after the
// other and at the same time.
//
//	STORE/          2770, of the group that store.json records
//	  run/          sockets of the owner, where every member reaches them
//	  log/, views/  files of the log's server and of Pebble, which choose their own modes
//	  the rest      files that are made with the group's modes: see package share
//
// A file has the group's mode before it gets its name, so a killed member leaves nothing
// that keeps the others out. The server and Pebble do not work in this order. Their files
// are given to the group as soon as they are made, and again when a member takes the store
// and when it leaves it. Files that a kill left closed are found before the server starts
// over them: see [reachable].
const runName = "run"

// groupOf finds a group by name or number.
func groupOf(name string) (gid int, err error) {
	if gid, err := strconv.Atoi(name); err == nil && gid >= 0 {
		return gid, nil
	}
	g, err := user.LookupGroup(name)
	if err != nil {
		return 0, fmt.Errorf("%w: %w", ErrLocation, err)
	}
	return strconv.Atoi(g.Gid)
}

// makeShared turns a new directory into one of the named group or, without a name, of the
// directory's own group.
func makeShared(dir, group string) (*ownerRecord, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	info, err := d.Stat()
	if err != nil {
		return nil, err
	}
	gid := -1
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		gid = int(st.Gid)
	}
	if group != "" {
		if gid, err = groupOf(group); err != nil {
			return nil, err
		}
	}
	// The name of a socket has at most 107 bytes.
	if long := len(filepath.Join(dir, runName, "o4194304-ffffff.log")); long > 107 {
		return nil, fmt.Errorf("%w: the path of %s is %d bytes too long for sockets in it: choose a shorter one", ErrLocation, dir, long-107)
	}
	if os.Geteuid() != 0 && !memberOf(gid) {
		return nil, fmt.Errorf("share %s with group %d: %w: user %d is no member of it", dir, gid, fs.ErrPermission, os.Geteuid())
	}
	if err := d.Chown(-1, gid); err != nil {
		return nil, err
	}
	if err := d.Chmod(0o770 | fs.ModeSetgid); err != nil {
		return nil, err
	}
	for _, name := range []string{"log", "data", "blobs", "views", runName} {
		if err := share.MkdirAll(filepath.Join(dir, name), 0o700); err != nil {
			return nil, err
		}
	}
	me := thisUser()
	me.GID, me.Shared = gid, true
	return me, nil
}

// group returns the group that a store is shared with.
func (s *Store) group() (gid int, shared bool) {
	if s.holder == nil || !s.holder.Shared {
		return 0, false
	}
	return s.holder.GID, true
}

// sockets returns the directory of the owner's sockets, which every possible owner of the
// store can reach.
func (s *Store) sockets() string {
	if _, shared := s.group(); shared {
		return filepath.Join(s.Location, runName)
	}
	return s.Runtime
}

// ownerAfter returns the owner of a store that is recovered in dir: the group that shared
// it, or this user.
func ownerAfter(dir string) *ownerRecord {
	if id, err := identityIn(dir); err == nil && id.Owner != nil && id.Owner.Shared {
		return id.Owner
	}
	return thisUser()
}

// foreignMade returns the directories in which the server and Pebble make files.
func foreignMade(dir string) []string {
	return []string{filepath.Join(dir, "log"), filepath.Join(dir, "views")}
}

const (
	// shareEvery is the interval between checks of all files without kernel notices.
	shareEvery = time.Second
	// shareWait bounds the wait for a filesystem that may not answer.
	shareWait = 5 * time.Second
)

// shareFiles shares the files that this process makes in the log and the views of a shared
// store with the group, as soon as they are made, until stop is called; stop shares the
// rest. It returns an error if this process cannot write the log: see [reachable].
func (s *Store) shareFiles(ctx context.Context, dir string) (stop func(), err error) {
	if _, shared := s.group(); !shared {
		return func() {}, nil
	}
	var stops []func()
	stop = func() {
		for _, each := range stops {
			each()
		}
	}
	for _, top := range foreignMade(dir) {
		stops = append(stops, s.shareTree(ctx, dir, top))
	}
	if err := reachable(dir); err != nil {
		stop()
		return nil, err
	}
	return stop, nil
}

// shareTree is shareFiles for one directory. Each kernel notice triggers a check of the whole
// directory.
func (s *Store) shareTree(ctx context.Context, dir, top string) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	first, done := make(chan struct{}), make(chan struct{})
	told, watch, end := notices()
	look := func() {
		if err := errors.Join(share.Dirs(dir, top), share.Tree(top, watch)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			s.opts.Logger.Warn("files not shared with the group; retrying", "directory", top, "error", err)
		}
	}
	go func() {
		defer close(done)
		defer end()
		look()
		close(first)
		tick := time.NewTicker(shareEvery)
		defer tick.Stop()
		for {
			select {
			case <-told:
			case <-tick.C:
			case <-ctx.Done():
				look()
				return
			}
			look()
		}
	}()
	s.answered(first, top)
	return func() {
		cancel()
		s.answered(done, top)
	}
}

// answered waits for the check of a directory, up to [shareWait].
func (s *Store) answered(looked <-chan struct{}, dir string) {
	timer := time.NewTimer(shareWait)
	defer timer.Stop()
	select {
	case <-looked:
	case <-timer.C:
		s.opts.Logger.Warn("files not shared with the group: the filesystem does not answer", "directory", dir)
	}
}

// notices returns a channel of kernel notices about new entries in the directories that
// watch was called with. If the kernel refuses, as when this user has too many watches,
// no notice comes.
func notices() (told <-chan struct{}, watch func(path string) error, end func()) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, nil, func() {}
	}
	f := os.NewFile(uintptr(fd), "inotify")
	news := make(chan struct{}, 1)
	go func() {
		buffer := make([]byte, 64<<10)
		for {
			if _, err := f.Read(buffer); err != nil {
				return // it was closed
			}
			select {
			case news <- struct{}{}:
			default: // a check is pending already
			}
		}
	}()
	watch = func(path string) error {
		// A directory that cannot be watched is checked every second.
		_, _ = unix.InotifyAddWatch(fd, path, unix.IN_CREATE|unix.IN_MOVED_TO|unix.IN_ONLYDIR)
		return nil
	}
	return news, watch, func() { _ = f.Close() }
}

// reachable returns an error that names the first file of the log that this process
// cannot write: the log's server would take that file for a damaged one.
func reachable(dir string) error {
	return filepath.WalkDir(filepath.Join(dir, "log"), func(path string, e fs.DirEntry, err error) error {
		if err == nil && (e.IsDir() || e.Type().IsRegular()) {
			err = unix.Faccessat(unix.AT_FDCWD, path, unix.R_OK|unix.W_OK, unix.AT_EACCESS)
		}
		if err == nil || errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		whose := "another user"
		if info, serr := os.Lstat(path); serr == nil {
			if st, ok := info.Sys().(*syscall.Stat_t); ok {
				whose = fmt.Sprintf("user %d", st.Uid)
			}
		}
		return fmt.Errorf("%s: %w: %s was killed before it shared the file with the group: as that user, run `ckptstore ls --store %s` once", path, err, whose, dir)
	})
}

// members is a listener that accepts only members of a group and the superuser.
type members struct {
	net.Listener
	gid int
}

// Accept implements [net.Listener].
func (m members) Accept() (net.Conn, error) {
	for {
		conn, err := m.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if ok, err := isMember(conn, m.gid); ok && err == nil {
			return conn, nil
		}
		_ = conn.Close()
	}
}

// isMember asks the kernel whether the peer of a connection belongs to a group.
func isMember(conn net.Conn, gid int) (ok bool, err error) {
	u, isUnix := conn.(*net.UnixConn)
	if !isUnix {
		return false, nil
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return false, err
	}
	cerr := raw.Control(func(fd uintptr) {
		var cred *unix.Ucred
		if cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err != nil {
			return
		}
		if ok = cred.Uid == 0 || int(cred.Uid) == os.Geteuid() || int(cred.Gid) == gid; ok {
			return
		}
		var groups []uint32
		groups, err = peerGroups(int(fd))
		ok = slices.Contains(groups, uint32(gid)) //nolint:gosec // of a group
	})
	return ok, errors.Join(err, cerr)
}

func emptyDir(dir string) bool {
	entries, err := os.ReadDir(dir)
	return err == nil && len(entries) == 0
}
