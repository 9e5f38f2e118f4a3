// Package claim claims a directory for one process, on filesystems whose locks may hold for
// one machine only: Lustre with localflock, NFS with local_lock=flock. There, a lock alone
// would let two machines own one store.
//
// The owner creates a file exclusively, and shows that it lives by another file, which it
// changes. A process takes the directory from a claim of another machine only after that
// file has not changed for a term. An owner whose claim is gone learns it by [Claim.Lost].
// The caller holds the directory's lock: on one machine, that decides.
package claim

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Names of the files in the directory.
const (
	Name     = "owner.claim"
	BeatName = "owner.beat"
)

// Times of [Config] that the package sets.
const (
	every = 2 * time.Second
	term  = 15 * time.Second
)

// Owner is the process of a claim.
type Owner struct {
	Host    string    `json:"host"`
	Boot    string    `json:"boot"` // of the machine
	PID     int       `json:"pid"`
	Started time.Time `json:"started"`
}

// HeldError reports a directory that a live process of another machine has claimed.
type HeldError struct {
	Dir   string
	Owner Owner
}

func (e *HeldError) Error() string {
	return fmt.Sprintf("process %d on %s owns %s, and a lock on that filesystem may hold for one machine only", e.Owner.PID, e.Owner.Host, e.Dir)
}

// Claim is a claim of this process. A nil Claim is that of a directory whose locks suffice.
type Claim struct {
	dir   string
	owner Owner
	log   *slog.Logger
	lost  chan struct{}
	end   context.CancelFunc
	ended sync.WaitGroup
}

// kernelLocks are the filesystems whose locks hold for all that can write to them, as they
// have one kernel.
var kernelLocks = map[int64]bool{
	unix.EXT4_SUPER_MAGIC: true, unix.XFS_SUPER_MAGIC: true, unix.BTRFS_SUPER_MAGIC: true, unix.TMPFS_MAGIC: true,
	unix.OVERLAYFS_SUPER_MAGIC: true, unix.F2FS_SUPER_MAGIC: true, unix.RAMFS_MAGIC: true, zfsMagic: true,
}

const zfsMagic = 0x2fc12fc1

// lockedByKernel reports whether locks in a directory hold for all its users.
func lockedByKernel(dir string) bool {
	var s unix.Statfs_t
	return unix.Statfs(dir, &s) == nil && kernelLocks[int64(s.Type)] //nolint:unconvert // its type depends on the architecture
}

// thisBoot identifies the boot of this machine; "" if the system has none.
func thisBoot() string {
	boot, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return string(bytes.TrimSpace(boot))
}

// Take claims a directory whose lock this process holds. It returns a [HeldError] if the
// owner of a claim is on another machine and lives, and nil if the lock suffices.
func Take(ctx context.Context, dir string, log *slog.Logger) (*Claim, error) {
	if lockedByKernel(dir) {
		return nil, nil
	}
	return take(ctx, dir, log)
}

func take(ctx context.Context, dir string, log *slog.Logger) (*Claim, error) {
	host, err := os.Hostname()
	if err != nil {
		return nil, err
	}
	c := &Claim{dir: dir, log: log, lost: make(chan struct{}), owner: Owner{Host: host, Boot: thisBoot(), PID: os.Getpid(), Started: time.Now().UTC().Round(0)}}
	text, err := json.Marshal(c.owner)
	if err != nil {
		return nil, err
	}
	for {
		err := create(filepath.Join(dir, Name), text)
		if err == nil {
			break
		}
		if !errors.Is(err, fs.ErrExist) {
			return nil, fmt.Errorf("claim %s: %w", dir, err)
		}
		theirs, owner, err := read(dir)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			continue // it has just been released
		case err != nil:
			return nil, err
		case owner.Host != host || owner.Boot != c.owner.Boot: // otherwise the lock proves that its process is gone
			if err := c.observe(ctx, theirs, owner); err != nil {
				return nil, err
			}
		}
		if err := c.bury(theirs, owner); err != nil {
			return nil, err
		}
	}
	life, end := context.WithCancel(context.Background())
	c.end = end
	c.ended.Go(func() { c.keep(life) })
	return c, nil
}

