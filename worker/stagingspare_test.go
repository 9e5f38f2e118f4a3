package worker

import (
	"log/slog"
	"os"
	"sync/atomic"
	"testing"

	"github.com/ckptstore/ckptstore/planner/plan"
	"github.com/ckptstore/ckptstore/worker/shm"
)

// bounded is staging of one rank with two slots and a bound in bytes.
func bounded(t *testing.T, bound int64) (*staging, *arenas) {
	t.Helper()
	a, err := openArenas(t.TempDir(), storeA, "run")
	if err != nil {
		t.Fatal(err)
	}
	s := newStaging(a, stagingConfig{slots: 2, nproc: 1, busy: BusyWait, memory: StagingMemory{Bytes: bound}, log: slog.New(slog.DiscardHandler)})
	t.Cleanup(func() {
		s.close()
		if err := a.close(); err != nil {
			t.Error(err)
		}
	})
	return s, a
}

// takes takes a slot for a save of so many bytes, and waits until all memory is
// made that is made ahead.
func takes(t *testing.T, s *staging, checkpoint string, bytes int64) {
	t.Helper()
	p := layOutSlot([]plan.Item{{Value: true, Bytes: bytes}}, nil)
	if _, err := s.take(t.Context(), 0, []int{0}, slotHeader{Checkpoint: checkpoint}, p); err != nil {
		t.Fatal(err)
	}
	if _, err := s.made(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
}

// seals ends the copying of a save.
func seals(t *testing.T, s *staging, checkpoint string) {
	t.Helper()
	s.mu.Lock()
	sl := s.holding(0, checkpoint)
	s.mu.Unlock()
	storeSealed(sl.arena.data, sl.generation)
	if _, ok, err := s.seal(0, checkpoint, 2); !ok || err != nil {
		t.Fatal(ok, err)
	}
}

// When saves grow so that there is memory for one slot only, the other one's is
// freed: at once if it is free, or else as soon as it is.
func TestFewerSlotsKeepTheBound(t *testing.T) {
	const bound = 10 << 20
	for _, c := range []struct {
		name  string
		later bool                                                   // only the next save finds out
		use   func(t *testing.T, s *staging, a *arenas) (end func()) // of the slot that is to go
	}{
		{"free", false, func(*testing.T, *staging, *arenas) func() { return func() {} }},
		{"sealed", false, func(t *testing.T, s *staging, _ *arenas) func() {
			for _, id := range []string{"c", "d"} {
				takes(t, s, id, 4<<20)
				seals(t, s, id)
			}
			s.abort("c")
			if s.ranks[0][1].phase != sealed {
				t.Fatal("the second slot is not in use")
			}
			return func() { s.abort("d") }
		}},
		{"read", true, func(_ *testing.T, s *staging, a *arenas) func() {
			a.keep(s.ranks[0][1].arena, &kept{checkpoint: "b"})
			_, release := a.hold("b")
			return release
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, a := bounded(t, bound)
			for _, id := range []string{"a", "b"} {
				takes(t, s, id, 4<<20)
				seals(t, s, id)
			}
			s.abort("a")
			s.abort("b")
			end := c.use(t, s, a)
			takes(t, s, "e", 9<<20)
			seals(t, s, "e")
			end()
			if held := a.held(); held > bound && !c.later {
				t.Errorf("%d bytes are held when the slot is free, of a bound of %d", held, bound)
			}
			s.abort("e")
			takes(t, s, "f", 9<<20)
			if held := a.held(); held > bound || s.limit != 1 {
				t.Errorf("%d bytes are held in %d slots, of a bound of %d", held, s.limit, bound)
			}
		})
	}
}

// A slot that gives way frees its memory also where a worker maps it, unless
// somebody reads it or its bytes are still needed.
func TestSlotsGiveWay(t *testing.T) {
	s, a := bounded(t, 10<<20)
	for _, id := range []string{"a", "b"} {
		takes(t, s, id, 4<<20)
		seals(t, s, id)
	}
	if s.spare() {
		t.Error("a sealed slot gave way")
	}
	a.keep(s.ranks[0][0].arena, &kept{checkpoint: "a"})
	_, release := a.hold("a")
	s.abort("b")
	worker, err := os.Open(s.ranks[0][1].arena.path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = worker.Close() })
	if !s.spare() {
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
	if s.spare() {
		t.Error("a slot that is read gave way")
	}
	release()
	if !s.spare() || a.held() != 0 {
		t.Errorf("%d bytes are held when all slots gave way", a.held())
	}
	takes(t, s, "c", 4<<20)
}

// So is that of a slot whose memory is still being made then.
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
	p := layOutSlot([]plan.Item{{Value: true, Bytes: 4 << 20}}, nil)
	if _, err := s.take(t.Context(), 0, []int{0}, slotHeader{Checkpoint: "a"}, p); err != nil {
		t.Fatal(err)
	}
	<-begun
	seals(t, s, "a")
	s.abort("a")
	takes(t, s, "b", 9<<20)
	close(goOn)
	s.making.Wait()
	if held := a.held(); held > bound {
		t.Errorf("%d bytes are held, of a bound of %d", held, bound)
	}
}
