package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// probes try out a filesystem in a directory.
type probes struct {
	dir     string
	tryLock func(ctx context.Context, file string) error
}

// ErrHeld is returned if another process holds a lock.
var ErrHeld = errors.New("the lock is held")

// TakeLock takes the lock of a file and releases it. It returns [ErrHeld] if
// another process holds the lock.
func TakeLock(file string) error {
	f, err := os.OpenFile(file, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return ErrHeld
	}
	return err
}

// lock checks that a held lock is refused elsewhere: to another descriptor of
// this process, and to another process.
func (p probes) lock(ctx context.Context) answer {
	const do = "mount it so that flock works (lustre: option flock; nfs: version 4), or choose another filesystem: without locks two processes may own one store"
	file := filepath.Join(p.dir, "lock")
	f, err := os.OpenFile(file, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return problem(do, "%v", err)
	}
	defer func() { _ = f.Close() }()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return problem(do, "flock: %v", err)
	}
	if err := TakeLock(file); !errors.Is(err, ErrHeld) {
		return problem(do, "flock: a held lock was also granted to another descriptor (%v)", or(err))
	}
	if err := p.tryLock(ctx, file); !errors.Is(err, ErrHeld) {
		return problem(do, "flock: a held lock was also granted to another process (%v)", or(err))
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_UN); err != nil {
		return problem(do, "flock: release: %v", err)
	}
	if err := p.tryLock(ctx, file); err != nil {
		return problem(do, "flock: a free lock is refused to another process: %v", err)
	}
	return ok("flock works between descriptors and between processes of this machine")
}

func or(err error) string {
	if err == nil {
		return "no error"
	}
	return err.Error()
}

const (
	syncs    = 9
	slowSync = 50 * time.Millisecond
)

// sync measures the cost of an event: a small write and its fsync.
func (p probes) sync(ctx context.Context) answer {
	f, err := os.OpenFile(filepath.Join(p.dir, "sync"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return problem("check who may write there", "%v", err)
	}
	defer func() { _ = f.Close() }()
	var took []time.Duration
	block := make([]byte, 4096)
	for range syncs {
		if ctx.Err() != nil {
			break
		}
		began := time.Now()
		if _, err := f.Write(block); err != nil {
			return problem("see the kernel's log", "write: %v", err)
		}
		if err := f.Sync(); err != nil {
			return problem("choose another filesystem: without fsync a power cut loses committed data", "fsync: %v", err)
		}
		took = append(took, time.Since(began))
	}
	if len(took) == 0 {
		return notChecked("", "the examination was interrupted")
	}
	slices.Sort(took)
	median := took[len(took)/2].Round(time.Microsecond)
	saw := fmt.Sprintf("%v for 4 KiB and fsync (median of %d, the slowest %v)", median, len(took), took[len(took)-1].Round(time.Microsecond))
	if median > slowSync {
		return warning("keep the store on a faster disk; check what else writes there", "%s: each decision and batch of events waits for one", saw)
	}
	return ok("%s", saw)
}

func (p probes) syncDirectory(context.Context) answer {
	d, err := os.Open(p.dir)
	if err == nil {
		err = errors.Join(d.Sync(), d.Close())
	}
	if err != nil {
		return problem("choose another filesystem: a power cut may lose the names of committed files", "fsync of a directory: %v", err)
	}
	return ok("a directory can be synced")
}

func (p probes) rename(context.Context) answer {
	from, to := filepath.Join(p.dir, "new"), filepath.Join(p.dir, "old")
	err := errors.Join(os.WriteFile(from, []byte("new"), 0o600), os.WriteFile(to, []byte("old"), 0o600))
	if err == nil {
		err = os.Rename(from, to)
	}
	text := []byte{}
	if err == nil {
		text, err = os.ReadFile(to)
	}
	if err == nil && string(text) != "new" {
		err = fmt.Errorf("the file has %q, not its new content", text)
	}
	if _, serr := os.Stat(from); err == nil && !errors.Is(serr, os.ErrNotExist) {
		err = errors.New("the old name is still there")
	}
	if err != nil {
		return problem("choose another filesystem: commits are renames", "rename over a file: %v", err)
	}
	return ok("a file replaces another atomically")
}

func (p probes) link(context.Context) answer {
	const do = "nothing is lost; choose another filesystem to store unchanged tensors once"
	from, to := filepath.Join(p.dir, "one"), filepath.Join(p.dir, "two")
	if err := os.WriteFile(from, nil, 0o600); err != nil {
		return problem("check who may write there", "%v", err)
	}
	if err := os.Link(from, to); err != nil {
		return warning(do, "no hard links (%v): unchanged data is written again", err)
	}
	a, aerr := os.Stat(from)
	b, berr := os.Stat(to)
	if err := errors.Join(aerr, berr); err != nil || !os.SameFile(a, b) {
		return warning(do, "a hard link is not the same file (%v): unchanged data is written again", or(err))
	}
	return ok("hard links work")
}

// direct writes past the page cache, from aligned memory.
func (p probes) direct(context.Context) answer {
	const page = 4096
	const do = "nothing is lost; saves go through the page cache and push other data out of it"
	f, err := os.OpenFile(filepath.Join(p.dir, "direct"), os.O_RDWR|os.O_CREATE|unix.O_DIRECT, 0o600)
	if err != nil {
		return warning(do, "no O_DIRECT: %v", err)
	}
	block := make([]byte, 2*page)
	at := page - int(uintptr(unsafe.Pointer(&block[0]))%page)
	_, err = f.Write(block[at%page : at%page+page])
	if err = errors.Join(err, f.Close()); err != nil {
		return warning(do, "no O_DIRECT: %v", err)
	}
	return ok("writes of 4 KiB bypass the page cache (O_DIRECT)")
}

func (p probes) mode(context.Context) answer {
	file := filepath.Join(p.dir, "mode")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		return problem("check who may write there", "%v", err)
	}
	var st unix.Stat_t
	if err := unix.Stat(file, &st); err != nil {
		return problem("check who may read there", "%v", err)
	}
	if st.Mode&0o777 != 0o600 || int(st.Uid) != os.Geteuid() {
		return warning("check the mount options (uid, umask, root_squash): others may read or own the checkpoints", "a file made with mode 0600 has %04o and belongs to user %d, not %d", st.Mode&0o777, st.Uid, os.Geteuid())
	}
	return ok("files keep their mode and owner")
}
