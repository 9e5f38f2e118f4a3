package store

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/durable"
	"github.com/ckptstore/ckptstore/internal/private"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/projections"
)

// ErrUntrusted reports a store that users other than this one can write to. This process does not
// open it: it would act on what they put there, with this user's rights. The next step is
// `ckptstore config trust`.
var ErrUntrusted = problem.New(problem.Denied, "untrusted store")

// ownerRecord is the owner of a store, as store.json records it.
type ownerRecord struct {
	UID    int  `json:"uid"`
	GID    int  `json:"gid"`
	Shared bool `json:"shared,omitempty"` // members of GID may write
}

// thisUser returns the record for a store that this process makes.
func thisUser() *ownerRecord { return &ownerRecord{UID: os.Geteuid(), GID: os.Getegid()} }

// parts are the files and directories that decide who can write to a store, except viewsPart, which
// may be on a failing filesystem: see [mayOpen].
var parts = []string{".", "store.json", lockName, "log", "data", "blobs", runName}

const (
	viewsPart = "views"
	// viewsLook bounds the check of the views.
	viewsLook = time.Second
)

// mayWrite returns [ErrUntrusted] if users other than this one can write to the store in dir and
// this user has not trusted it. It checks a directory that is not a store yet like a store of this
// user alone.
func mayWrite(dir string) error { return mayWriteTo(dir, parts...) }

// mayOpen is [mayWrite] including the views. They are a cache: if their filesystem fails or does not
// answer, the store continues without them, and they decide nothing.
func mayOpen(dir string) error {
	if err := mayWrite(dir); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- mayWriteTo(dir, viewsPart) }()
	select {
	case err := <-ended:
		return err
	case <-time.After(viewsLook):
		return nil
	}
}

func mayWriteTo(dir string, names ...string) error {
	var h ownerRecord
	if id, err := identityIn(dir); err == nil && id.Owner != nil {
		h = *id.Owner
	}
	why := h.contradicted(dir, names)
	if why == nil {
		return nil
	}
	known, err := isTrusted(dir)
	if err != nil {
		return fmt.Errorf("%w %s: %w; whether it is trusted is not known: %w", ErrUntrusted, dir, why, err)
	}
	if known {
		return nil
	}
	return fmt.Errorf("%w %s: %w: correct that, or, if you trust everyone who can write there, run `ckptstore config trust %s`; `ckptstore ls --offline --store %s` reads it as it is", ErrUntrusted, dir, why, dir, dir)
}

