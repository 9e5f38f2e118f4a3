package launch

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// hold holds the signals of a rank until it is released, and confirms that after
// a while; the result ends the process. A negative while means forever.
func hold(t *testing.T, h *heldSignals, rank int, confirms time.Duration) (dies func()) {
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		if h.Hold(ctx, rank, []string{"SIGTERM"}) != nil || confirms < 0 {
			return
		}
		<-time.After(confirms)
		h.Confirm(rank)
	}()
	synctest.Wait()
	return cancel
}

// The trainer waits for the ranks that hold signals back, but for no others and
// not forever.
func TestRelease(t *testing.T) {
	for name, c := range map[string]struct {
		prepare func(t *testing.T, h *heldSignals)
		late    int
		took    time.Duration
	}{
		"no holder":      {func(*testing.T, *heldSignals) {}, 0, 0},
		"both confirm":   {func(t *testing.T, h *heldSignals) { hold(t, h, 0, 10*time.Millisecond); hold(t, h, 1, 0) }, 0, 10 * time.Millisecond},
		"two of a rank":  {func(t *testing.T, h *heldSignals) { hold(t, h, 0, 10*time.Millisecond); hold(t, h, 0, 0) }, 0, 10 * time.Millisecond},
		"one is stopped": {func(t *testing.T, h *heldSignals) { hold(t, h, 0, -1); hold(t, h, 1, 0) }, 1, time.Second},
		"one has died":   {func(t *testing.T, h *heldSignals) { hold(t, h, 0, -1)() }, 0, 0},
		"one dies meanwhile": {func(t *testing.T, h *heldSignals) {
			hold(t, h, 0, -1)
			time.AfterFunc(100*time.Millisecond, func() { h.gone(0) })
		}, 0, 100 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHeldSignals(nil)
				c.prepare(t, h)
				synctest.Wait()
				began := time.Now()
				if late, took := h.release(time.Second), time.Since(began); late != c.late || took != c.took {
					t.Errorf("%d are late after %v, want %d after %v", late, took, c.late, c.took)
				}
				// A late rank is released at once, and may confirm it.
				if err := h.Hold(t.Context(), 2, nil); err != nil {
					t.Error(err)
				}
				h.Confirm(2)
			})
		})
	}
}

// What a rank holds is known after its end, and what its script took is not held.
func TestHolds(t *testing.T) {
	h := newHeldSignals(nil)
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if err := h.Hold(gone, 1, []string{"SIGTERM", "SIGUSR1"}); err == nil {
		t.Error("a rank that is gone was released")
	}
	h.Replaced(1, []string{"SIGTERM"})
	if h.holds(0, "SIGUSR1") || h.holds(1, "SIGTERM") || !h.holds(1, "SIGUSR1") {
		t.Errorf("held %+v", h.names)
	}
}
