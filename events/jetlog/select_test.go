package jetlog

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
)

var other = events.Aggregate{Run: "run.2", Trial: "t"}

// mixed appends decisions and facts of two trials in turn, and returns the bodies by
// sequence.
func mixed(t *testing.T, l *Log, turns int) (bodies [][]byte) {
	t.Helper()
	lanes := map[events.Aggregate]uint64{}
	for turn := range turns {
		for _, of := range []events.Aggregate{trial, other} {
			d := decision(t, of, events.CheckpointBegun{Attempt: 1, Checkpoint: fmt.Sprintf("step-%d.a1", turn), Name: fmt.Sprint("step-", turn), WorldSize: 1, Participants: []int{0}})
			seq, err := l.Decide(t.Context(), d, lanes[of])
			if err != nil {
				t.Fatal(err)
			}
			lanes[of] = seq
			f, err := events.NewFact(stamp(), events.Scope{Run: of.Run, Trial: of.Trial, Actor: events.Rank(0)}, events.Metrics{Attempt: 1, Iteration: turn + 1})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := l.Append(t.Context(), f); err != nil {
				t.Fatal(err)
			}
		}
	}
	for e, err := range l.Read(t.Context(), 1, uint64(4*turns+1)) {
		if err != nil {
			t.Fatal(err)
		}
		bodies = append(bodies, slices.Concat([]byte(e.ID), e.Data))
	}
	return bodies
}

// selections lists the ways to read a part of the log, with the events expected of
// each.
var selections = map[string]struct {
	read func(*Log) func(context.Context, uint64, uint64) iter.Seq2[events.Recorded, error]
	is   func(events.Event) bool
}{
	"a trial": {func(l *Log) func(context.Context, uint64, uint64) iter.Seq2[events.Recorded, error] {
		return func(ctx context.Context, from, until uint64) iter.Seq2[events.Recorded, error] {
			return l.ReadTrial(ctx, trial, from, until)
		}
	}, func(e events.Event) bool { return e.Scope.Run == trial.Run }},
	"a lane": {func(l *Log) func(context.Context, uint64, uint64) iter.Seq2[events.Recorded, error] {
		return func(ctx context.Context, from, until uint64) iter.Seq2[events.Recorded, error] {
			return l.ReadLane(ctx, trial, from, until)
		}
	}, trial.Owns},
	"checkpoints": {func(l *Log) func(context.Context, uint64, uint64) iter.Seq2[events.Recorded, error] {
		return l.ReadCheckpoints
	}, func(e events.Event) bool { return e.Kind.Family() == "checkpoint" }},
}

// TestSelection checks for every range that a partial reading yields the same events as
// the whole log.
func TestSelection(t *testing.T) {
	l, _ := newLog(t)
	mixed(t, l, 4)
	var all []events.Recorded
	for e, err := range l.Read(t.Context(), 1, 17) {
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, e)
	}
	for name, s := range selections {
		for from := uint64(1); from <= 18; from++ {
			for until := from - 1; until <= 20; until += 3 {
				if until == 0 {
					continue
				}
				var want, got []uint64
				for _, e := range all {
					if e.Sequence >= from && e.Sequence <= until && s.is(e.Event) {
						want = append(want, e.Sequence)
					}
				}
				for e, err := range s.read(l)(t.Context(), from, until) {
					if err != nil {
						t.Fatalf("%s from %d until %d: %v", name, from, until, err)
					}
					if e.ID != all[e.Sequence-1].ID || !bytes.Equal(e.Data, all[e.Sequence-1].Data) {
						t.Errorf("%s: event %d is another", name, e.Sequence)
					}
					got = append(got, e.Sequence)
				}
				if !slices.Equal(got, want) {
					t.Errorf("%s from %d until %d: %v, want %v", name, from, until, got, want)
				}
			}
		}
	}
	if end, err := l.LastOf(t.Context(), trial); err != nil || end != 15 {
		t.Errorf("the last of the trial is %d, %v", end, err)
	}
	if end, err := l.LastOf(t.Context(), events.Aggregate{Run: "unknown", Trial: "t"}); err != nil || end != 0 {
		t.Errorf("the last event of an unknown run is %d, %v", end, err)
	}
	for _, err := range l.ReadTrial(t.Context(), trial, 30, 0) {
		if !errors.Is(err, ErrGap) {
			t.Errorf("a log that is shorter than what was read: %v", err)
		}
	}
}