// contradicted returns an error that names the first part of a store that does not have the recorded
// owner or mode. A missing part is no contradiction.
func (h ownerRecord) contradicted(dir string, names []string) error {
	for _, name := range names {
		path := filepath.Join(dir, name)
		info, err := os.Lstat(path)
		if errors.Is(err, fs.ErrNotExist) || err != nil && name == viewsPart {
			continue
		}
		if err == nil && info.Mode()&fs.ModeSymlink != 0 {
			if name != "." {
				continue // a link is refused where it would be followed
			}
			// The link's owner decides where it leads.
			if err = h.judge(path, info, true); err == nil {
				info, err = os.Stat(path)
			}
		}
		if err == nil {
			err = h.judge(path, info, name == ".")
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

func (h ownerRecord) judge(path string, info fs.FileInfo, top bool) error {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return fmt.Errorf("the owner of %s is not known", path)
	}
	mine := int(st.Uid) == os.Geteuid()
	ours := h.Shared && int(st.Gid) == h.GID
	perm := info.Mode().Perm()
	link := info.Mode()&fs.ModeSymlink != 0
	switch {
	case !link && perm&0o002 != 0:
		return fmt.Errorf("every user can write to %s (mode %#o)", path, perm)
	case h.Shared && !ours:
		return fmt.Errorf("%s belongs to group %d, and the store is shared with group %d", path, st.Gid, h.GID)
	case !mine && !h.Shared:
		return fmt.Errorf("%s belongs to user %d, and this process runs as user %d", path, st.Uid, os.Geteuid())
	case !mine && top && int(st.Uid) != h.UID:
		return fmt.Errorf("%s belongs to user %d, and user %d made the store", path, st.Uid, h.UID)
	case !mine && !memberOf(h.GID):
		return fmt.Errorf("%s is shared with group %d, of which user %d is no member", path, h.GID, os.Geteuid())
	case !link && !ours && perm&0o020 != 0 && (!mine || !privateGroup(int(st.Gid))):
		return fmt.Errorf("group %d can write to %s (mode %#o), and the store is not shared with it", st.Gid, path, perm)
	}
	return nil
}

// memberOf reports whether this process has a group's rights.
func memberOf(gid int) bool {
	groups, err := os.Getgroups()
	return gid == os.Getegid() || err == nil && slices.Contains(groups, gid)
}

// makeOwn makes a directory that only this user can write to. If this user had made it before, with
// a wide umask, it removes the write permission of others. It leaves a directory of another user as
// it is, for [mayWrite] to refuse.
func makeOwn(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	info, err := d.Stat()
	if err != nil || !ownedByMe(info) || info.Mode().Perm()&0o022 == 0 {
		return err
	}
	if known, err := isTrusted(dir); err != nil || known {
		return err
	}
	return d.Chmod(info.Mode() &^ 0o022)
}

func ownedByMe(info fs.FileInfo) bool {
	st, ok := info.Sys().(*syscall.Stat_t)
	return ok && int(st.Uid) == os.Geteuid()
}

// Trusted is a directory that this user trusts although others can write to it. The entry holds for
// the directory's owner at that time: a directory of another user in its place is not trusted. It
// omits device and inode numbers, since network and user-space filesystems change them.
type Trusted struct {
	Path string `json:"path"` // absolute, without symbolic links
	UID  int    `json:"uid"`
	GID  int    `json:"gid"`
}

// The list of trusted directories is one file per user:
//
//	$XDG_CONFIG_HOME/ckptstore/trusted       JSON, mode 0600
//	$XDG_CONFIG_HOME/ckptstore/trusted.lock  flock(2) of the process that changes it
const (
	trustedName = "trusted"
	// trustedLimit is the maximum size of a list in bytes.
	trustedLimit = 1 << 20
	// trustedWait bounds the wait for another process that changes the list, and for the
	// list's filesystem.
	trustedWait = 10 * time.Second
)

// Trust adds a directory to this user's list.
func Trust(ctx context.Context, dir string) (Trusted, error) {
	entry, err := entryOf(dir)
	if err == nil {
		err = changeTrusted(ctx, func(list []Trusted) ([]Trusted, error) {
			return append(without(list, entry.Path), entry), nil
		})
	}
	if err != nil {
		return entry, fmt.Errorf("trust %s: %w", dir, err)
	}
	return entry, nil
}

// Distrust removes a directory from this user's list. The directory need not exist. It returns
// [projections.ErrNotFound] for a directory that is not on the list.
func Distrust(ctx context.Context, dir string) error {
	path, err := filepath.Abs(dir)
	if err == nil {
		if resolved, rerr := filepath.EvalSymlinks(path); rerr == nil {
			path = resolved
		}
		err = changeTrusted(ctx, func(list []Trusted) ([]Trusted, error) {
			rest := without(list, path)
			if len(rest) == len(list) {
				return nil, &projections.NotFoundError{What: "trusted directory", Ref: path, Hint: "`ckptstore config trust --list` prints the list"}
			}
			return rest, nil
		})
	}
	if err != nil {
		return fmt.Errorf("stop trusting %s: %w", dir, err)
	}
	return nil
}

// TrustedDirs returns the directories on this user's list.
func TrustedDirs() ([]Trusted, error) {
	path, err := trustedFile()
	if err != nil {
		return nil, err
	}
	return readTrusted(path)
}

func without(list []Trusted, path string) []Trusted {
	return slices.DeleteFunc(slices.Clone(list), func(t Trusted) bool { return t.Path == path })
}

// EnvTrust is the variable that adds directories to the list, separated by colons, for
// this process and those that it starts. It is for containers, whose homes do not last.
const EnvTrust = "CKPTSTORE_TRUST"

// isTrusted reports whether a directory is named by [EnvTrust], or is on the list with its current
// owner. It returns an error if the home directory's filesystem does not answer within
// [trustedWait].
func isTrusted(dir string) (bool, error) {
	type answer struct {
		known bool
		err   error
	}
	ended := make(chan answer, 1)
	go func() {
		known, err := lookUpTrusted(dir)
		ended <- answer{known, err}
	}()
	select {
	case a := <-ended:
		return a.known, a.err
	case <-time.After(trustedWait):
		return false, fmt.Errorf("the list of trusted directories was not read within %v: look at the filesystem of the home directory", trustedWait)
	}
}

func lookUpTrusted(dir string) (bool, error) {
	for _, named := range filepath.SplitList(os.Getenv(EnvTrust)) {
		if sameDir(named, dir) {
			return true, nil
		}
	}
	path, err := trustedFile()
	if err != nil {
		return false, nil //nolint:nilerr // a user without a place for the list has none
	}
	list, err := readTrusted(path)
	if err != nil || len(list) == 0 {
		return false, err
	}
	entry, err := entryOf(dir)
	return slices.Contains(list, entry), err
}

// sameDir reports whether two paths lead to one directory. It returns false if a path leads nowhere,
// or where this user cannot look: then the user does not open that directory.
func sameDir(named, dir string) bool {
	there, err := os.Stat(named)
	here, err2 := os.Stat(dir)
	return err == nil && err2 == nil && os.SameFile(there, here)
}

func entryOf(dir string) (t Trusted, err error) {
	if t.Path, err = filepath.Abs(dir); err != nil {
		return t, err
	}
	if t.Path, err = filepath.EvalSymlinks(t.Path); err != nil {
		return t, err
	}
	info, err := os.Stat(t.Path)
	if err != nil {
		return t, err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok || !info.IsDir() {
		return t, fmt.Errorf("%s: %w", t.Path, syscall.ENOTDIR)
	}
	t.UID, t.GID = int(st.Uid), int(st.Gid)
	return t, nil
}

func trustedFile() (string, error) {
	base, err := os.UserConfigDir()
	if err != nil {
		return "", fmt.Errorf("find the list of trusted directories: %w", err)
	}
	return filepath.Join(base, "ckptstore", trustedName), nil
}

// readTrusted reads a list. A missing list is empty. A list that another user could have written,
// or a symbolic link, is an error.
func readTrusted(path string) ([]Trusted, error) {
	bad := func(err error) error { return fmt.Errorf("list of trusted directories %s: %w", path, err) }
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) || errors.Is(err, fs.ErrPermission) {
		return nil, nil // as after `sudo -u`, which keeps another user's HOME
	}
	if err != nil {
		return nil, bad(err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, bad(err)
	}
	const next = "remove it, and trust the directories again"
	if err := private.File(path, info, next); err != nil {
		return nil, fmt.Errorf("list of trusted directories: %w", err)
	}
	if info.Size() > trustedLimit {
		return nil, bad(fmt.Errorf("it has %d bytes: %s", info.Size(), next))
	}
	text := make([]byte, info.Size())
	if _, err := f.ReadAt(text, 0); err != nil {
		return nil, bad(err)
	}
	var list []Trusted
	if err := json.Unmarshal(text, &list); err != nil {
		return nil, bad(fmt.Errorf("%w: %s", err, next))
	}
	return list, nil
}

// changeTrusted replaces the list by the result of change, under its lock.
func changeTrusted(ctx context.Context, change func([]Trusted) ([]Trusted, error)) (err error) {
	path, err := trustedFile()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, trustedWait)
	defer cancel()
	lock, err := lockTrusted(ctx, path+".lock")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unlock(lock)) }()
	list, err := readTrusted(path)
	if err == nil {
		list, err = change(list)
	}
	if err != nil {
		return err
	}
	text, err := json.MarshalIndent(list, "", "  ")
	if err != nil {
		return err
	}
	return durable.Write(path, append(text, '\n'))
}

