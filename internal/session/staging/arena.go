package staging

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/session/shm"
)

// ErrTaken reports that another trainer of the run is alive on this machine. It
// may be stopped and have lost the run.
var ErrTaken = problem.New(problem.Conflict, "another trainer of this run is alive on this machine")

// Arenas are the files in shared memory of one run, in a directory named by
// store, run and node.
//
//	SHARED/ckptstore-memory-<uid>/ckptstore-<store>-<run>-n<node>/
//	  lock             flock(2) of the trainer that owns the directory
//	  r00002.save.7    what rank 2 saves, in the seventh use of an arena
//	  r00002.load.9    what rank 2 loads
//
// Each use of an arena has its own name, and a new file unless the last use was
// seen to end: a late worker finds no file, or writes to a file that no process
// reads. An arena that was given back is reused, since memory that was touched
// before is far faster. A staging slot keeps its arena, and so its name, as long
// as all parties finish their saves.
//
// The kernel frees the lock when a trainer is killed, and the next trainer of the
// run takes the directory over. It may write the slots that are sealed
// ([Arenas.Sealed]). Then it keeps the slots that hold a checkpoint and frees
// everything else ([Arenas.KeepLeft]). All other methods may be called
// concurrently.
type Arenas struct {
	dir  *shm.Directory
	left []string // names of a dead trainer's files, until they are freed
	room func(*os.File) (int64, error)

	mu       sync.Mutex
	uses     int
	order    int             // of the last kept content
	live     map[*Arena]bool // true: given back
	released chan struct{}   // closed when an arena's last reader has finished
	taking   sync.WaitGroup  // arenas whose memory is being allocated
	closed   bool
}

// Arena is one mapped file.
type Arena struct {
	path string
	rank int
	use  string
	file *os.File
	data []byte
	size atomic.Int64 // of data, for readers without the arena
	room func(*os.File) (int64, error)

	// Guarded by the lock of arenas.
	kept    *kept // checkpoint data that it still holds; nil: none
	readers int   // while it is not 0, data neither changes nor moves
	dropped bool  // the last reader unmaps it
}

// Path returns the file's path, which differs in each use.
func (f *Arena) Path() string { return f.path }

// Data returns the file's memory. The caller that took or holds the arena may use
// it until it gives back, drops or releases the arena.
func (f *Arena) Data() []byte { return f.data }

// slotUse is the use of an arena as a slot.
const slotUse = "save"

// arenaPage is the unit of growth and the alignment of items, in bytes.
const arenaPage = 4096

// Open takes the directory of a store's run in shared, such as /dev/shm. It
// returns [ErrTaken] while another process owns it. node is the number of this
// node in the group. room returns the free bytes where a file is; nil asks the
// system.
func Open(shared, store, run string, node int, room func(*os.File) (int64, error), log *slog.Logger) (*Arenas, error) {
	if room == nil {
		room = shm.Room
	}
	name := events.EncodeName(run)
	if len(name) > 100 {
		name = checkpoint.Sum([]byte(run)).String()[:32]
	}
	name = fmt.Sprintf("ckptstore-%s-%s", storeName(store), name)
	dir, err := shm.Own(shared, fmt.Sprintf("%s-n%d", name, node), log)
	if errors.Is(err, shm.ErrOwned) {
		err = fmt.Errorf("%w (%w): stop it, or choose another --name", ErrTaken, err)
	}
	if err != nil {
		return nil, fmt.Errorf("staging directory of run %q: %w", run, err)
	}
	sayFormer(shared, store, log)
	sayLeft(shared, name, log)
	left, err := dir.Names()
	if err != nil {
		return nil, errors.Join(err, dir.Close())
	}
	a := &Arenas{dir: dir, left: left, room: room, live: map[*Arena]bool{}, released: make(chan struct{})}
	for _, name := range left {
		// A new arena must not take the name of a file that is left.
		if n, err := strconv.Atoi(name[strings.LastIndexByte(name, '.')+1:]); err == nil {
			a.uses = max(a.uses, n)
		}
	}
	return a, nil
}

