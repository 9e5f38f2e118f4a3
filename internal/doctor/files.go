package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/bytesize"
)

// probeName is the prefix of everything that probes create.
const probeName = ".ckptstore-doctor-"

// store examines the filesystem of the store, in a directory that it always
// removes.
func (e *examination) store(ctx context.Context) (err error) {
	if strings.Contains(e.Store, "://") {
		e.add("store", notChecked("run this with --store DIR where the checkpoints' directory is mounted", "%s is a URL: its files are on another machine", e.Store))
		return nil
	}
	made := make(chan probes, 1)
	e.check(ctx, "store.write", func(ctx context.Context) answer {
		p, a := prepare(e.Store)
		if errors.Is(ctx.Err(), context.DeadlineExceeded) { // check may have stopped waiting
			_ = os.RemoveAll(p.dir)
			return problem("look for a hanging server or disk: dmesg, and processes in state D", "creating a directory took longer than %v", e.Patience)
		}
		made <- p
		return a
	})
	var p probes
	select {
	case p = <-made:
	default: // abandoned
	}
	if p.dir == "" {
		return nil
	}
	defer func() { err = errors.Join(err, e.remove(p.dir)) }()
	e.report.Examined = filepath.Dir(p.dir)
	p.tryLock = e.TryLock
	for _, c := range []struct {
		id   string
		look func(context.Context) answer
	}{
		{"store.type", p.kind},
		{"store.room", p.room},
		{"store.inodes", p.inodes},
		{"store.lock", p.lock},
		{"store.sync", p.sync},
		{"store.dirsync", p.syncDirectory},
		{"store.rename", p.rename},
		{"store.link", p.link},
		{"store.direct", p.direct},
		{"store.mode", p.mode},
	} {
		e.check(ctx, c.id, c.look)
	}
	return nil
}

// remove removes a probe's directory, unless the filesystem hangs.
func (e *examination) remove(dir string) error {
	removed := make(chan error, 1)
	go func() { removed <- os.RemoveAll(dir) }()
	late := time.NewTimer(e.Patience)
	defer late.Stop()
	select {
	case err := <-removed:
		if err != nil {
			return fmt.Errorf("remove the probes' files: %w; remove %s yourself", err, dir)
		}
		return nil
	case <-late.C:
		return fmt.Errorf("remove the probes' files: no answer after %v; remove %s when the filesystem answers", e.Patience, dir)
	}
}

// prepare creates a directory for probes on the filesystem of a store: next to
// the store, or in the nearest existing parent. If the store is a filesystem of
// its own, the directory is inside it.
func prepare(store string) (probes, answer) {
	store, err := filepath.Abs(store)
	if err != nil {
		return probes{}, notChecked("give --store an absolute path", "%v", err)
	}
	at, err := nearest(filepath.Dir(store))
	if err != nil {
		return probes{}, problem("check that the path can be looked at", "%v", err)
	}
	if own, err := device64(store); err == nil {
		if beside, err := device64(at); err == nil && own != beside {
			at = store
		}
	}
	dir, err := os.MkdirTemp(at, probeName)
	if err != nil {
		return probes{}, problem("choose a directory in which this user may write, or change its owner", "create a directory: %v", err)
	}
	return probes{dir: dir}, ok("a directory can be made in %s", at)
}

// nearest returns dir, or its nearest existing parent.
func nearest(dir string) (string, error) {
	for {
		info, err := os.Stat(dir)
		switch {
		case err == nil && info.IsDir():
			return dir, nil
		case err == nil:
			return "", fmt.Errorf("%s is not a directory", dir)
		case !errors.Is(err, fs.ErrNotExist) || dir == filepath.Dir(dir):
			return "", err
		}
		dir = filepath.Dir(dir)
	}
}

// device64 returns the number of the filesystem that a directory is on.
func device64(dir string) (uint64, error) {
	var st unix.Stat_t
	err := unix.Stat(dir, &st)
	return uint64(st.Dev), err //nolint:unconvert // it is narrower on some architectures
}

// filesystem describes a kind of filesystem.
type filesystem struct {
	name    string
	warn    string // why it is unsuitable for a store; empty if it is suitable
	instead string
}

