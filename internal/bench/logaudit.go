package bench

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/ckptstore/ckptstore/internal/audit/ledger"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store"
)

// auditBench has the figures of the store that keeps tamper evidence.
type auditBench struct {
	EventsPerSecond float64 `json:"events_per_second"` // a round ends when all of its events are in the views and hashed
	P50             float64 `json:"p50_ms"`
	P99             float64 `json:"p99_ms"`
	Ratio           float64 `json:"ratio"`   // of the rates of one round, with evidence over without: the median of all rounds
	Behind          float64 `json:"fold_ms"` // from the last acknowledgement of a round until its end; the longest
	Reread          int64   `json:"reread"`  // events that the evidence read from the log itself; the reader of the views passed on the others
	Head            float64 `json:"head_ms"` // until a signed head that includes all events is published; the longest
}

// headWithin is how long a round waits for the evidence.
const headWithin = time.Minute

// runAudit compares a store with another, which keeps evidence. Both have the views that
// each owner keeps, since the reader of the views serves the evidence, too. The two are
// separate, so that the evidence of one round is no work of the next.
func (b *logBench) runAudit(ctx context.Context, dir string) error {
	return withBenchStore(ctx, filepath.Join(dir, "plain"), "", func(without *store.Store) error {
		return withBenchStore(ctx, filepath.Join(dir, "audited"), filepath.Join(dir, "key"), func(with *store.Store) error {
			return b.compareAudit(ctx, dir, without, with)
		})
	})
}

// withBenchStore makes a store in a new directory and owns it while do runs. With the file
// of a key, it keeps tamper evidence.
func withBenchStore(ctx context.Context, dir, key string, do func(*store.Store) error) (err error) {
	id, err := store.Init(ctx, dir, "")
	if err == nil && key != "" {
		_, err = ledger.Keygen(ledger.KeygenOptions{Store: dir, File: key, Origin: "bench/" + id})
	}
	if err != nil {
		return err
	}
	s, err := store.Open(ctx, store.Options{
		Location: dir, Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	return do(s)
}

// settled appends events to a store. The round ends when they are acknowledged and in the
// views, and when then returns.
func (b *logBench) settled(s *store.Store, then func(ctx context.Context, acked time.Time) error) func(context.Context, int) ([]time.Duration, float64, error) {
	return func(ctx context.Context, n int) ([]time.Duration, float64, error) {
		took, rate, err := b.round(ctx, s.Log, n)
		acked := time.Now()
		if err == nil {
			_, err = query.Ask(ctx, s.Views(), query.Runs, query.Params{}) // waits for the views
		}
		if err == nil {
			err = then(ctx, acked)
		}
		seconds := float64(n)/rate + time.Since(acked).Seconds()
		return took, float64(n) / seconds, err
	}
}

func (b *logBench) compareAudit(ctx context.Context, dir string, without, with *store.Store) error {
	book, err := with.Ledger()
	if err != nil {
		return err
	}
	x := &auditBench{}
	var last uint64
	var acked time.Time
	plain := b.settled(without, func(context.Context, time.Time) error { return nil })
	hashed := b.settled(with, func(ctx context.Context, at time.Time) (err error) {
		acked = at
		if last, err = with.Log.Last(ctx); err == nil {
			err = until(ctx, "hashed", last, func() int64 {
				hashed, _ := with.Hashed()
				return hashed
			})
		}
		x.Behind = max(x.Behind, time.Since(acked).Seconds()*1e3)
		return err
	})
	audited := func(n int) ([]time.Duration, float64, error) {
		took, rate, err := hashed(ctx, n)
		if err == nil { // outside of the round: heads are made twice a second
			err = until(ctx, "in a published head", last, func() int64 {
				_, h, err := book.Checkpoint()
				if err != nil {
					return 0 // none yet
				}
				return h.Size
			})
		}
		x.Head = max(x.Head, time.Since(acked).Seconds()*1e3)
		return took, rate, err
	}
	_, before := with.Hashed() // when the store was opened
	var of [2]outcome
	if err := b.between(ctx, dir, []wanted{{without.Log, b.Events}}, func() (err error) {
		of, x.Ratio, err = inTurns(b.Events, func(n int) ([]time.Duration, float64, error) { return plain(ctx, n) }, audited)
		return err
	}); err != nil {
		return err
	}
	_, x.Reread = with.Hashed()
	x.Reread -= before
	found, err := book.Verify(ctx, nil)
	if err != nil {
		return err
	}
	if sealed := int64(found.Sealed); len(found.Findings) > 0 || found.Events != 1+int64(b.Events)+sealed {
		return fmt.Errorf("the evidence has %d events, %d of them audit.sealed, after %d appends, and the findings %v", found.Events, sealed, b.Events, found.Findings)
	}
	b.EventsPerSecond, b.P50, b.P99 = of[0].rate, of[0].p50, of[0].p99
	x.EventsPerSecond, x.P50, x.P99 = of[1].rate, of[1].p50, of[1].p99
	b.Audit = x
	return nil
}

// until waits until a number of events is reached.
func until(ctx context.Context, what string, last uint64, size func() int64) error {
	ctx, cancel := context.WithTimeout(ctx, headWithin)
	defer cancel()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for size() < int64(last) { //nolint:gosec // not that long
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("event %d is not %s, event %d is: %w", last, what, size(), ctx.Err())
		}
	}
	return nil
}
