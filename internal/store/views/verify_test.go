package views

import (
	"context"
	"errors"
	"iter"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
)

// noLog is a log without events.
type noLog struct{}

func (noLog) Last(context.Context) (uint64, error) { return 0, nil }

func (noLog) Read(ctx context.Context, _, until uint64) iter.Seq2[events.Recorded, error] {
	return func(yield func(events.Recorded, error) bool) {
		if until == 0 {
			<-ctx.Done()
			yield(events.Recorded{}, ctx.Err())
		}
	}
}

// What a killed comparison of views has left is removed by the next one, and not what another one uses.
func TestScratchOfKilledComparison(t *testing.T) {
	t.Parallel()
	parent := t.TempDir()
	o := Options{Store: "S", Log: noLog{}, Logger: slog.New(slog.DiscardHandler)}
	live, err := Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	killed, _, err := makeScratch(parent)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(killed, scratchLock)); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(killed, scratchLock), nil, 0o600); err != nil { // no process locks it
		t.Fatal(err)
	}
	used, remove, err := makeScratch(parent)
	if err != nil {
		t.Fatal(err)
	}
	earlier, young := filepath.Join(parent, scratchPrefix+"earlier"), filepath.Join(parent, scratchPrefix+"young")
	for _, dir := range []string{earlier, young} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	before := time.Now().Add(-2 * scratchAge)
	if err := os.Chtimes(earlier, before, before); err != nil {
		t.Fatal(err)
	}
	if out, err := Verify(t.Context(), parent, o, live.Source()); err != nil || !out.Equal {
		t.Fatalf("verified %+v, %v", out, err)
	}
	left, err := filepath.Glob(filepath.Join(parent, scratchPrefix+"*"))
	if err != nil || len(left) != 2 || !slices.Contains(left, used) || !slices.Contains(left, young) {
		t.Errorf("left: %v, %v", left, err)
	}
	if err := errors.Join(remove(), live.Close()); err != nil {
		t.Error(err)
	}
}
