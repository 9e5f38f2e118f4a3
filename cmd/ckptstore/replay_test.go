package main

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestPacer(t *testing.T) {
	stored := time.Date(2026, 3, 14, 15, 9, 26, 0, time.UTC)
	// The third event's clock was set back, the last came an hour later.
	log := []time.Duration{0, time.Second, 500 * time.Millisecond, time.Minute, time.Hour}
	for text, want := range map[string][]time.Duration{
		"original": {0, time.Second, time.Second, time.Minute, time.Hour},
		"10x":      {0, time.Second / 10, time.Second / 10, 6 * time.Second, 6 * time.Minute},
		"0.5x":     {0, 2 * time.Second, 2 * time.Second, 2 * time.Minute, 2 * time.Hour},
		"instant":  {0, 0, 0, 0, 0},
	} {
		synctest.Test(t, func(t *testing.T) {
			p, err := parseSpeed(text)
			if err != nil {
				t.Fatal(err)
			}
			begun := time.Now()
			for i, after := range log {
				if err := p.wait(t.Context(), stored.Add(after)); err != nil {
					t.Fatal(err)
				}
				if got := time.Since(begun); got != want[i] {
					t.Errorf("%s: event %d comes after %v, want %v", text, i, got, want[i])
				}
			}
		})
	}
}

// Delays between events do not add to their intervals.
func TestPacerCatchesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, begun := &pacer{speed: 1}, time.Now()
		for i := range 5 {
			if err := p.wait(t.Context(), begun.Add(time.Duration(i)*time.Second)); err != nil {
				t.Fatal(err)
			}
			if got := time.Since(begun); got != time.Duration(i)*time.Second {
				t.Errorf("event %d comes after %v", i, got)
			}
			busy, cancel := context.WithTimeout(t.Context(), 900*time.Millisecond)
			<-busy.Done()
			cancel()
		}
	})
}

func TestPacerEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		p, begun := &pacer{speed: 1}, time.Now()
		err := errors.Join(p.wait(ctx, begun), p.wait(ctx, begun.Add(time.Hour)))
		if !errors.Is(err, context.DeadlineExceeded) || time.Since(begun) != time.Second {
			t.Errorf("%v after %v", err, time.Since(begun))
		}
	})
}

func TestParseSpeed(t *testing.T) {
	for _, bad := range []string{"", "fast", "10", "x", "0x", "-1x", "NaNx", "Infx", "1e99x", "instantx"} {
		if _, err := parseSpeed(bad); err == nil {
			t.Errorf("--speed %q is accepted", bad)
		}
	}
}