const (
	onNetwork = "every node sees it, and locks and fsync are only as good as its server and mount options"
	localLog  = "mount it with option hard; keep the store on a local disk where the log's speed matters"
)

var filesystems = map[int64]filesystem{
	unix.EXT4_SUPER_MAGIC:      {name: "ext4"}, // and ext2 and ext3
	unix.XFS_SUPER_MAGIC:       {name: "xfs"},
	unix.BTRFS_SUPER_MAGIC:     {name: "btrfs"},
	0x2fc12fc1:                 {name: "zfs"},
	unix.F2FS_SUPER_MAGIC:      {name: "f2fs"},
	unix.TMPFS_MAGIC:           {"tmpfs", "it is memory: a restart of the machine deletes all checkpoints", "choose a directory on a disk"},
	unix.RAMFS_MAGIC:           {"ramfs", "it is memory: a restart of the machine deletes all checkpoints", "choose a directory on a disk"},
	unix.OVERLAYFS_SUPER_MAGIC: {"overlay", "it is a container's own layer: all checkpoints are deleted with the container", "mount a volume and choose a directory there"},
	unix.NFS_SUPER_MAGIC:       {"nfs", onNetwork, localLog},
	unix.SMB2_SUPER_MAGIC:      {"smb", onNetwork, "choose another: it has neither the names nor the modes of a local one"},
	unix.CIFS_SUPER_MAGIC:      {"cifs", onNetwork, "choose another: it has neither the names nor the modes of a local one"},
	unix.CEPH_SUPER_MAGIC:      {"ceph", onNetwork, localLog},
	0x0bd00bd0:                 {"lustre", onNetwork, "mount it with option flock, not localflock"},
	0x47504653:                 {"gpfs", onNetwork, localLog},
	0x19830326:                 {"beegfs", onNetwork, localLog},
	unix.V9FS_MAGIC:            {"9p", "it is another machine's: locks and fsync are only as good as that machine's", "choose a local disk"},
	unix.FUSE_SUPER_MAGIC:      {"fuse", "a program serves it: locks and fsync are only as good as that program's", "see below which of them work"},
}

func (p probes) kind(context.Context) answer {
	var st unix.Statfs_t
	if err := unix.Statfs(p.dir, &st); err != nil {
		return problem("check that the filesystem is mounted", "%v", err)
	}
	kind, known := filesystems[int64(st.Type)] //nolint:unconvert // it is narrower on some architectures
	switch {
	case !known:
		return warning("see below what works", "unknown filesystem type (%#x)", st.Type)
	case kind.warn != "":
		return warning(kind.instead, "%s: %s", kind.name, kind.warn)
	}
	return ok("%s", kind.name)
}

// On a nearly full disk, a store keeps a tenth for its log, within these bounds.
const (
	leastRoom = 16 << 20
	mostRoom  = 4 << 30
)

func (p probes) room(context.Context) answer {
	var st unix.Statfs_t
	if err := unix.Statfs(p.dir, &st); err != nil {
		return problem("check that the filesystem is mounted", "%v", err)
	}
	free, total := st.Bavail*uint64(st.Bsize), st.Blocks*uint64(st.Bsize)
	saw := fmt.Sprintf("%s free of %s", bytesize.Text(free), bytesize.Text(total))
	if need := min(max(leastRoom, total/10), mostRoom); total > 0 && free < need {
		return problem("free space, or choose another disk", "%s: saves need at least %s", saw, bytesize.Text(need))
	}
	return ok("%s", saw)
}

func (p probes) inodes(context.Context) answer {
	var st unix.Statfs_t
	if err := unix.Statfs(p.dir, &st); err != nil {
		return problem("check that the filesystem is mounted", "%v", err)
	}
	switch {
	case st.Files == 0:
		return ok("allocated on demand")
	case st.Ffree < 1000:
		return problem("remove files, or choose another disk", "%d free of %d: no room for more files", st.Ffree, st.Files)
	case st.Ffree < st.Files/20:
		return warning("remove files", "%d free of %d", st.Ffree, st.Files)
	}
	return ok("%d free of %d", st.Ffree, st.Files)
}
