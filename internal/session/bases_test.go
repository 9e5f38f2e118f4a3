package session

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/object/objecttest"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/projections"
)

// resolving are views that know only checkpoints.
type resolving struct {
	Views
	rows map[string]projections.Checkpoint // by reference
}

func (r resolving) Resolve(_ context.Context, ref string) (projections.Checkpoint, error) {
	c, found := r.rows[ref]
	if !found {
		return c, &projections.NotFoundError{What: "checkpoint", Ref: ref}
	}
	return c, nil
}

// Where files have no links, a save begins with its bases, and uses those of its begin that
// were not deleted before it.
func TestUsableBases(t *testing.T) {
	t.Parallel()
	row := func(run, id string, state projections.State) projections.Checkpoint {
		return projections.Checkpoint{Run: run, Trial: "main", ID: id, State: state, Manifest: strings.Repeat("0a", 32)}
	}
	at := func(run, id string) events.CheckpointRef {
		return events.CheckpointRef{Run: run, Trial: "main", Checkpoint: id}
	}
	views := resolving{rows: map[string]projections.Checkpoint{
		"a run/main@latest": row("a run", "step-2.a1", projections.Committed),
		"a run/main@one":    row("a run", "one", projections.Committed),
		"a run/main@gone":   row("a run", "gone", projections.Deleted),
		"other/main@two":    row("other", "two", projections.Committed),
		"other/main@tag":    row("other", "two", projections.Committed),
	}}
	store := Store{Views: views, Data: data.OpenBackend(objecttest.NewBucket(), vfs.NewMem())}
	l := &decisionLog{eventWriter: &eventWriter{run: "a run", trial: "main", now: time.Now}, attempt: 1}
	s := newSaver(l, store, nil, slog.New(slog.DiscardHandler), staging.New(nil, staging.Config{}))
	if names := s.named(t.Context(), "new.a1"); !slices.Equal(names, []events.CheckpointRef{at("a run", "step-2.a1")}) {
		t.Errorf("it begins with %v", names)
	}
	usable := func(id string) (names []events.CheckpointRef) {
		for _, b := range s.usable(t.Context(), id) {
			names = append(names, nameOf(b.Ref))
		}
		return names
	}
	if names := usable("new.a1"); names != nil {
		t.Errorf("before it has begun it uses %v", names)
	}
	s.reuse.begin(&events.CheckpointBegun{Checkpoint: "new.a1", Bases: []events.CheckpointRef{
		at("a run", "one"), at("a run", "gone"), at("a run", "unknown"), at("other", "two"), at("other", "tag"),
	}})
	for range 2 {
		if names := usable("new.a1"); !slices.Equal(names, []events.CheckpointRef{at("a run", "one"), at("other", "two")}) {
			t.Errorf("it uses %v", names)
		}
	}
	s.reuse.end("new.a1")
	if names := usable("new.a1"); names != nil {
		t.Errorf("after its end it uses %v", names)
	}
	var err error
	if s.store.Data, err = data.Open(vfs.NewMem(), "data"); err != nil {
		t.Fatal(err)
	}
	if names := s.named(t.Context(), "new.a1"); names != nil {
		t.Errorf("with links it begins with %v", names)
	}
	if bases := s.usable(t.Context(), "new.a1"); len(bases) != 1 || nameOf(bases[0].Ref) != at("a run", "step-2.a1") {
		t.Errorf("with links it uses %v", bases)
	}
}
