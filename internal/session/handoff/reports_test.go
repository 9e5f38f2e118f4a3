package handoff

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/session/retry"
)

// mute is a log that takes metrics on request.
type mute struct {
	said    []int // iterations
	answers chan error
	speaks  atomic.Bool
}

func (m *mute) record(ctx context.Context, bodies ...events.Body) error {
	if !m.speaks.Load() {
		select {
		case err := <-m.answers:
			if err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	for _, b := range bodies {
		m.said = append(m.said, b.(*events.Metrics).Iteration)
	}
	return nil
}

func newMute() (*mute, *reports) {
	m := &mute{answers: make(chan error)}
	return m, newReports(m.record, slog.New(slog.DiscardHandler))
}

func metricsOf(iteration int, size int) *events.Metrics {
	return &events.Metrics{Attempt: 1, Iteration: iteration, Metrics: map[string]any{"m": strings.Repeat("x", size)}}
}

// An iteration waits for a log that answers, and runs ahead of a log that does
// not: the first after a while, the following ones at once. All are appended in
// order.
func TestReportsRunAhead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, r := newMute()
		began := time.Now()
		add := func(iteration int) {
			t.Helper()
			if err := r.add(t.Context(), metricsOf(iteration, 1)); err != nil {
				t.Fatal(err)
			}
		}
		go func() {
			<-time.After(time.Second)
			m.answers <- nil
		}()
		add(1)
		if d := time.Since(began); d != time.Second || len(m.said) != 1 {
			t.Fatalf("after %v, %v is in the log", d, m.said)
		}
		for i := 2; i < 100; i++ {
			add(i)
		}
		if d := time.Since(began); d != time.Second+aheadAfter || len(m.said) != 1 {
			t.Fatalf("after %v, %v is in the log", d, m.said)
		}
		m.speaks.Store(true)
		m.answers <- nil
		r.settle()
		add(100)
		for i, got := range m.said {
			if got != i+1 {
				t.Fatalf("in the log are %v", m.said)
			}
		}
		if len(m.said) != 100 {
			t.Errorf("%d are in the log", len(m.said))
		}
	})
}

// Iterations run ahead only within the bounds. Beyond them the training waits,
// and does not fail.
func TestReportsBounded(t *testing.T) {
	for name, c := range map[string]struct{ size, most int }{
		"iterations": {1, aheadMost},
		"bytes":      {1 << 20, aheadBytes>>20 - 1}, // names and quotes count
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m, r := newMute()
				ahead, done := 0, make(chan error)
				go func() {
					for {
						if err := r.add(t.Context(), metricsOf(ahead+1, c.size)); err != nil {
							done <- err
							return
						}
						if ahead++; ahead > c.most {
							done <- nil
							return
						}
					}
				}()
				<-time.After(time.Hour)
				synctest.Wait()
				if ahead != c.most {
					t.Fatalf("%d have run ahead, want %d", ahead, c.most)
				}
				m.speaks.Store(true)
				m.answers <- nil
				if err := <-done; err != nil {
					t.Fatal(err)
				}
				r.settle()
				if len(m.said) != c.most+1 {
					t.Errorf("%d are in the log", len(m.said))
				}
			})
		})
	}
}

// An iteration refused after its ranks continued ends the hand-off; an iteration
// without room ends nothing.
func TestReportsRefused(t *testing.T) {
	for name, c := range map[string]struct {
		why  error
		ends bool
	}{
		"for good": {errors.New("damaged"), true},
		"no room":  {syscall.ENOSPC, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := &mute{answers: make(chan error)}
				h := handoffOf(1, 1, m.record)
				end := make(chan error, 1)
				go func() {
					_, err := h.Run(t.Context())
					end <- err
				}()
				report := func(step int64) error {
					_, err := h.Report(t.Context(), 0, client.Report{Step: step, Metrics: map[string]any{"loss": 1.0}})
					return err
				}
				if err := report(1); err != nil {
					t.Fatal(err)
				}
				m.answers <- c.why
				if !c.ends {
					m.speaks.Store(true)
					if err := report(2); err != nil {
						t.Fatal(err)
					}
					h.Ended(0)
				}
				err := <-end
				var unsaid *retry.RefusedError
				if errors.As(err, &unsaid) != c.ends || !c.ends && err != nil {
					t.Errorf("the hand-off ends with %v", err)
				}
				if c.ends && !errors.Is(err, c.why) {
					t.Errorf("the failure is %v", err)
				}
			})
		})
	}
}

// A report that waits for room behind too many others is refused when no worker
// is left, so that the attempt can end.
func TestReportsEndWithoutRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		full := func(context.Context, ...events.Body) error { return syscall.ENOSPC }
		r := newReports(full, slog.New(slog.DiscardHandler))
		for i := range aheadMost {
			if err := r.add(t.Context(), metricsOf(i+1, 1)); err != nil {
				t.Fatal(err)
			}
		}
		last := make(chan error, 1)
		go func() { last <- r.add(t.Context(), metricsOf(aheadMost+1, 1)) }()
		synctest.Wait()
		select {
		case err := <-last:
			t.Fatalf("more than %d iterations run ahead: %v", aheadMost, err)
		default:
		}
		r.end()
		if err := <-last; !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("the last report: %v", err)
		}
		r.settle()
	})
}