// read returns the claim of a directory.
func read(dir string) (text []byte, owner Owner, err error) {
	text, err = os.ReadFile(filepath.Join(dir, Name))
	if err == nil {
		err = json.Unmarshal(text, &owner)
	}
	if err != nil {
		err = fmt.Errorf("read the claim of %s: %w", dir, err)
	}
	return text, owner, err
}

// create creates a file that must not exist.
func create(path string, text []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	return errors.Join(err, f.Sync(), f.Close())
}

// observe returns an error if the owner of a claim shows that it lives.
func (c *Claim) observe(ctx context.Context, text []byte, owner Owner) error {
	c.log.Warn("directory is claimed by another machine; looking whether its owner is alive", "dir", c.dir, "host", owner.Host, "pid", owner.PID, "for", term)
	first := c.beat()
	tick := time.NewTicker(every / 4)
	defer tick.Stop()
	for began := time.Now(); time.Since(began) < term; {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
		now, _, err := read(c.dir)
		if errors.Is(err, fs.ErrNotExist) {
			return nil // it has released the directory
		}
		if err == nil && !bytes.Equal(now, text) || !bytes.Equal(c.beat(), first) {
			return &HeldError{c.dir, owner}
		}
	}
	return nil
}

// bury removes a claim whose owner is dead, and no other one.
func (c *Claim) bury(text []byte, owner Owner) error {
	path := filepath.Join(c.dir, Name)
	grave := path + "." + rand.Text()
	if err := os.Rename(path, grave); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return fmt.Errorf("claim %s: %w", c.dir, err)
	}
	buried, err := os.ReadFile(grave)
	if err == nil && !bytes.Equal(buried, text) { // another process has taken the directory meanwhile
		err = errors.Join(&HeldError{c.dir, owner}, os.Link(grave, path))
	}
	return errors.Join(err, os.Remove(grave))
}

// beat returns what the owner has last written to show that it lives.
func (c *Claim) beat() []byte {
	text, _ := os.ReadFile(filepath.Join(c.dir, BeatName)) // a missing file does not change
	return text
}

// keep shows other machines that this process lives, until ctx ends or the claim is gone.
func (c *Claim) keep(ctx context.Context) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	missing := 0
	for n := uint64(1); ; n++ {
		_, owner, err := read(c.dir)
		if missing++; err == nil && owner == c.owner {
			missing = 0
		}
		if err == nil && missing > 0 || errors.Is(err, fs.ErrNotExist) && missing > 1 { // bury may put it back
			c.log.Error("directory was taken by another machine", "dir", c.dir, "host", owner.Host, "pid", owner.PID)
			close(c.lost)
			return
		}
		life := fmt.Appendf(nil, "%d %-20d\n", c.owner.PID, n) // as long each time: a full disk has room for it
		if err := os.WriteFile(filepath.Join(c.dir, BeatName), life, 0o600); err != nil {
			c.log.Warn("owner cannot show that it lives; another machine may take the directory", "dir", c.dir, "error", err)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// Lost returns a channel that is closed when another process has taken the directory: this
// one must stop to use it at once.
func (c *Claim) Lost() <-chan struct{} {
	if c == nil {
		return nil
	}
	return c.lost
}

// Release removes the claim, and not that of another process.
func (c *Claim) Release() error {
	if c == nil {
		return nil
	}
	c.end()
	c.ended.Wait()
	if _, owner, err := read(c.dir); err != nil || owner != c.owner {
		return nil // it is another owner's by now
	}
	return errors.Join(removed(filepath.Join(c.dir, BeatName)), removed(filepath.Join(c.dir, Name)))
}

// removed removes a file that may be missing.
func removed(path string) error {
	if err := os.Remove(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
