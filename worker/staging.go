package worker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"syscall"

	"github.com/ckptstore/ckptstore/planner/plan"
)

// staging is the slots in shared memory of the ranks of one attempt. A slot is
// taken when its rank calls save, filled by the worker, sealed, read by the
// writer, and free again when its bytes are written or the save is aborted.
// The memory of an aborted save that was not sealed is dropped: its worker may
// still be copying into it. A free slot holds what was written from it until it
// is taken again, which is not while a restore reads it.
//
//	free ─▶ reserved ─▶ copying ─▶ sealed ─▶ writing ─▶ free
type staging struct {
	arenas *arenas
	cfg    stagingConfig

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

// stagingConfig is what the user chose.
type stagingConfig struct {
	slots  int // a rank
	busy   WhenBusy
	nproc  int
	memory StagingMemory
	shared string
	log    *slog.Logger
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
// lock of staging, but the arena is not touched by others while it is made.
type slot struct {
	index      int
	phase      phase
	making     bool   // its arena is being made or grown
	doomed     bool   // the save was aborted meanwhile
	checkpoint string // unless it is free
	arena      *arena
	generation uint64
	plan       *slotPlan
}

// span is a range of bytes in an arena.
type span struct{ off, size int64 }

// errNoSlotFree says that a save was given up because all slots are in use.
var errNoSlotFree = errors.New("all staging slots are in use by earlier saves")

func newStaging(a *arenas, cfg stagingConfig) *staging {
	s := &staging{arenas: a, cfg: cfg, moved: make(chan struct{}), ranks: map[int][]*slot{}, verdicts: map[string]*verdict{}}
	s.ahead, s.stop = context.WithCancel(context.Background())
	return s
}

func itemKey(it plan.Item) string {
	if it.Value {
		return "v" + it.Shard.FQN
	}
	return "t" + it.Shard.Box.Key() + "@" + it.Shard.FQN
}

// tell wakes those who wait for a slot. The caller holds the lock.
func (s *staging) tell() {
	close(s.moved)
	s.moved = make(chan struct{})
}

// of is the slots of a rank, as many as there is memory for. The caller holds
// the lock.
func (s *staging) of(rank int) []*slot {
	n := s.cfg.slots
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
func (s *staging) fit(rank int, size int64) error {
	size = (size + arenaPage - 1) / arenaPage * arenaPage
	s.mu.Lock()
	defer s.mu.Unlock()
	s.trimRank(rank) // what a restore has let go
	if size <= s.largest {
		return nil
	}
	budget, err := s.cfg.memory.resolve(s.cfg.shared, s.arenas.held())
	if err != nil {
		return err
	}
	n := int(min(int64(s.cfg.slots), budget/int64(s.cfg.nproc)/max(size, 1)))
	switch {
	case n < 1 && s.cfg.memory != (StagingMemory{}):
		return fmt.Errorf("one staging slot of %d bytes for each of %d ranks is more than the %d bytes of --staging-memory: %w", size, s.cfg.nproc, budget, errTooSmall)
	}
	s.largest = size
	if n = max(n, 1); s.limit > 0 {
		n = min(n, s.limit)
	}
	if n < s.cfg.slots && n != s.limit {
		s.cfg.log.Warn("there is memory for fewer staging slots than were asked for: a save waits until an earlier one is written",
			"slots", n, "asked", s.cfg.slots, "slot_bytes", size, "ranks", s.cfg.nproc, "staging_memory", budget)
	}
	s.limit = n
	for rank := range s.ranks {
		s.trimRank(rank)
	}
	return nil
}

// errTooSmall is about a bound that the user has set.
var errTooSmall = fmt.Errorf("raise it, or save less: %w", syscall.ENOSPC)

// grant is a slot as its worker sees it.
type grant struct {
	index      int
	path       string
	size       int64 // of the file
	generation uint64
}

// take gives a rank the slot for its part of a save, and writes its header.
func (s *staging) take(ctx context.Context, rank int, participants []int, h slotHeader, p *slotPlan) (grant, error) {
	if len(h.Checkpoint) > maxID {
		return grant{}, badRequest("the ID %.64q… is longer than %d bytes", h.Checkpoint, maxID)
	}
	if err := s.fit(rank, p.end); err != nil {
		return grant{}, err
	}
	s.arenas.spare(s.cfg.nproc) // what a larger group has left
	sl, err := s.find(ctx, rank, h.Checkpoint, participants)
	if err != nil {
		return grant{}, err
	}
	defer s.making.Done()
	err = s.make(ctx, rank, sl, p.end)
	s.mu.Lock()
	defer s.mu.Unlock()
	sl.making = false
	s.tell()
	if sl.doomed || err != nil {
		s.drop(sl)
		return grant{}, cmpErr(err, fmt.Errorf("checkpoint %s was aborted", h.Checkpoint))
	}
	sl.generation++
	h.Generation = sl.generation
	sl.plan = p
	writeSlotHeader(sl.arena.data, h, p)
	s.makeAhead(rank, p.end)
	return grant{sl.index, sl.arena.path, int64(len(sl.arena.data)), sl.generation}, nil
}

// find waits for a slot of a rank and marks it as being made.
func (s *staging) find(ctx context.Context, rank int, checkpoint string, participants []int) (*slot, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cfg.busy != BusyWait {
		if skip := s.judge(rank, checkpoint, participants); skip {
			return nil, fmt.Errorf("%s is not saved: %w", checkpoint, errNoSlotFree)
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

// close gives back what is left when no process and no writer is.
func (s *staging) close() {
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
				s.arenas.give(sl.arena)
				sl.phase, sl.arena = free, nil
			}
		}
	}
}
