package staging

import (
	"log/slog"
	"os"
	"sync/atomic"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/session/shm"
)

// bounded returns staging of one rank with two slots and a bound in bytes.
func bounded(t *testing.T, bound int64) (*Slots, *Arenas) {
	t.Helper()
	a, err := Open(t.TempDir(), storeA, "run", 0, nil, quiet)
	if err != nil {
		t.Fatal(err)
	}
	s := New(a, Config{Slots: 2, Ranks: 1, Busy: BusyWait, Memory: Memory{Bytes: bound}, Log: slog.New(slog.DiscardHandler)})
	t.Cleanup(func() {
		s.Close()
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	})
	return s, a
}

// takes takes a slot for a save of so many bytes, and waits until all memory is
// allocated ahead.
func takes(t *testing.T, s *Slots, id string, bytes int64) {
	t.Helper()
	p := LayOut([]checkpoint.Item{{Value: true, Bytes: bytes}}, nil)
	if _, err := s.Take(t.Context(), Part{Checkpoint: id}, []int{0}, p); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Made(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
}

// seals ends the copying of a save.
func seals(t *testing.T, s *Slots, checkpoint string) {
	t.Helper()
	s.mu.Lock()
	sl := s.holding(0, checkpoint)
	s.mu.Unlock()
	storeSealed(sl.arena.data, sl.generation)
	if _, ok, err := s.Seal(0, checkpoint); !ok || err != nil {
		t.Fatal(ok, err)
	}
}

// When saves grow so that there is memory for only one slot, the other slot's
// memory is freed: at once if it is free, or else as soon as it is.
func TestFewerSlotsKeepTheBound(t *testing.T) {
	const bound = 10 << 20
	for _, c := range []struct {
		name  string
		later bool                                                 // only the next save detects it
		use   func(t *testing.T, s *Slots, a *Arenas) (end func()) // of the slot that must go
	}{
		{"free", false, func(*testing.T, *Slots, *Arenas) func() { return func() {} }},
		{"sealed", false, func(t *testing.T, s *Slots, _ *Arenas) func() {
			for _, id := range []string{"c", "d"} {
				takes(t, s, id, 4<<20)
				seals(t, s, id)
			}
			s.Abort("c")
			if s.ranks[0][1].phase != sealed {
				t.Fatal("the second slot is not in use")
			}
			return func() { s.Abort("d") }
		}},
		{"read", true, func(_ *testing.T, s *Slots, a *Arenas) func() {
			a.keep(s.ranks[0][1].arena, &kept{checkpoint: "b"})
			_, release := a.Hold("b")
			return release
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, a := bounded(t, bound)
			for _, id := range []string{"a", "b"} {
				takes(t, s, id, 4<<20)
				seals(t, s, id)
			}
			s.Abort("a")
			s.Abort("b")
			end := c.use(t, s, a)
			takes(t, s, "e", 9<<20)
			seals(t, s, "e")
			end()
			if held := a.held(); held > bound && !c.later {
				t.Errorf("%d bytes are held when the slot is free, of a bound of %d", held, bound)
			}
			s.Abort("e")
			takes(t, s, "f", 9<<20)
			if held := a.held(); held > bound || s.limit != 1 {
				t.Errorf("%d bytes are held in %d slots, of a bound of %d", held, s.limit, bound)
			}
		})
	}
}

// A slot that is no longer needed frees its memory even if a worker maps it,
// unless it has a reader or its bytes are still needed.
func TestSlotsGiveWay(t *testing.T) {
	s, a := bounded(t, 10<<20)
	for _, id := range []string{"a", "b"} {
		takes(t, s, id, 4<<20)
		seals(t, s, id)
	}
	if s.Spare() {
		t.Error("a sealed slot gave way")
	}
	a.keep(s.ranks[0][0].arena, &kept{checkpoint: "a"})
	_, release := a.Hold("a")
	s.Abort("b")
	worker, err := os.Open(s.ranks[0][1].arena.path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = worker.Close() })
	if !s.Spare() {
		t.Error("a free slot did not give way")
	}
	if info, err := worker.Stat(); err != nil || info.Size() != 0 {
		t.Errorf("a slot that gave way: %+v, %v", info, err)
	}
	if s.ranks[0][0].arena == nil {
		t.Error("a slot that is sealed and read gave way")
	}
	s.mu.Lock()
	s.release(s.ranks[0][0])
	s.mu.Unlock()
	if s.Spare() {
		t.Error("a slot that is read gave way")
	}
	release()
	if !s.Spare() || a.held() != 0 {
		t.Errorf("%d bytes are held when all slots gave way", a.held())
	}
	takes(t, s, "c", 4<<20)
}

// The same holds for a slot whose memory is being allocated then.
func TestFewerSlotsWhileOneIsMade(t *testing.T) {
	const bound = 10 << 20
	s, a := bounded(t, bound)
	var made atomic.Int32
	begun, goOn := make(chan struct{}), make(chan struct{})
	a.room = func(file *os.File) (int64, error) {
		if made.Add(1) == 2 { // ahead, for the second slot
			close(begun)
			<-goOn
		}
		return shm.Room(file)
	}
	p := LayOut([]checkpoint.Item{{Value: true, Bytes: 4 << 20}}, nil)
	if _, err := s.Take(t.Context(), Part{Checkpoint: "a"}, []int{0}, p); err != nil {
		t.Fatal(err)
	}
	<-begun
	seals(t, s, "a")
	s.Abort("a")
	takes(t, s, "b", 9<<20)
	close(goOn)
	s.making.Wait()
	if held := a.held(); held > bound {
		t.Errorf("%d bytes are held, of a bound of %d", held, bound)
	}
}

// The decision to skip a save is made while the memory of another slot is
// allocated. The race detector checks the shared state.
func TestJudgeWhileMemoryIsMade(t *testing.T) {
	a, err := Open(t.TempDir(), storeA, "run", 0, nil, quiet)
	if err != nil {
		t.Fatal(err)
	}
	s := New(a, Config{Slots: 2, Ranks: 1, Busy: BusySkip, Memory: Memory{Bytes: 256 << 20}, Log: slog.New(slog.DiscardHandler)})
	defer func() {
		s.Close()
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	}()
	for i := range 8 {
		id := string(rune('a' + i))
		p := LayOut([]checkpoint.Item{{Value: true, Bytes: int64(i+1) << 20}}, nil) // each needs more memory, in both slots
		if _, err := s.Take(t.Context(), Part{Checkpoint: id}, []int{0}, p); err != nil {
			t.Fatal(err)
		}
		s.Abort(id)
	}
}

// Replicas of other nodes take slots of this node's ranks, but never the first one.
func TestReplicasLeaveTheFirstSlot(t *testing.T) {
	const size = 1 << 16
	for _, c := range []struct {
		peers int
		bound int64
		slots int
	}{
		{0, 3 * size, 2},
		{1, 5 * size, 2},
		{1, 3 * size, 1},
		{7, 3 * size, 1},
	} {
		s, _ := bounded(t, c.bound)
		s.cfg.Peers = c.peers
		takes(t, s, "step-1.a1", size-arenaPage)
		if made, err := s.Made(t.Context(), 0); len(made) != c.slots || err != nil {
			t.Errorf("%d peers: %d slots in %d bytes, want %d: %v", c.peers, len(made), c.bound, c.slots, err)
		}
	}
}
