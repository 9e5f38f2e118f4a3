package store

import (
	"errors"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// TestGauge refuses below what is needed, and looks again after a while.
func TestGauge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		free, looks := uint64(keepForFacts-1), 0
		g := &gauge{dir: "ckpts", free: func() (uint64, error) { looks++; return free, nil }}
		var full *NoSpaceError
		for range 3 {
			if err := g.admit(); !errors.As(err, &full) || !errors.Is(err, syscall.ENOSPC) || full.Free != free {
				t.Fatalf("%d bytes free: %v", free, err)
			}
		}
		if err := g.check(keepToOwn); err != nil {
			t.Errorf("enough to own: %v", err)
		}
		if looks != 1 {
			t.Errorf("looked %d times at once", looks)
		}
		free++
		time.Sleep(time.Second) //nolint:forbidigo // the bubble's clock, not a wait
		if err := g.admit(); err != nil {
			t.Errorf("%d bytes free: %v", free, err)
		}
	})
}