// lockTrusted waits for the lock until ctx ends.
func lockTrusted(ctx context.Context, path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) || !sleep(ctx, 20*time.Millisecond) {
			return nil, errors.Join(fmt.Errorf("%w: %s: %w: end the process that holds it", ErrLocked, path, err), ctx.Err(), f.Close())
		}
	}
}

// maxGroups is the kernel's limit for a process.
const maxGroups = 65536

// peerGroups returns the supplementary groups of the process at the other end of a unix socket, as
// they were when it connected.
func peerGroups(fd int) ([]uint32, error) {
	for n := 64; n <= maxGroups; n *= 4 {
		groups := make([]uint32, n)
		size := uint32(4 * n) //nolint:gosec // of at most maxGroups
		_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, unix.SO_PEERGROUPS,
			uintptr(unsafe.Pointer(&groups[0])), uintptr(unsafe.Pointer(&size)), 0) //nolint:gosec // package unix has no call for it
		switch errno {
		case 0:
			return groups[:size/4], nil
		case unix.ERANGE:
			continue
		}
		return nil, fmt.Errorf("groups at the other end of a socket: %w", errno)
	}
	return nil, fmt.Errorf("groups at the other end of a socket: more than %d", maxGroups)
}

// privateGroup reports whether a group has this process's user as its only member: the group that
// Debian, Fedora and others make with each user, so that a umask of 002 shares nothing. It must be
// in /etc/group, with the user's name and without other members, and be the primary group of no
// other user in /etc/passwd. Groups from other sources are not private. Nor is group 0: container
// platforms start users that no file lists as its members.
func privateGroup(gid int) bool {
	if gid == 0 {
		return false
	}
	passwd, err := os.Open("/etc/passwd")
	if err != nil {
		return false
	}
	defer passwd.Close()
	group, err := os.Open("/etc/group")
	if err != nil {
		return false
	}
	defer group.Close()
	return privateIn(os.Geteuid(), gid, passwd, group)
}

// privateIn is privateGroup with the contents of passwd(5) and group(5).
func privateIn(uid, gid int, passwd, group io.Reader) bool {
	me, others := "", false
	in := bufio.NewScanner(passwd)
	for in.Scan() {
		f := strings.Split(in.Text(), ":") // name:x:uid:gid:…
		if len(f) < 4 || f[3] != strconv.Itoa(gid) {
			continue
		}
		if f[2] == strconv.Itoa(uid) {
			me = f[0]
		} else {
			others = true
		}
	}
	if in.Err() != nil || me == "" || others {
		return false
	}
	private := false
	in = bufio.NewScanner(group)
	for in.Scan() {
		f := strings.Split(in.Text(), ":") // name:x:gid:members
		if len(f) == 4 && f[2] == strconv.Itoa(gid) {
			if private = f[0] == me && (f[3] == "" || f[3] == me); !private {
				return false
			}
		}
	}
	return in.Err() == nil && private
}
