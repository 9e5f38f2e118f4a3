// Package staging keeps the saves of ranks in shared memory until they are
// written to files, and afterwards as long as there is room: a restore of the
// newest checkpoints then need not read files.
//
//	Arenas   the files in shared memory of one run, owned by one process
//	Slots    the slots that the ranks of a group save to, taken in turns
//	Layout   the layout of a rank's plan in a slot, behind a self-describing header
//	Copies   the data of one checkpoint that is still in slots
//	Left     a sealed slot that a dead owner left
//	Reader   reads a sealed slot, to copy it to another node
//	Replica  a copy of a sealed slot of another node
//
// A worker, a separate process, writes to a slot by itself: docs/reference/protocol.md
// specifies its replies and its duties. The header is for the next owner of the
// memory: it suffices to finish a save if every rank's slot is sealed.
package staging

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// Slots are the staging slots of the ranks of one group. A slot is taken when its
// rank calls save, filled by the worker, sealed, read by the writer, and free
// again when its bytes are written or the save is aborted. The memory of an
// aborted save that was not sealed is dropped, as its worker may still be copying
// into it. A free slot keeps its content until it is taken again; it is not taken
// while a restore reads it.
//
//	free ─▶ reserved ─▶ copying ─▶ sealed ─▶ writing ─▶ free
//
// All methods may be called concurrently.
type Slots struct {
	arenas *Arenas
	cfg    Config

	mu       sync.Mutex
	moved    chan struct{} // closed when a slot became free or was made
	ranks    map[int][]*slot
	verdicts map[string]*verdict // of saves that found no free slot, or might find none
	limit    int                 // slots per rank; 0 until the first plan
	largest  int64               // size of a slot for which limit holds
	making   sync.WaitGroup      // slots whose memory is being allocated
	stop     context.CancelFunc  // ends the allocations
	ahead    context.Context     // context of the allocations
	closed   bool                // slots are no longer freed
}

// Config is the user's configuration.
type Config struct {
	Slots  int      // per rank, as far as there is memory for them
	Busy   WhenBusy // what a save does if it finds no free slot
	Ranks  int      // size of the group
	Peers  int      // ranks of other nodes whose replicas share the memory
	Memory Memory   // of all slots of all ranks
	Log    *slog.Logger
}

// Part is one rank's part in a save.
type Part struct {
	Attempt     int
	Rank        int
	Fingerprint checkpoint.Digest // of the rank's plan
	Checkpoint  string            // ID
}

// phase is the state of a slot.
type phase int

const (
	free phase = iota
	reserved
	copying
	sealed
	writing
)

// slot is a part of one rank's staging memory. The lock of its Slots guards it;
// the arena is left alone while it is being made.
type slot struct {
	index      int
	phase      phase
	making     bool   // its arena is being allocated or grown
	doomed     bool   // the save was aborted meanwhile
	checkpoint string // unless it is free
	arena      *Arena
	generation uint64
	plan       *Layout
	times      Times
	granted    time.Time
}

// Times are the durations of one use of a slot.
type Times struct {
	Waited time.Duration // from the request for the slot until it was granted
	Copied time.Duration // from then until the seal
	Sealed time.Time     // on the monotonic clock of this process
}

// Span is a range of bytes in an arena.
type Span struct{ Offset, Size int64 }

// ErrNoSlotFree reports that a save was skipped or failed because all slots are
// in use.
var ErrNoSlotFree = errors.New("all staging slots are in use by earlier saves")

// MisuseError reports that a worker violated the protocol.
type MisuseError struct{ what string }

func (e *MisuseError) Error() string { return e.what }

// ProblemKind returns [problem.Invalid].
func (*MisuseError) ProblemKind() problem.Kind { return problem.Invalid }

func misuse(format string, args ...any) error { return &MisuseError{fmt.Sprintf(format, args...)} }

// New returns the slots of a group, with arenas as their memory. Without arenas
// nothing can be staged, but all methods can be called.
func New(a *Arenas, cfg Config) *Slots {
	s := &Slots{arenas: a, cfg: cfg, moved: make(chan struct{}), ranks: map[int][]*slot{}, verdicts: map[string]*verdict{}}
	s.ahead, s.stop = context.WithCancel(context.Background())
	return s
}

// Key names an item in a slot.
func Key(it checkpoint.Item) string {
	if it.Value {
		return "v" + it.Shard.FQN
	}
	return "t" + it.Shard.Box.Key() + "@" + it.Shard.FQN
}

// tell wakes the callers that wait for a slot. The caller holds the lock.
func (s *Slots) tell() {
	close(s.moved)
	s.moved = make(chan struct{})
}

// of returns the slots of a rank, as many as memory allows. The caller holds the
// lock.
func (s *Slots) of(rank int) []*slot {
	n := s.cfg.Slots
	if s.limit > 0 {
		n = s.limit
	}
	for len(s.ranks[rank]) < n {
		s.ranks[rank] = append(s.ranks[rank], &slot{index: len(s.ranks[rank])})
	}
	return s.ranks[rank][:n]
}

