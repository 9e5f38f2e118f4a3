package store

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"testing"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store/views"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/projections/viewdb"
)

// The owner answers as of each event by keyframes, and a client by a replay: both as the
// views did then.
func TestAsOf(t *testing.T) {
	owner := open(t, made(t))
	must(t, owner, "run", events.GroupStarted{Attempt: 1, WorldSize: 1})
	for i := range 40 {
		say(t, owner, "run", events.Metrics{Attempt: 1, Iteration: i + 1, Step: int64(i), Metrics: map[string]any{"loss": float64(i)}})
		if i == 20 {
			must(t, owner, "run", begun("step-20"), events.CheckpointCommitted{Attempt: 1, Checkpoint: "step-20.a1", Manifest: "m"})
		}
	}
	client := open(t, owner.Location)
	if client.ownViews() != nil {
		t.Fatal("two processes own the store")
	}
	last, err := owner.Log.Last(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for seq := uint64(1); seq <= last; seq += 3 {
		rows, err := viewdb.Replay(t.Context(), owner.Log, seq)
		if err != nil {
			t.Fatal(err)
		}
		want, err := query.Ask(t.Context(), query.Past{Rows: rows, Sequence: seq}, query.Digest, query.Params{})
		if err != nil {
			t.Fatal(err)
		}
		for name, s := range map[string]*Store{"owner": owner, "client": client} {
			then, err := s.Past.AsOf(t.Context(), seq)
			if err != nil {
				t.Fatal(err)
			}
			if got, err := query.Ask(t.Context(), then, query.Digest, query.Params{}); err != nil || got != want {
				t.Errorf("as of %d, the %s has %s, %v, want %s", seq, name, got, err, want)
			}
			text, err := then.Answer(t.Context(), query.Digest.Name, query.Params{})
			if err != nil || string(text) != `"`+want+`"` {
				t.Errorf("as of %d, the %s answers %s, %v, want %s", seq, name, text, err, want)
			}
		}
	}
	for _, seq := range []uint64{0, last + 1} {
		if _, err := owner.Past.AsOf(t.Context(), seq); err == nil {
			t.Errorf("there is a state as of %d of %d", seq, last)
		} else {
			wrong(t, err, projections.ErrNotFound)
		}
	}
}

// A process next to the owner that keeps the past folds the log once, not for each query: for a long log, and only
// when it is asked.
func TestKeepPastNextToOwner(t *testing.T) {
	owner := open(t, made(t))
	last := reported(t, owner, 9000)
	client := open(t, owner.Location)
	if client.ownViews() != nil {
		t.Fatal("two processes own the store")
	}
	if err := client.Past.Prepared(last); err != nil {
		t.Errorf("a process that keeps no past folds the log itself: %v", err)
	}
	end := kept(t, client)
	eventually(t, "the past is wanted", func() bool { return client.Past.Prepared(last) != nil })
	// AsOf waits for the views.
	then, err := client.Past.AsOf(t.Context(), last-5)
	if _, quick := then.(query.Then); err != nil || !quick {
		t.Fatalf("as of %d: %T, %v", last-5, then, err)
	}
	eventually(t, "the past is prepared", func() bool { return client.Past.Prepared(last) == nil })
	want, err := owner.Past.AsOf(t.Context(), last-5)
	if err != nil {
		t.Fatal(err)
	}
	digest, err := query.Ask(t.Context(), want, query.Digest, query.Params{})
	if err != nil {
		t.Fatal(err)
	}
	if got, err := query.Ask(t.Context(), then, query.Digest, query.Params{}); err != nil || got != digest {
		t.Errorf("as of %d there is %s, %v, want %s", last-5, got, err, digest)
	}
	end()
	if got, err := query.Ask(t.Context(), then, query.Digest, query.Params{}); err != nil || got != digest {
		t.Errorf("without the views there is %s, %v, want %s", got, err, digest)
	}
}

var errTest = errors.New("the log cannot be read")

// noSource is a log that cannot be read.
type noSource struct{}

func (noSource) Last(context.Context) (uint64, error) { return 0, errTest }

func (noSource) Read(context.Context, uint64, uint64) iter.Seq2[events.Recorded, error] {
	return func(yield func(events.Recorded, error) bool) { yield(events.Recorded{}, errTest) }
}

// kept keeps the past until the test calls end.
func kept(t *testing.T, s *Store) (end func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		s.Past.Keep(ctx)
	}()
	return func() {
		cancel()
		<-ended
	}
}

// reported appends reports, and returns the sequence of the last one.
func reported(t *testing.T, s *Store, n int) (last uint64) {
	t.Helper()
	var facts []events.Fact
	for i := range n {
		f, err := metrics(fmt.Sprintf("report-%d", i), "run", i+1)
		if err != nil {
			t.Fatal(err)
		}
		facts = append(facts, f)
	}
	sequences, err := s.Log.Append(t.Context(), facts...)
	if err != nil {
		t.Fatal(err)
	}
	return sequences[len(sequences)-1]
}

// Keep prepares the past of a log that is there, and after another opening continues
// where it was. Until then, Prepared reports how far it is.
func TestKeepPast(t *testing.T) {
	dir := made(t)
	s := open(t, dir)
	last := reported(t, s, 9000)
	if err := s.ownViews().Wait(t.Context(), last); err != nil {
		t.Fatal(err)
	}
	wrong(t, s.Past.Prepared(last), views.ErrPreparing, fmt.Sprintf("0 of %d events, 0 %%", last))
	if err := s.Past.Prepared(100); err != nil {
		t.Errorf("event 100 is not near the beginning: %v", err)
	}
	keep := func(s *Store) (end func()) { return kept(t, s) }
	own := s.ownViews()
	past := own.History
	own.History = viewdb.NewHistory(own, noSource{})
	end := keep(s)
	eventually(t, "the failure is kept", func() bool { return errors.Is(s.Past.Prepared(last), errTest) })
	wrong(t, s.Past.Prepared(last), errTest, fmt.Sprintf("0 of %d events", last))
	end()
	own.History = past
	end = keep(s)
	eventually(t, "the past is prepared", func() bool {
		at, _, _, err := s.ownViews().History.Progress(last)
		return err == nil && at == last-last%1000
	})
	end()
	if err := s.Past.Prepared(last + 100_000); !errors.Is(err, views.ErrPreparing) {
		t.Errorf("after keyframes were made: %v", err)
	}
	shut(t, s)

	s = open(t, dir)
	if err := s.Past.Prepared(last); err != nil {
		t.Errorf("after another opening: %v", err)
	}
	defer keep(s)()
	for _, seq := range []uint64{1, 999, 1000, 5003, last} {
		rows, err := viewdb.Replay(t.Context(), s.Log, seq)
		if err != nil {
			t.Fatal(err)
		}
		want, err := query.Ask(t.Context(), query.Past{Rows: rows, Sequence: seq}, query.Digest, query.Params{})
		if err != nil {
			t.Fatal(err)
		}
		then, err := s.Past.AsOf(t.Context(), seq)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := query.Ask(t.Context(), then, query.Digest, query.Params{}); err != nil || got != want {
			t.Errorf("as of %d: %s, %v, want %s", seq, got, err, want)
		}
	}
}
