package launch_test

import (
	"context"
	"path/filepath"
	"slices"
	"testing"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/projections"
)

// bodiesOf returns all bodies of type T in the log of a run, in order.
func bodiesOf[T any](t *testing.T, run string) []*T {
	t.Helper()
	var out []*T
	for _, r := range logOf(t, run) {
		body, err := r.Body()
		if err != nil {
			t.Fatal(err)
		}
		if b, ok := any(body).(*T); ok {
			out = append(out, b)
		}
	}
	return out
}

// one is the only body of its type.
func one[T any](t *testing.T, run string) *T {
	t.Helper()
	all := bodiesOf[T](t, run)
	if len(all) != 1 {
		t.Fatalf("%d events %T of run %q, want 1", len(all), *new(T), run)
	}
	return all[0]
}

func logOf(t *testing.T, run string) []events.Recorded {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	end, err := home.Log.Last(ctx)
	if err != nil {
		t.Fatal(err)
	}
	var out []events.Recorded
	for r, err := range home.Log.Read(ctx, 1, end) {
		if err != nil {
			t.Fatal(err)
		}
		if r.Scope.Run == run {
			out = append(out, r)
		}
	}
	return out
}

// ended are the checkpoints of a run that were committed and aborted.
func ended(t *testing.T, run string) (committed, aborted []string) {
	t.Helper()
	for _, b := range bodiesOf[events.CheckpointCommitted](t, run) {
		committed = append(committed, b.Checkpoint)
	}
	for _, b := range bodiesOf[events.CheckpointAborted](t, run) {
		aborted = append(aborted, b.Checkpoint)
	}
	return committed, aborted
}

func wantEnded(t *testing.T, committed, aborted []string) {
	t.Helper()
	gotCommitted, gotAborted := ended(t, runOf(t))
	if !slices.Equal(gotCommitted, committed) || !slices.Equal(gotAborted, aborted) {
		t.Fatalf("committed %q and aborted %q, want %q and %q", gotCommitted, gotAborted, committed, aborted)
	}
}

// wantCommitted is for overlapping saves, which are committed in any order.
func wantCommitted(t *testing.T, want ...string) {
	t.Helper()
	committed, aborted := ended(t, runOf(t))
	slices.Sort(committed)
	if !slices.Equal(committed, want) || len(aborted) > 0 {
		t.Fatalf("committed %q and aborted %q, want %q", committed, aborted, want)
	}
}

// trialOf is the trial of the test's run, as the views have it.
func trialOf(t *testing.T) projections.Trial {
	t.Helper()
	trial, err := views{home.Views()}.Trial(t.Context(), runOf(t), projections.DefaultTrial)
	if err != nil {
		t.Fatal(err)
	}
	return trial
}

// dirOf is where a checkpoint of the test's run lies.
func dirOf(t *testing.T, id string) string {
	return filepath.Join(home.Data.Dir(), checkpoint.RefOf(runOf(t), projections.DefaultTrial, id).String())
}