// Take returns an arena of at least size bytes, for one use by one rank. use is a
// word of the file's name other than that of slots. If memory is short, Take
// frees unused arenas.
func (a *Arenas) Take(ctx context.Context, rank int, use string, size int64) (*Arena, error) {
	f, err := a.make(ctx, rank, use, size, false)
	if errors.Is(err, unix.ENOSPC) && a.spare(0) {
		return a.make(ctx, rank, use, size, false)
	}
	return f, err
}

// takeAhead is Take for a future use: until then, the arena keeps its content.
func (a *Arenas) takeAhead(ctx context.Context, rank int, use string, size int64) (*Arena, error) {
	return a.make(ctx, rank, use, size, true)
}

func (a *Arenas) make(ctx context.Context, rank int, use string, size int64, ahead bool) (*Arena, error) {
	return a.makeBy(rank, use, size, ahead, func(f *Arena) error { return f.grow(ctx, size, ahead) })
}

// makeBy is make with a way to grow the arena.
func (a *Arenas) makeBy(rank int, use string, size int64, ahead bool, grow func(*Arena) error) (*Arena, error) {
	f, err := a.name(rank, use, size, ahead)
	if err != nil {
		return nil, fmt.Errorf("open shared memory: %w", err)
	}
	defer a.taking.Done()
	if err := grow(f); err != nil {
		return nil, errors.Join(err, a.Drop(f))
	}
	return f, nil
}

// takeBare is [Arenas.Take] without memory, for a caller that writes all of the file, and not by its
// mapping: there a write would be killed if shared memory is full.
func (a *Arenas) takeBare(rank int, use string, size int64) (*Arena, error) {
	extend := func(f *Arena) error {
		_, err := f.extend(size)
		return err
	}
	f, err := a.makeBy(rank, use, size, false, extend)
	if errors.Is(err, unix.ENOSPC) && a.spare(0) {
		f, err = a.makeBy(rank, use, size, false, extend)
	}
	return f, err
}

// name opens an arena under a new name: a returned one, or a new one. The caller
// adds it to the live ones once its memory is allocated.
func (a *Arenas) name(rank int, use string, size int64, ahead bool) (*Arena, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return nil, errors.New("the job has ended")
	}
	a.uses++
	name := fmt.Sprintf("r%05d.%s.%d", rank, use, a.uses)
	f, err := a.reuse(rank, use, name)
	if err == nil && f != nil && (!ahead || size > int64(len(f.data))) {
		f.kept = nil
	}
	if err == nil && f == nil {
		f = &Arena{path: a.path(name), rank: rank, use: use, room: a.room}
		f.file, err = a.dir.Create(name)
	}
	if err != nil {
		return nil, err
	}
	a.live[f] = false
	a.taking.Add(1)
	return f, nil
}

// held returns how many bytes of shared memory the arenas have.
func (a *Arenas) held() (bytes int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for f := range a.live {
		bytes += f.size.Load()
	}
	return bytes
}

// reuse renames an arena that was given back: one of the same use if possible,
// and the one whose content is needed least. It returns nil if there is none.
func (a *Arenas) reuse(rank int, use, name string) (*Arena, error) {
	var best *Arena
	order := func(f *Arena) (n int) {
		if f.kept != nil {
			n = f.kept.order
		}
		if f.use != use {
			n += 1 << 60
		}
		return n
	}
	for f, free := range a.live {
		if free && f.rank == rank && f.readers == 0 && (best == nil || order(f) < order(best)) {
			best = f
		}
	}
	if best == nil {
		return nil, nil
	}
	err := a.dir.Rename(filepath.Base(best.path), name)
	best.path, best.use = a.path(name), use
	return best, err
}

// path returns the path by which workers open a file.
func (a *Arenas) path(name string) string { return filepath.Join(a.dir.Path(), name) }