// TestSelectionFollows checks that appended events arrive and foreign ones do not, even
// after a long silence and after a change of server.
func TestSelectionFollows(t *testing.T) {
	p := startProcess(t)
	l := connectTo(t, Options{URL: p.url})
	if err := l.Create(t.Context(), created(t, "store-1")); err != nil {
		t.Fatal(err)
	}
	reader := connectTo(t, Options{URL: p.url})
	if _, _, err := reader.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	reader.stall = 5 * time.Millisecond
	ctx, cancel := context.WithCancel(t.Context())
	got, ended := make(chan events.Recorded), make(chan error, 1)
	go func() {
		for e, err := range reader.ReadTrial(ctx, trial, 1, 0) {
			if err != nil {
				ended <- err
				return
			}
			got <- e
		}
	}()
	for i := range 30 {
		if i == 15 {
			p.kill()
			p.start()
		}
		for _, run := range []string{other.Run, trial.Run} {
			f, err := events.NewFact(stamp(), events.Scope{Run: run, Trial: "t", Actor: events.Rank(0)}, events.Metrics{Attempt: 1, Iteration: i + 1})
			if err != nil {
				t.Fatal(err)
			}
			seqs, err := l.Append(t.Context(), f)
			if err != nil {
				t.Fatal(err)
			}
			if run == other.Run {
				continue
			}
			select {
			case e := <-got:
				if e.Sequence != seqs[0] {
					t.Fatalf("got event %d, want %d", e.Sequence, seqs[0])
				}
			case err := <-ended:
				t.Fatal(err)
			}
		}
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("ended with %v", err)
	}
}

// TestSelectionGap checks that the next decision reveals a missing one, and that an
// undelivered event at the end is found. A missing fact in between is not found.
func TestSelectionGap(t *testing.T) {
	for name, c := range map[string]struct {
		seq     int
		yielded string // of the trial, before the gap
		gap     bool
	}{
		"a decision in the middle": {6, "[2 3 7]", true},
		"the last one":             {11, "[]", true},
		"a fact in the middle":     {7, "[2 3 6 10 11]", false},
		"another trial's":          {8, "[2 3 6 7 10 11]", false},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			s := startServer(t, dir)
			l := connectTo(t, Options{Dial: dial(s)})
			if err := l.Create(t.Context(), created(t, "store-1")); err != nil {
				t.Fatal(err)
			}
			bodies := mixed(t, l, 3)
			l.Close()
			s.Shutdown()
			blocks, err := filepath.Glob(filepath.Join(dir, "jetstream", "*", "streams", Stream, "msgs", "*.blk"))
			if err != nil || len(blocks) != 1 {
				t.Fatal(blocks, err)
			}
			data, err := os.ReadFile(blocks[0])
			if err != nil {
				t.Fatal(err)
			}
			at := bytes.Index(data, bodies[c.seq-1][:len(stamp().ID)])
			if at < 0 {
				t.Fatal("the event is not in the block")
			}
			data[at] ^= 1
			if err := os.WriteFile(blocks[0], data, 0o600); err != nil {
				t.Fatal(err)
			}
			damaged := connectTo(t, Options{Dial: dial(startServer(t, dir))})
			damaged.stall = 50 * time.Millisecond
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			var got []uint64
			var failed error
			for e, err := range damaged.ReadTrial(ctx, trial, 1, 11) {
				if failed = err; err == nil {
					got = append(got, e.Sequence)
				}
			}
			if fmt.Sprint(got) != c.yielded || errors.Is(failed, ErrGap) != c.gap || !c.gap && failed != nil {
				t.Errorf("%v, %v; want %s", got, failed, c.yielded)
			}
		})
	}
}
