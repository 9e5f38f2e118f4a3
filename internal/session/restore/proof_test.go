package restore

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/tensor"
)

// keeping returns a rank's slots in a directory of their own.
func keeping(t *testing.T) (a *staging.Arenas, slots func() *staging.Slots, shared string) {
	t.Helper()
	shared = t.TempDir()
	a, err := staging.Open(shared, "01990000-0000-7000-8000-00000000000a", "run", 0, nil, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	})
	return a, func() *staging.Slots {
		s := staging.New(a, staging.Config{
			Slots: 1, Ranks: 1, Busy: staging.BusyWait, Memory: staging.Memory{Bytes: 1 << 20}, Log: slog.New(slog.DiscardHandler),
		})
		t.Cleanup(s.Close)
		return s
	}, shared
}

// stage runs a save of one value, to the end of its write.
func stage(t *testing.T, s *staging.Slots, id string, with byte) {
	t.Helper()
	keep(t, s, id, 0, checkpoint.Item{Value: true, Bytes: 5000, Shard: tensor.Shard{FQN: "value"}}, bytes.Repeat([]byte{with}, 5000))
}

// keep runs a save of one item of a rank, to the end of its write.
func keep(t *testing.T, s *staging.Slots, id string, rank int, item checkpoint.Item, content []byte) {
	t.Helper()
	items := []checkpoint.Item{item}
	encoded := checkpoint.EncodeLocal(checkpoint.Local{Rank: rank, Items: items})
	layout := staging.LayOut(items, encoded)
	got, err := s.Take(t.Context(), staging.Part{Attempt: 1, Rank: rank, Fingerprint: checkpoint.Sum(encoded), Checkpoint: id}, []int{rank}, layout)
	if err != nil {
		t.Fatal(err)
	}
	slot, err := os.OpenFile(got.Path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = io.NewOffsetWriter(slot, layout.Offsets()[0]).Write(content)
	_, merr := slot.WriteAt(binary.LittleEndian.AppendUint64(nil, got.Generation), 8)
	if err := errors.Join(err, merr, slot.Close()); err != nil {
		t.Fatal(err)
	}
	if _, ok, err := s.Seal(rank, id); !ok || err != nil {
		t.Fatal(ok, err)
	}
	_, release, err := s.Open(id, rank, items)
	if err != nil {
		t.Fatal(err)
	}
	release([]data.ChunkDigest{{Item: item, Digest: checkpoint.Sum(content)}})
}

// proving returns a loader whose proof of a checkpoint is running, and a function
// that ends it.
func proving(t *testing.T, a *staging.Arenas, checkpoint string) (l *Loader, end func()) {
	t.Helper()
	held, release := a.Hold(checkpoint)
	ctx, stop := context.WithCancel(t.Context())
	p := &proof{checkpoint: checkpoint, stop: stop, done: make(chan struct{}), slots: held.Uses()}
	l = New(Config{Arenas: a, Work: t.Context()})
	l.proof = p
	go func() {
		<-ctx.Done()
		p.chunks = &data.Proof{}
		release()
		close(p.done)
	}()
	return l, stop
}

// The proof is waited for, and applies only to its slots and its checkpoint.
func TestProofIsOfItsSlots(t *testing.T) {
	a, slots, _ := keeping(t)
	s := slots()
	stage(t, s, "step-1.a1", 1)
	s.Close()
	l, end := proving(t, a, "step-1.a1")
	held, release := a.Hold("step-1.a1")
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := l.proven(gone, "step-1.a1", held); !errors.Is(err, context.Canceled) {
		t.Errorf("a load that has ended waits for a proof: %v", err)
	}
	end()
	for checkpoint, want := range map[string]bool{"step-1.a1": true, "step-2.a1": false} {
		if got, err := l.proven(t.Context(), checkpoint, held); err != nil || (got != nil) != want {
			t.Errorf("%s: proof %v, %v", checkpoint, got, err)
		}
	}
	release()
	next := slots()
	stage(t, next, "step-1.a1", 1)
	next.Close()
	held, release = a.Hold("step-1.a1")
	defer release()
	if got, err := l.proven(t.Context(), "step-1.a1", held); err != nil || len(held) != 1 || got != nil {
		t.Errorf("the same checkpoint in another use of the slot: %d slots, proof %v, %v", len(held), got, err)
	}
}

// A save before any load ends the proof and gets the slot that was being
// verified.
func TestSaveEndsProof(t *testing.T) {
	a, slots, shared := keeping(t)
	s := slots()
	stage(t, s, "step-1.a1", 1)
	s.Close()
	l, end := proving(t, a, "step-1.a1")
	defer end()
	if err := l.EndProof(t.Context()); err != nil {
		t.Fatal(err)
	}
	stage(t, slots(), "step-2.a2", 2)
	if files, err := filepath.Glob(filepath.Join(shared, "*", "*", "r*")); err != nil || len(files) != 1 {
		t.Errorf("there are slots %q, want the former slot: %v", files, err)
	}
}
