package staging

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/tensor"
)

// keeping returns staging with so many slots of one rank.
func keeping(t *testing.T, slots int) (*Slots, *Arenas) {
	t.Helper()
	a, err := Open(t.TempDir(), storeA, "run", 0, nil, quiet)
	if err != nil {
		t.Fatal(err)
	}
	s := New(a, Config{Slots: slots, Ranks: 1, Busy: BusyWait, Memory: Memory{Bytes: 1 << 20}, Log: slog.New(slog.DiscardHandler)})
	t.Cleanup(func() {
		s.Close()
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	})
	return s, a
}

var keptItem = checkpoint.Item{Value: true, Bytes: 5000, Shard: tensor.Shard{FQN: "value"}}

// stage runs a save of one value, to the end of its write.
func stage(t *testing.T, s *Slots, id string, with byte) {
	t.Helper()
	encoded := checkpoint.EncodeLocal(checkpoint.Local{Items: []checkpoint.Item{keptItem}})
	p := LayOut([]checkpoint.Item{keptItem}, encoded)
	if _, err := s.Take(t.Context(), Part{Attempt: 1, Fingerprint: checkpoint.Sum(encoded), Checkpoint: id}, []int{0}, p); err != nil {
		t.Fatal(err)
	}
	s.mu.Lock()
	sl := s.holding(0, id)
	s.mu.Unlock()
	at := p.at[Key(keptItem)]
	copy(sl.arena.data[at.Offset:], bytes.Repeat([]byte{with}, int(at.Size)))
	storeSealed(sl.arena.data, sl.generation)
	if _, ok, err := s.Seal(0, id); !ok || err != nil {
		t.Fatal(ok, err)
	}
	src, release, err := s.Open(id, 0, []checkpoint.Item{keptItem})
	if err != nil {
		t.Fatal(err)
	}
	content, err := src.Item(0)
	if err != nil {
		t.Fatal(err)
	}
	release([]data.ChunkDigest{{Item: keptItem, Digest: checkpoint.Sum(content)}})
}

// wantKept compares the held data of a checkpoint.
func wantKept(t *testing.T, c Copies, with byte) {
	t.Helper()
	want := bytes.Repeat([]byte{with}, int(keptItem.Bytes))
	got, digest := c.Chunk(0, keptItem)
	if !bytes.Equal(got, want) || digest != checkpoint.Sum(want) {
		t.Errorf("%d bytes %v… with digest %s", len(got), got[:min(len(got), 3)], digest)
	}
}

// A slot is not reused while it is read: its rank's next save waits.
func TestReadSlotIsNotOverwritten(t *testing.T) {
	s, a := keeping(t, 1)
	stage(t, s, "step-1.a1", 1)
	held, release := a.Hold("step-1.a1")
	saved := make(chan struct{})
	go func() {
		defer close(saved)
		stage(t, s, "step-2.a1", 2)
	}()
	select {
	case <-saved:
		t.Error("a slot that is read is used again")
	case <-time.After(50 * time.Millisecond):
	}
	wantKept(t, held, 1)
	release()
	<-saved
	if held, release := a.Hold("step-1.a1"); len(held) > 0 {
		t.Error("what was overwritten is still found")
	} else {
		release()
	}
	held, release = a.Hold("step-2.a1")
	wantKept(t, held, 2)
	release()
}

// A slot that is read is neither unmapped nor grown, even if it is dropped;
// afterwards it is.
func TestReadSlotStaysMapped(t *testing.T) {
	s, a := keeping(t, 2)
	stage(t, s, "step-1.a1", 1)
	s.making.Wait()
	held, release := a.Hold("step-1.a1")
	s.mu.Lock()
	s.makeAhead(0, 1<<16)
	s.mu.Unlock()
	s.making.Wait()
	wantKept(t, held, 1)
	sl := s.ranks[0][0]
	f := sl.arena
	s.mu.Lock()
	s.drop(sl)
	s.mu.Unlock()
	if a.spare(0) {
		t.Error("an arena that is in use was spared")
	}
	wantKept(t, held, 1)
	release()
	if f.data != nil {
		t.Error("still mapped after its last reader")
	}
}

// The content written last is overwritten last, and aborted content first.
func TestOldestSlotIsTaken(t *testing.T) {
	s, a := keeping(t, 3)
	for i, id := range []string{"1", "2", "3", "4", "5"} {
		stage(t, s, id, byte(i))
		s.making.Wait()
	}
	found := func() (ids []string) {
		for _, id := range []string{"1", "2", "3", "4", "5", "6", "7"} {
			if held, release := a.Hold(id); len(held) > 0 {
				ids = append(ids, id)
				release()
			}
		}
		return ids
	}
	if got := found(); !slices.Equal(got, []string{"3", "4", "5"}) {
		t.Errorf("kept %q", got)
	}
	s.Abort("5")
	stage(t, s, "6", 6)
	if got := found(); !slices.Equal(got, []string{"3", "4", "6"}) {
		t.Errorf("after an abort: kept %q", got)
	}
	// Slots that are read are skipped.
	_, release := a.Hold("3")
	stage(t, s, "7", 7)
	if got := found(); !slices.Equal(got, []string{"3", "6", "7"}) {
		t.Errorf("during a restore: kept %q", got)
	}
	release()
	// The slots of an ended attempt are the next attempt's.
	s.Close()
	next := New(a, s.cfg)
	t.Cleanup(next.Close)
	stage(t, next, "1", 1)
	next.making.Wait()
	if got := found(); !slices.Equal(got, []string{"1", "6", "7"}) {
		t.Errorf("in the next attempt: kept %q", got)
	}
}

// The wait for a slot has a deadline.
func TestReadSlotIsWaitedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, a := keeping(t, 1)
		stage(t, s, "step-1.a1", 1)
		_, release := a.Hold("step-1.a1")
		defer release()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		p := LayOut([]checkpoint.Item{keptItem}, nil)
		if _, err := s.Take(ctx, Part{Checkpoint: "step-2.a1"}, []int{0}, p); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a save during a restore that does not end: %v", err)
		}
	})
}

// A worker of this attempt that received a slot's path may write to it at any
// time: the slot is not lent until the attempt is over.
func TestOwnSlotIsNotLent(t *testing.T) {
	s, a := keeping(t, 1)
	stage(t, s, "step-1.a1", 1)
	held, release := a.Hold("step-1.a1")
	if len(held) != 1 || len(held.Idle()) > 0 {
		t.Errorf("of %d slots, %d can be lent", len(held), len(held.Idle()))
	}
	release()
	s.Close()
	held, release = a.Hold("step-1.a1")
	defer release()
	if len(held.Idle()) != 1 {
		t.Errorf("of %d slots of an attempt that is over, %d can be lent", len(held), len(held.Idle()))
	}
}
