package store

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
)

// settlerOf returns the owner's settler.
func settlerOf(t *testing.T, s *Store) *settler {
	t.Helper()
	own := s.owner.ownership()
	if own == nil {
		t.Fatal("it does not own the store")
	}
	return own.settler
}

// TestSettled: the settled part of the log ends at the first decision that is not carried out.
func TestSettled(t *testing.T) {
	t.Parallel()
	dir := made(t)
	s := open(t, dir)
	at := settlerOf(t, s)
	advance := func() uint64 {
		t.Helper()
		last, err := s.Log.Last(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(own(s).views.Wait(t.Context(), last), at.advance(t.Context(), last)); err != nil {
			t.Fatal(err)
		}
		return last - at.settled.Load()
	}
	first := filepath.Join(committed(t, s, "run", 1), checkpoint.ReceiptFile)
	if left := advance(); left != 0 {
		t.Errorf("%d events are left, and all is done", left)
	}
	before := at.settled.Load()
	text := read(t, first)
	remove(t, first, "") // which is settled
	second := filepath.Join(committed(t, s, "other", 2), checkpoint.ReceiptFile)
	was := read(t, second)
	remove(t, second, "")
	if left := advance(); left == 0 || at.settled.Load() < before {
		t.Errorf("%d events are left, want the commit whose receipt is gone", left)
	}
	write(t, second, was)
	if left := advance(); left != 0 {
		t.Errorf("%d events are left", left)
	}
	_, aborted := written(t, s, "run", 3)
	must(t, s, "run", events.CheckpointAborted{Attempt: 1, Checkpoint: aborted.Checkpoint, Reason: "test"})
	if left := advance(); left == 0 {
		t.Errorf("%d events are left, want the abort whose files are there", left)
	}
	if err := s.Data.Remove(t.Context(), refOf("run", aborted.Checkpoint)); err != nil {
		t.Fatal(err)
	}
	want := at.settled.Load()
	if left := advance(); left != 0 {
		t.Errorf("%d events are left", left)
	}
	shut(t, s)
	if e, err := readEnd(dir); err != nil || e.Settled <= want || e.Settled > e.Sequence {
		t.Errorf("noted %+v, %v", e, err)
	}
	// Settled decisions are not checked again, except for a few events at the end.
	s = open(t, dir)
	if got := read(t, first); got != text {
		t.Errorf("repaired to %s", got)
	}
}

func own(s *Store) *ownership { return s.owner.ownership() }

// TestRepairFromSettled checks all later decisions, however old they are.
func TestRepairFromSettled(t *testing.T) {
	t.Parallel()
	dir := made(t)
	s := open(t, dir)
	receipt := filepath.Join(committed(t, s, "run", 1), checkpoint.ReceiptFile)
	for _, step := range []int64{2, 3} {
		committed(t, s, "run", step)
	}
	for range repairAlways/1000 + 1 {
		facts := make([]events.Fact, 1000)
		for i := range facts {
			var err error
			facts[i], err = events.NewFact(Stamp("test"), events.Scope{Run: "run", Trial: trialName, Actor: events.Node(0)}, events.WriteFailed{Attempt: 1, Checkpoint: "x", Rank: i, Error: "test"})
			if err != nil {
				t.Fatal(err)
			}
		}
		if _, err := s.Log.Append(t.Context(), facts...); err != nil {
			t.Fatal(err)
		}
	}
	last, err := s.Log.Last(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := own(s).views.Wait(t.Context(), last); err != nil {
		t.Fatal(err)
	}
	want := read(t, receipt)
	for settled, repaired := range map[uint64]bool{1: true, 0: false, last: false} {
		remove(t, receipt, "")
		got, err := repair(t.Context(), s, s.Log, own(s).views, settled)
		if err != nil || got != last {
			t.Fatal(got, err)
		}
		if _, err := os.Stat(receipt); (err == nil) != repaired {
			t.Errorf("settled up to %d: %v", settled, err)
		}
	}
	// The rest is done in the background.
	b := &scrubber{store: s}
	b.pass(t.Context())
	if got := read(t, receipt); got != want {
		t.Errorf("repaired to %s", got)
	}
}

// TestAllReceipts: reading the log finds each receipt that it contradicts, including those that an
// open does not compare.
func TestAllReceipts(t *testing.T) {
	t.Parallel()
	dir := made(t)
	s := open(t, dir)
	wrong := committed(t, s, "run", 1)
	right := committed(t, s, "run", 2)
	beyond := committed(t, s, "other", 3)
	elsewhere := filepath.Join(filepath.Dir(beyond), "copied")
	if err := os.CopyFS(elsewhere, os.DirFS(right)); err != nil {
		t.Fatal(err)
	}
	if out, err := s.VerifyLog(t.Context(), nil); err != nil || len(out.Findings) != 0 {
		t.Fatalf("%+v, %v", out, err)
	}
	for path, change := range map[string]func(*checkpoint.Receipt){
		wrong:  func(r *checkpoint.Receipt) { r.Event = NewID() },
		beyond: func(r *checkpoint.Receipt) { r.Sequence += 1000 },
	} {
		rewrite(t, s, path, change)
	}
	out, err := s.VerifyLog(t.Context(), nil)
	if err != nil || len(out.Findings) != 2 {
		t.Fatalf("%+v, %v", out, err)
	}
	all := out.Findings[0].String() + out.Findings[1].String()
	for _, want := range []string{wrong, beyond, "the log ends at event", "in the log that is", "rolled back"} {
		if !strings.Contains(all, want) {
			t.Errorf("%s does not contain %s", all, want)
		}
	}
	shut(t, s)
	refused(t, Options{Location: dir}, ErrKnownDamage, "rolled back")
}

// rewrite changes the receipt of a checkpoint.
func rewrite(t *testing.T, s *Store, dir string, change func(*checkpoint.Receipt)) {
	t.Helper()
	var found checkpoint.Receipt
	err := s.Data.EachReceipt(t.Context(), func(r checkpoint.Receipt) error {
		if filepath.Join(s.Data.Dir(), r.Ref.String()) == dir {
			found = r
		}
		return nil
	})
	if err != nil || found.Event == "" {
		t.Fatal(found, err)
	}
	change(&found)
	remove(t, dir, checkpoint.ReceiptFile)
	if err := s.Data.WriteReceipt(t.Context(), found.Ref, found); err != nil {
		t.Fatal(err)
	}
}
