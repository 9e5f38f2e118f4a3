package bench

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/audit/ledger"
	"github.com/ckptstore/ckptstore/internal/store"
)

// auditBench has the figures of the log that keeps tamper evidence.
type auditBench struct {
	EventsPerSecond float64 `json:"events_per_second"` // a round ends when all of its events are hashed
	P50             float64 `json:"p50_ms"`
	P99             float64 `json:"p99_ms"`
	Ratio           float64 `json:"ratio"`   // of the rates of one round, with evidence over without: the median of all rounds
	Behind          float64 `json:"fold_ms"` // from the last acknowledgement of a round until all events are hashed; the longest
	Head            float64 `json:"head_ms"` // until a signed head that includes them is published; the longest
}

// headWithin is how long a round waits for the evidence.
const headWithin = time.Minute

// runAudit compares a log with another, which keeps evidence. The two are separate, so that the
// evidence of one round is no work of the next.
func (b *logBench) runAudit(ctx context.Context, dir string) error {
	plain, audited := filepath.Join(dir, "plain"), filepath.Join(dir, "audited")
	if err := errors.Join(os.Mkdir(plain, 0o700), os.Mkdir(audited, 0o700)); err != nil {
		return err
	}
	return benchLog(ctx, plain, func(without *jetlog.Log, _ string) error {
		return benchLog(ctx, audited, func(with *jetlog.Log, id string) error {
			return withEvidence(ctx, audited, filepath.Join(dir, "key"), id, with, func(k *ledger.Keeper) error {
				return b.compareAudit(ctx, dir, without, with, k)
			})
		})
	})
}

// withEvidence turns evidence on for a log, and keeps it while do runs.
func withEvidence(ctx context.Context, dir, key, id string, log *jetlog.Log, do func(*ledger.Keeper) error) error {
	if _, err := ledger.Keygen(ledger.KeygenOptions{Store: dir, File: key, Origin: "bench/" + id}); err != nil {
		return err
	}
	k, err := ledger.Open(ctx, ledger.Options{
		Store: dir, Log: log, Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
		Stamp: func() events.Stamp { return store.Stamp("bench") },
	})
	if err != nil {
		return err
	}
	live, end := context.WithCancel(ctx)
	kept := make(chan struct{})
	go func() {
		defer close(kept)
		k.Keep(live)
	}()
	defer func() { end(); <-kept }()
	return do(k)
}

func (b *logBench) compareAudit(ctx context.Context, dir string, without, with *jetlog.Log, k *ledger.Keeper) error {
	x := &auditBench{}
	plain := func(n int) ([]time.Duration, float64, error) { return b.round(ctx, without, n) }
	audited := func(n int) ([]time.Duration, float64, error) {
		took, rate, err := b.round(ctx, with, n)
		if err != nil {
			return nil, 0, err
		}
		acked := time.Now()
		last, err := with.Last(ctx)
		if err != nil {
			return nil, 0, err
		}
		if err := until(ctx, "hashed", last, k.Folded); err != nil {
			return nil, 0, err
		}
		behind := time.Since(acked)
		if err := until(ctx, "in a published head", last, func() int64 {
			_, h, err := k.Checkpoint()
			if err != nil {
				return 0 // none yet
			}
			return h.Size
		}); err != nil {
			return nil, 0, err
		}
		x.Behind = max(x.Behind, behind.Seconds()*1e3)
		x.Head = max(x.Head, time.Since(acked).Seconds()*1e3)
		seconds := float64(n)/rate + behind.Seconds()
		return took, float64(n) / seconds, nil
	}
	var of [2]outcome
	if err := b.between(ctx, dir, []wanted{{without, b.Events}}, func() (err error) {
		of, x.Ratio, err = inTurns(b.Events, plain, audited)
		return err
	}); err != nil {
		return err
	}
	found, err := k.Verify(ctx, nil)
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
