package worker

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/ckptstore/ckptstore/planner/plan"
)

// staging is one slot a rank in shared memory. A slot is taken when its rank
// calls save, filled by the worker, sealed, read by the writer, and free
// again when its bytes are written or the save is aborted. The memory of an
// aborted save is dropped: its worker may still be copying into it.
type staging struct {
	arenas *arenas

	mu    sync.Mutex
	ranks map[int]*slot
}

// slot is the staging memory of one rank.
type slot struct {
	free chan struct{} // holds one token while nobody uses the slot

	// Valid while taken, under the lock of staging.
	checkpoint string
	arena      *arena
	at         map[string]span // by itemKey
	writing    bool
	dropped    bool // aborted while it was being written
}

// span is a range of bytes in an arena.
type span struct{ off, size int64 }

func newStaging(a *arenas) *staging { return &staging{arenas: a, ranks: map[int]*slot{}} }

func itemKey(it plan.Item) string {
	if it.Value {
		return "v" + it.Shard.FQN
	}
	return "t" + it.Shard.Box.Key() + "@" + it.Shard.FQN
}

// take waits until rank's slot is free and lays the items out in it. It
// returns the file, its size and the offset of each item.
func (s *staging) take(ctx context.Context, rank int, checkpoint string, items []plan.Item) (*arena, int64, []int64, error) {
	s.mu.Lock()
	sl := s.ranks[rank]
	if sl == nil {
		sl = &slot{free: make(chan struct{}, 1)}
		sl.free <- struct{}{}
		s.ranks[rank] = sl
	}
	s.mu.Unlock()
	select {
	case <-sl.free:
	case <-ctx.Done():
		return nil, 0, nil, fmt.Errorf("the last save of rank %d still holds its staging slot: %w", rank, ctx.Err())
	}
	sizes := make([]int64, len(items))
	for i, it := range items {
		sizes[i] = it.Bytes
	}
	offsets, size := place(sizes)
	a, err := s.arenas.take(rank, "save", size)
	if err != nil {
		sl.free <- struct{}{}
		return nil, 0, nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	sl.checkpoint, sl.arena, sl.writing, sl.dropped, sl.at = checkpoint, a, false, false, make(map[string]span, len(items))
	for i, it := range items {
		sl.at[itemKey(it)] = span{offsets[i], it.Bytes}
	}
	return a, size, offsets, nil
}

// sealed is the number of bytes that rank has staged for a checkpoint, and
// whether its slot still belongs to it.
func (s *staging) sealed(rank int, checkpoint string) (int64, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sl := s.ranks[rank]
	if sl == nil || sl.checkpoint != checkpoint {
		return 0, false
	}
	size := int64(0)
	for _, at := range sl.at {
		size += at.size
	}
	return size, true
}

// open gives the bytes of a sealed rank to the writer. release frees the slot.
func (s *staging) open(checkpoint string, rank int, items []plan.Item) (src slotSource, release func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sl := s.ranks[rank]
	if sl == nil || sl.checkpoint != checkpoint {
		return nil, nil, fmt.Errorf("the staged bytes of rank %d for %s are gone", rank, checkpoint)
	}
	for _, it := range items {
		at, ok := sl.at[itemKey(it)]
		if !ok {
			return nil, nil, fmt.Errorf("rank %d has not staged %q %v, which the global plan wants of it", rank, it.Shard.FQN, it.Shard.Box)
		}
		src = append(src, sl.arena.data[at.off:at.off+at.size])
	}
	sl.writing = true
	return src, func() { s.written(sl) }, nil
}

// written frees a slot whose writer is done.
func (s *staging) written(sl *slot) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sl.writing = false
	if sl.dropped {
		s.empty(sl)
		return
	}
	s.arenas.give(sl.arena)
	sl.checkpoint, sl.arena, sl.at = "", nil, nil
	sl.free <- struct{}{}
}

// abort frees the slots of a save that will not be written, of all ranks or of
// one. One that is being written is freed by its writer.
func (s *staging) abort(checkpoint string, ranks ...int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for rank, sl := range s.ranks {
		if sl.checkpoint != checkpoint || len(ranks) > 0 && !slices.Contains(ranks, rank) {
			continue
		}
		if sl.writing {
			sl.dropped = true
			continue
		}
		s.empty(sl)
	}
}

// empty drops what is in a slot.
func (s *staging) empty(sl *slot) {
	// A file that cannot be removed stays until the job ends.
	_ = s.arenas.drop(sl.arena)
	sl.checkpoint, sl.arena, sl.at = "", nil, nil
	sl.free <- struct{}{}
}

// close drops what is left when no process and no writer is.
func (s *staging) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, sl := range s.ranks {
		if sl.checkpoint != "" && !sl.writing {
			s.empty(sl)
		}
	}
}

// slotSource is the bytes of a rank's items, in the order of its write plan.
type slotSource [][]byte

// Item implements storage.Source.
func (s slotSource) Item(i int) ([]byte, error) { return s[i], nil }
