package store

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/internal/problem"
)

// ErrUntrusted says that users other than this one can write to a store, so that
// this process does not: opening it would act on what they put there, with this
// user's rights. The next step is `ckptstore config trust`.
var ErrUntrusted = problem.New(problem.Denied, "untrusted store")

// ownerRecord is who a store belongs to, as store.json records it.
type ownerRecord struct {
	UID    int  `json:"uid"`
	GID    int  `json:"gid"`
	Shared bool `json:"shared,omitempty"` // members of GID may write
}

// thisUser is the record of what this process makes.
func thisUser() *ownerRecord { return &ownerRecord{UID: os.Geteuid(), GID: os.Getegid()} }

// parts are the files and directories of a store that decide who can write to it,
// and viewsPart the one that may be on a filesystem which fails: see [mayOpen].
var parts = []string{".", "store.json", lockName, "log", "data", "blobs", runName}

const (
	viewsPart = "views"
	// viewsLook bounds the look at the views.
	viewsLook = time.Second
)

// mayWrite returns [ErrUntrusted] if users other than this one can write to the
// store in dir, and this user has not said that they are trusted. A directory that
// is no store yet is judged like a store of this user alone.
func mayWrite(dir string) error { return mayWriteTo(dir, parts...) }

// mayOpen is [mayWrite] for the views too. They are a cache: if their filesystem fails
// or does not answer, the store goes on without them, and they decide nothing.
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

// contradicted returns an error that names the first part of a store that is not
// held as recorded. A part that does not exist is no contradiction.
func (h ownerRecord) contradicted(dir string, names []string) error {
	for _, name := range names {
		path := filepath.Join(dir, name)
		info, err := os.Lstat(path)
		if errors.Is(err, fs.ErrNotExist) || err != nil && name == viewsPart {
			continue
		}
		if err == nil && info.Mode()&fs.ModeSymlink != 0 {
			if name != "." {
				continue // it is refused where it would be passed through
			}
			// Its owner decides where it leads.
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

// makeOwn makes a directory that only this user can write to. Of one that this
// user had made before, with a wide umask, it takes the rights of others to write;
// one of another user stays as it is, for [mayWrite] to refuse.
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