// Give makes an arena available for another use: every party to this one is done.
func (a *Arenas) Give(f *Arena) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if _, ok := a.live[f]; ok {
		a.live[f] = true
	}
}

// Drop ends an arena that a worker may still access. Processes that hold it can
// still read their mapping.
func (a *Arenas) Drop(f *Arena) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.remove(f)
}

// empty is Drop for an arena that no worker accesses any more and that no reader
// holds: its memory is freed at once, even if a worker still maps it.
func (a *Arenas) empty(f *Arena) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if _, ok := a.live[f]; !ok {
		return nil
	}
	err := f.file.Truncate(0)
	return errors.Join(err, a.remove(f))
}

func (a *Arenas) remove(f *Arena) error {
	if _, ok := a.live[f]; !ok {
		return nil
	}
	delete(a.live, f)
	f.kept = nil
	err := a.dir.Unlink(filepath.Base(f.path))
	if f.dropped = f.readers > 0; f.dropped {
		return err
	}
	return errors.Join(f.unmap(), err)
}

func (f *Arena) unmap() (err error) {
	if f.data != nil {
		err = unix.Munmap(f.data)
		f.data = nil
	}
	return errors.Join(err, f.file.Close())
}

// Close unmaps and removes everything except the unfreed files of a dead trainer,
// which the next trainer may be able to finish.
func (a *Arenas) Close() error {
	a.mu.Lock()
	a.closed = true
	a.mu.Unlock()
	a.taking.Wait()
	a.mu.Lock()
	defer a.mu.Unlock()
	var errs []error
	for f := range a.live {
		errs = append(errs, a.remove(f))
	}
	if len(a.left) == 0 {
		errs = append(errs, a.dir.Remove())
	}
	errs = append(errs, a.dir.Close())
	return errors.Join(errs...)
}

// Place lays out chunks of the given sizes one after the other, each at a
// multiple of 64 bytes. It returns their offsets and the total size.
func Place(sizes []int64) (offsets []int64, size int64) {
	const align = 64
	offsets = make([]int64, len(sizes))
	for i, n := range sizes {
		offsets[i] = size
		size += (n + align - 1) / align * align
	}
	return offsets, size
}

// grow extends an arena to at least size bytes. It allocates and touches the
// memory: a first touch costs several times as much as a copy, and full shared
// memory is an error here but would be a SIGBUS in the middle of a copy. Ahead of
// its use, grow works at low priority.
func (f *Arena) grow(ctx context.Context, size int64, ahead bool) error {
	old, err := f.extend(size)
	if err != nil || old == len(f.data) {
		return err
	}
	touch := shm.Touch
	if ahead {
		touch = shm.TouchAhead
	}
	if err := touch(ctx, f.file, f.data, old); err != nil {
		return f.unreserved(size, err)
	}
	return nil
}

// unreserved returns the error of an arena that cannot have so many bytes.
func (f *Arena) unreserved(size int64, err error) error {
	return fmt.Errorf("reserve %d bytes in %s: %w: make room in shared memory", size, f.path, err)
}

// extend maps at least size bytes of an arena. The memory from old on is not touched yet.
func (f *Arena) extend(size int64) (old int, err error) {
	old = len(f.data)
	size = (size + arenaPage - 1) / arenaPage * arenaPage
	if size <= int64(old) {
		return old, nil
	}
	room, err := f.room(f.file)
	if err != nil {
		return old, f.unreserved(size, err)
	}
	if size-int64(old) > room {
		return old, f.unreserved(size, unix.ENOSPC)
	}
	if f.data != nil {
		if err := unix.Munmap(f.data); err != nil {
			return old, fmt.Errorf("unmap %s: %w", f.path, err)
		}
		f.data = nil
	}
	if err := f.file.Truncate(size); err != nil {
		return old, f.unreserved(size, err)
	}
	data, err := unix.Mmap(int(f.file.Fd()), 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return old, fmt.Errorf("map %s: %w", f.path, err)
	}
	f.data = data
	f.size.Store(size)
	return old, nil
}
