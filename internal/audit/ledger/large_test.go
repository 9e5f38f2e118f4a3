package ledger

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"maps"
	"math/bits"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/audit"
)

var largeEvents = flag.Uint64("large.events", 30_000, "events of the log of TestLargeLog: 10000000 needs 4 GB below TMPDIR, and minutes")

const (
	largeRun    = "audited"
	largeSaves  = 200
	largeEach   = 20   // events of the run for each save
	largeOthers = 1000 // events of each other run, in a row
)

// largeLog is a log whose events are made when they are read: those of a run with 200
// saves, spread over many others. Decisions are kept.
type largeLog struct {
	n      uint64
	sample events.Message

	mu      sync.Mutex
	decided []events.Message
}

var _ Log = (*largeLog)(nil)

func newLargeLog(t *testing.T, n uint64) *largeLog {
	t.Helper()
	f, err := events.NewFact(events.Stamp{ID: "id", Source: "trainer/0192f0c1-0000-7000-8000-000000000001", Time: time.Unix(1700000000, 0)},
		events.Scope{Run: largeRun, Trial: "main", Actor: events.Rank(0)},
		events.Metrics{Attempt: 1, Iteration: 1, Step: 1, Seconds: 0.25, Metrics: map[string]any{"loss": 0.5, "lr": 0.001, "grad_norm": 1.5}})
	if err != nil {
		t.Fatal(err)
	}
	return &largeLog{n: n, sample: events.Encode(f.Event)}
}

// at returns an event.
func (l *largeLog) at(sequence uint64) events.Message {
	if sequence > l.n {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.decided[sequence-l.n-1]
	}
	m := l.sample
	m.Header = maps.Clone(m.Header)
	id := []string{fmt.Sprintf("0192f0c1-2a3b-7c4d-8e5f-%012x", sequence)}
	m.Header[events.HeaderID], m.Header[events.HeaderMsgID] = id, id
	every := l.n / (largeSaves * largeEach)
	if of := sequence / every; sequence%every != 0 || of > largeSaves*largeEach {
		m.Subject = fmt.Sprintf("ckpt.run-%d.main.r%d.report.metrics", sequence/largeOthers, sequence%8)
	} else {
		m.Subject = "ckpt." + largeRun + ".main." + []string{
			"s.checkpoint.committed", "r0.report.metrics", "r1.report.metrics", "r0.plan.local", "r1.plan.local",
			"s.plan.global", "r0.write.sealed", "r1.write.sealed", "r0.write.completed", "r1.write.completed",
		}[of%10]
	}
	return m
}

// Walk implements [Log].
func (l *largeLog) Walk(ctx context.Context, from, until uint64, each func(events.Message, uint64, time.Time) error) error {
	for at := from; until == 0 || at <= until; at++ {
		for last, _ := l.Last(ctx); at > last; last, _ = l.Last(ctx) {
			if !pause(ctx, 5*time.Millisecond) {
				return ctx.Err()
			}
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := each(l.at(at), at, time.Unix(1700000000, int64(at))); err != nil { //nolint:gosec // not that long
			return err
		}
	}
	return nil
}

// Last implements [Log].
func (l *largeLog) Last(context.Context) (uint64, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.n + uint64(len(l.decided)), nil
}

// LaneEnd implements [Log].
func (*largeLog) LaneEnd(context.Context, events.Aggregate) (uint64, error) { return 0, nil }

// Decide implements [Log].
func (l *largeLog) Decide(_ context.Context, d events.Decision, _ uint64) (uint64, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.decided = append(l.decided, events.Encode(d.Event))
	return l.n + uint64(len(l.decided)), nil
}

// TestLargeLog proves a run of 200 saves in a much longer log, by the owner's code and the
// verifier's. The bundle grows with the run, and with the log by a hash an event when that
// doubles. Without one event, the trial or the last decision, it is refused by three
// different errors. With -v it prints how long each part took.
func TestLargeLog(t *testing.T) {
	log := newLargeLog(t, *largeEvents)
	dir, c := configured(t, nil)
	seals := 0
	begin := time.Now()
	took := func(what string) {
		t.Logf("%s: %.2f s", what, time.Since(begin).Seconds())
		begin = time.Now()
	}
	k := opened(t, Options{Store: dir, Log: log, Logger: slog.New(slog.DiscardHandler), Stamp: func() events.Stamp {
		seals++
		return events.Stamp{ID: fmt.Sprint("sealed-", seals), Source: "owner", Time: time.Unix(1700000000, 0)}
	}})
	ctx, cancel := context.WithCancel(t.Context())
	kept := make(chan struct{})
	go func() {
		defer close(kept)
		k.Keep(ctx)
	}()
	defer func() { cancel(); <-kept }()
	wait, end := context.WithTimeout(ctx, time.Hour)
	defer end()
	b, err := OpenBook(dir, log)
	if err != nil {
		t.Fatal(err)
	}
	_, h, err := b.Want(wait)
	if err != nil {
		t.Fatal(err)
	}
	took(fmt.Sprintf("%d events hashed, in a head of size %d", log.n, h.Size))
	path := filepath.Join(t.TempDir(), "bundle")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	w := bufio.NewWriterSize(f, 1<<20)
	if err := errors.Join(b.Export(wait, ExportOptions{Run: largeRun}, w), w.Flush(), f.Close()); err != nil {
		t.Fatal(err)
	}
	took("exported")
	p := parsed(t, "log "+c.Key+"\nquorum none\n")
	bundle, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	begin = time.Now()
	v, err := audit.VerifyBundle(bytes.NewReader(bundle), p, true, nil)
	if err != nil {
		t.Fatal(err)
	}
	took(fmt.Sprintf("a bundle of %d bytes verified: %d events", len(bundle), v.Events))
	if v.Events != largeSaves*largeEach || v.Messages != v.Events || v.Complete < int64(log.n) { //nolint:gosec // not that long
		t.Errorf("%+v", v)
	}
	proofs := 2 * 44 * bits.Len64(uint64(h.Size)) //nolint:gosec // not negative
	if most := v.Events * (2500 + proofs); len(bundle) > most {
		t.Errorf("the bundle has %d bytes, want at most %d", len(bundle), most)
	}
	lines := bytes.SplitAfter(bundle, []byte("\n"))
	for what, tc := range map[string]struct {
		drop func(line int) bool
		want error
	}{
		"one event":         {func(line int) bool { return line == 1000 }, audit.ErrMissingEvent},
		"the trial":         {func(line int) bool { return line > 0 }, audit.ErrMissingTrial},
		"the last decision": {func(line int) bool { return line == v.Events }, audit.ErrMissingEnd},
	} {
		var less [][]byte
		for i, line := range lines {
			if !tc.drop(i) {
				less = append(less, line)
			}
		}
		if _, err := audit.VerifyBundle(bytes.NewReader(slices.Concat(less...)), p, true, nil); !errors.Is(err, tc.want) {
			t.Errorf("without %s: %v, want %v", what, err, tc.want)
		}
	}
}
