package store

import (
	"bufio"
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

	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/store/trusted"
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
	known, err := trusted.Has(dir)
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
	if known, err := trusted.Has(dir); err != nil || known {
		return err
	}
	return d.Chmod(info.Mode() &^ 0o022)
}

func ownedByMe(info fs.FileInfo) bool {
	st, ok := info.Sys().(*syscall.Stat_t)
	return ok && int(st.Uid) == os.Geteuid()
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
