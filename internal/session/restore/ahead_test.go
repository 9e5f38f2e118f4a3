package restore

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/ckptstore/ckptstore/internal/session/staging"
)

// fetches is a source of slots that counts what it is asked for.
type fetches struct {
	asked chan []int    // of each call
	end   chan struct{} // ends a call that a load waits for
}

func newFetches() *fetches {
	return &fetches{asked: make(chan []int, 10), end: make(chan struct{})}
}

func (f *fetches) fetch(ctx context.Context, _ string, ranks []int, hurry <-chan struct{}) {
	f.asked <- ranks
	select {
	case <-hurry:
	case <-ctx.Done():
	}
	select {
	case <-f.end:
	case <-ctx.Done():
	}
}

// fetching returns a loader of ranks 0 to 2 that resumes from a checkpoint.
func (f *fetches) fetching(t *testing.T, a *staging.Arenas, resume string) *Loader {
	t.Helper()
	l := New(Config{Arenas: a, Work: t.Context(), Resume: resume, Local: []int{0, 1, 2}, Fetch: f.fetch})
	t.Cleanup(func() {
		if !l.Close(limit) {
			t.Error("the copying does not end")
		}
	})
	return l
}

// Only the slots that are not here are fetched ahead. The load that needs one of them waits, and fetches
// only those that were not tried.
func TestFetchAhead(t *testing.T) { synctest.Test(t, fetchAhead) }

func fetchAhead(t *testing.T) {
	a, slots, _ := keeping(t)
	s := slots()
	stage(t, s, "step-1.a1", 1)
	s.Close()
	f := newFetches()
	l := f.fetching(t, a, "step-1.a1")
	l.FetchAhead()
	if got := <-f.asked; !slices.Equal(got, []int{1, 2}) {
		t.Fatalf("ranks %v are fetched ahead, rank 0 has its slot", got)
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if rest := l.fetched(gone, "step-1.a1", []int{1}); len(rest) > 0 {
		t.Errorf("a load that has ended waits, and fetches %v", rest)
	}
	rest := make(chan []int, 1)
	go func() { rest <- l.fetched(t.Context(), "step-1.a1", []int{1, 2, 3}) }()
	if synctest.Wait(); len(rest) > 0 {
		t.Error("the load does not wait")
	}
	close(f.end)
	if got := <-rest; !slices.Equal(got, []int{3}) {
		t.Errorf("after the copying, ranks %v are fetched, want 3", got)
	}
}

// A copying that a load does not need ends, and is as if it had not begun.
func TestFetchAheadOfOtherLoads(t *testing.T) {
	for name, of := range map[string]struct {
		checkpoint string
		lacks      []int
	}{
		"another checkpoint":    {"step-2.a1", []int{1}},
		"slots of other ranks":  {"step-1.a1", []int{3}},
		"none: all is here":     {"step-1.a1", nil},
		"one of another source": {"", nil},
	} {
		t.Run(name, func(t *testing.T) {
			a, _, _ := keeping(t)
			f := newFetches()
			l := f.fetching(t, a, "step-1.a1")
			l.FetchAhead()
			<-f.asked
			if rest := l.fetched(t.Context(), of.checkpoint, of.lacks); !slices.Equal(rest, of.lacks) {
				t.Errorf("ranks %v are fetched, want %v", rest, of.lacks)
			}
			<-l.ahead.done
			if rest := l.fetched(t.Context(), "step-1.a1", []int{1}); !slices.Equal(rest, []int{1}) {
				t.Errorf("a later load fetches %v, want 1", rest)
			}
		})
	}
}

// A save before any load ends the copying.
func TestSaveEndsFetchAhead(t *testing.T) {
	a, slots, _ := keeping(t)
	f := newFetches()
	l := f.fetching(t, a, "step-1.a1")
	l.FetchAhead()
	<-f.asked
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if err := l.EndAhead(gone); err != nil && !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if err := l.EndAhead(t.Context()); err != nil {
		t.Fatal(err)
	}
	select {
	case <-l.ahead.done:
	default:
		t.Error("the copying continues")
	}
	stage(t, slots(), "step-2.a2", 2)
}

// Nothing is fetched ahead of a load that this node has nothing of to fetch.
func TestNothingToFetchAhead(t *testing.T) {
	a, _, _ := keeping(t)
	f := newFetches()
	for _, resume := range []string{"", "/a/path", "other@step-1.a1"} {
		l := f.fetching(t, a, resume)
		if l.FetchAhead(); l.ahead != nil {
			t.Errorf("%q is fetched ahead", resume)
		}
		if rest := l.fetched(t.Context(), "step-1.a1", []int{1}); !slices.Equal(rest, []int{1}) {
			t.Errorf("%q: a load fetches %v, want 1", resume, rest)
		}
	}
	if l := New(Config{Arenas: a, Work: t.Context(), Resume: "step-1.a1", Local: []int{0}}); l.ahead != nil {
		t.Error("without a source, slots are fetched ahead")
	} else if l.FetchAhead(); l.ahead != nil {
		t.Error("without a source, slots are fetched ahead")
	}
}