// fit decides how many slots of a size each rank can have, when a rank saves. It
// enforces a bound that the user set; the default bound always allows a first
// slot.
func (s *Slots) fit(rank int, size int64) error {
	size = (size + arenaPage - 1) / arenaPage * arenaPage
	s.mu.Lock()
	defer s.mu.Unlock()
	s.trimRank(rank) // slots that a restore has released
	if size <= s.largest {
		return nil
	}
	budget, err := s.cfg.Memory.resolve(s.arenas.dir.Path(), s.arenas.held())
	if err != nil {
		return err
	}
	n := int(min(int64(s.cfg.Slots), budget/int64(s.cfg.Ranks+s.cfg.Peers)/max(size, 1)))
	if n < 1 { // a replica must not fail a save
		n = int(min(1, budget/int64(s.cfg.Ranks)/max(size, 1)))
	}
	switch {
	case n < 1 && s.cfg.Memory != (Memory{}):
		return fmt.Errorf("one staging slot of %d bytes for each of %d ranks is more than the %d bytes of --staging-memory: %w", size, s.cfg.Ranks, budget, errTooSmall)
	}
	s.largest = size
	if n = max(n, 1); s.limit > 0 {
		n = min(n, s.limit)
	}
	if n < s.cfg.Slots && n != s.limit {
		s.cfg.Log.Warn("memory for fewer staging slots than configured: a save waits until an earlier one is written",
			"slots", n, "asked", s.cfg.Slots, "slot_bytes", size, "ranks", s.cfg.Ranks, "staging_memory", budget)
	}
	s.limit = n
	for rank := range s.ranks {
		s.trimRank(rank)
	}
	return nil
}

// errTooSmall reports that a bound set by the user is too small.
var errTooSmall = fmt.Errorf("raise it, or save less: %w", syscall.ENOSPC)

// Grant is a slot as its worker sees it.
type Grant struct {
	Index      int
	Path       string
	Size       int64  // of the file, in bytes
	Generation uint64 // of the use that it is granted for, if any
}

// Take gives a rank the slot for its part of a save with participants, and writes
// the slot's header. It waits for a slot until ctx ends, or as [Config]
// specifies. If memory is short, the error is [syscall.ENOSPC].
func (s *Slots) Take(ctx context.Context, of Part, participants []int, p *Layout) (Grant, error) {
	rank, asked := of.Rank, time.Now()
	if len(of.Checkpoint) > maxID {
		return Grant{}, misuse("the ID %.64q… is longer than %d bytes", of.Checkpoint, maxID)
	}
	if err := s.fit(rank, p.end); err != nil {
		return Grant{}, err
	}
	s.arenas.spare(s.cfg.Ranks) // arenas of a larger group before
	sl, err := s.find(ctx, rank, of.Checkpoint, participants)
	if err != nil {
		return Grant{}, err
	}
	defer s.making.Done()
	err = s.make(ctx, rank, sl, p.end)
	s.mu.Lock()
	defer s.mu.Unlock()
	sl.making = false
	s.tell()
	if sl.doomed || err != nil {
		s.drop(sl)
		if err == nil {
			err = fmt.Errorf("checkpoint %s was aborted", of.Checkpoint)
		}
		return Grant{}, err
	}
	sl.generation++
	sl.plan = p
	sl.granted = time.Now()
	sl.times = Times{Waited: sl.granted.Sub(asked)}
	writeHeader(sl.arena.data, of, sl.generation, p)
	s.makeAhead(rank, p.end)
	return Grant{sl.index, sl.arena.path, int64(len(sl.arena.data)), sl.generation}, nil
}

// find waits for a slot of a rank and marks it as being made.
func (s *Slots) find(ctx context.Context, rank int, checkpoint string, participants []int) (*slot, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cfg.Busy != BusyWait {
		if skip := s.judge(rank, checkpoint, participants); skip {
			return nil, fmt.Errorf("%s is not saved: %w", checkpoint, ErrNoSlotFree)
		}
	}
	for {
		if s.closed {
			return nil, errors.New("the attempt is over")
		}
		letGo := s.arenas.letGo()
		own := slices.ContainsFunc(s.of(rank), func(sl *slot) bool { return sl.checkpoint == checkpoint && sl.phase == reserved })
		sl := s.oldest(s.of(rank), func(sl *slot) bool {
			return !sl.making && (sl.phase == reserved && sl.checkpoint == checkpoint || sl.phase == free && !own)
		})
		if sl != nil && (sl.arena == nil || s.arenas.overwrite(sl.arena)) {
			s.unreserve(rank, checkpoint) // another one, if there is memory for fewer slots by now
			sl.phase, sl.checkpoint, sl.making, sl.doomed = copying, checkpoint, true, false
			s.making.Add(1)
			return sl, nil
		}
		moved := s.moved
		s.mu.Unlock()
		select {
		case <-moved:
		case <-letGo:
		case <-ctx.Done():
		}
		s.mu.Lock()
		if ctx.Err() != nil {
			return nil, fmt.Errorf("rank %d has no free staging slot, earlier saves hold all %d: %w", rank, len(s.of(rank)), ctx.Err())
		}
	}
}

// Close frees the slots that no worker and no writer uses. A slot that is still
// being written is freed when that ends.
func (s *Slots) Close() {
	s.stop()
	s.mu.Lock()
	s.closed = true
	s.tell()
	s.mu.Unlock()
	s.making.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, slots := range s.ranks {
		for _, sl := range slots {
			if sl.phase != writing && sl.arena != nil {
				s.arenas.Give(sl.arena)
				sl.phase, sl.arena = free, nil
			}
		}
	}
}
