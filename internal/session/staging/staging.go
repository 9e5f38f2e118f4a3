// Package staging keeps what ranks save in shared memory until it is written to
// files, and as long after that as there is room: a restore of the newest
// checkpoints then need not read files.
//
//	Arenas   the files in shared memory of one run, of which one process is the owner
//	Slots    how the ranks of a group take turns with the arenas that they save to
//	Layout   how a rank's plan lies in a slot, behind a header that says what is there
//	Copies   what the slots still hold of one checkpoint
//	Left     a sealed slot that a dead owner has left
//
// A worker writes to a slot by itself, in a process of its own: docs/reference/protocol.md
// has what it is told and what it may do. The header is for whoever takes the
// memory over: with it alone, a save of which every rank's slot is sealed can be
// written to the end.
package staging

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"syscall"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// Slots are the staging slots of the ranks of one group. A slot is taken when
// its rank calls save, filled by the worker, sealed, read by the writer, and
// free again when its bytes are written or the save is aborted. The memory of
// an aborted save that was not sealed is dropped: its worker may still be
// copying into it. A free slot holds what was written from it until it is taken
// again, which is not while a restore reads it.
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
	verdicts map[string]*verdict // of saves that found no free slot, or might have
	limit    int                 // slots a rank, 0 until the first plan
	largest  int64               // size of a slot for which limit holds
	making   sync.WaitGroup      // slots whose memory is being made
	stop     context.CancelFunc  // ends that
	ahead    context.Context     // of that
	closed   bool                // no slot is free any more
}

// Config is what the user chose.
type Config struct {
	Slots  int      // of each rank, as far as there is memory for them
	Busy   WhenBusy // what a save does that finds none free
	Ranks  int      // of the group
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

// phase is where a slot is on its way.
type phase int

const (
	free phase = iota
	reserved
	copying
	sealed
	writing
)

// slot is a part of the staging memory of one rank. All of it is under the
// lock of its Slots, but the arena is not touched by others while it is made.
type slot struct {
	index      int
	phase      phase
	making     bool   // its arena is being made or grown
	doomed     bool   // the save was aborted meanwhile
	checkpoint string // unless it is free
	arena      *Arena
	generation uint64
	plan       *Layout
}

// Span is a range of bytes in an arena.
type Span struct{ Offset, Size int64 }

// ErrNoSlotFree says that a save was given up because all slots are in use.
var ErrNoSlotFree = errors.New("all staging slots are in use by earlier saves")

// MisuseError says that a worker has not done as the protocol wants.
type MisuseError struct{ what string }

func (e *MisuseError) Error() string { return e.what }

// ProblemKind returns [problem.Invalid].
func (*MisuseError) ProblemKind() problem.Kind { return problem.Invalid }

func misuse(format string, args ...any) error { return &MisuseError{fmt.Sprintf(format, args...)} }

// New makes the slots of a group, which have the arenas for their memory. With
// nil for these, nothing can be staged, and everything else can be called.
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

// tell wakes those who wait for a slot. The caller holds the lock.
func (s *Slots) tell() {
	close(s.moved)
	s.moved = make(chan struct{})
}

// of is the slots of a rank, as many as there is memory for. The caller holds
// the lock.
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

// fit decides how many slots of a size each rank can have, when one of them
// saves. A bound that the user gave is kept; the default one gives way to the
// first slot.
func (s *Slots) fit(rank int, size int64) error {
	size = (size + arenaPage - 1) / arenaPage * arenaPage
	s.mu.Lock()
	defer s.mu.Unlock()
	s.trimRank(rank) // what a restore has let go
	if size <= s.largest {
		return nil
	}
	budget, err := s.cfg.Memory.resolve(s.arenas.dir.Path(), s.arenas.held())
	if err != nil {
		return err
	}
	n := int(min(int64(s.cfg.Slots), budget/int64(s.cfg.Ranks)/max(size, 1)))
	switch {
	case n < 1 && s.cfg.Memory != (Memory{}):
		return fmt.Errorf("one staging slot of %d bytes for each of %d ranks is more than the %d bytes of --staging-memory: %w", size, s.cfg.Ranks, budget, errTooSmall)
	}
	s.largest = size
	if n = max(n, 1); s.limit > 0 {
		n = min(n, s.limit)
	}
	if n < s.cfg.Slots && n != s.limit {
		s.cfg.Log.Warn("there is memory for fewer staging slots than were asked for: a save waits until an earlier one is written",
			"slots", n, "asked", s.cfg.Slots, "slot_bytes", size, "ranks", s.cfg.Ranks, "staging_memory", budget)
	}
	s.limit = n
	for rank := range s.ranks {
		s.trimRank(rank)
	}
	return nil
}

// errTooSmall is about a bound that the user has set.
var errTooSmall = fmt.Errorf("raise it, or save less: %w", syscall.ENOSPC)

// Grant is a slot as its worker sees it.
type Grant struct {
	Index      int
	Path       string
	Size       int64  // of the file, in bytes
	Generation uint64 // of the use that it is granted for, if it is
}

// Take gives a rank the slot for its part of a save, in which participants take
// part, and writes its header. It waits for one until ctx ends, or as
// [Config] says. Where there is too little memory, the error is
// [syscall.ENOSPC].
func (s *Slots) Take(ctx context.Context, of Part, participants []int, p *Layout) (Grant, error) {
	rank := of.Rank
	if len(of.Checkpoint) > maxID {
		return Grant{}, misuse("the ID %.64q… is longer than %d bytes", of.Checkpoint, maxID)
	}
	if err := s.fit(rank, p.end); err != nil {
		return Grant{}, err
	}
	s.arenas.spare(s.cfg.Ranks) // what a larger group has left
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

// Close gives back what is left when no worker and no writer is. A slot that is
// still written from is given back when that ends.
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
