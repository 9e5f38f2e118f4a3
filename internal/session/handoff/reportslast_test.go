package handoff

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/problem/system"
)

// wantRefused checks that an error is a refusal with a status and a text.
func wantRefused(t *testing.T, err error, status int, says string) {
	t.Helper()
	if system.KindOf(err).Status() != status || !strings.Contains(err.Error(), says) {
		t.Errorf("error %v, want status %d and %q", err, status, says)
	}
}

// The last report of a rank is an iteration, and later reports are refused: while
// others continue and after the end.
func TestLastReport(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := openDesk(t.Context(), 2)
		last := make(chan error, 2)
		for rank := range 2 {
			go func() { last <- d.handed(t.Context(), rank, client.Report{Step: 9, Done: true}) }()
		}
		for range 2 {
			if err := <-last; err != nil {
				t.Fatal(err)
			}
		}
		// Both are done, so the end needs no process to exit.
		if err := <-d.end; err != nil || d.n != 1 || len(d.said) != 1 {
			t.Fatalf("%d iterations, %d in the log, %v", d.n, len(d.said), err)
		}
		for range 50 { // whichever is ready first
			wantRefused(t, d.handed(t.Context(), 1, client.Report{Step: 10}), http.StatusConflict, "already done: rank 1 finished with step 9")
		}
		d.Ended(0)
		d.Ended(1)
	})
}

// For other ranks, a rank that is done has ended.
func TestLastReportOfOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := openDesk(t.Context(), 2)
		other := d.reports(t, 1, 0, 1, nil)
		if err := d.handed(t.Context(), 0, client.Report{Step: 1, Done: true}); err != nil {
			t.Fatal(err)
		}
		answered(t, other)
		const says = "ranks [1] reported while ranks [0] have ended"
		if err := <-d.reports(t, 1, 0, 2, nil); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("error %v, want %q", err, says)
		}
		if err := <-d.end; err == nil || d.n != 1 {
			t.Errorf("%d iterations, %v", d.n, err)
		}
	})
}

// The marker is not an iteration and needs no other rank.
func TestDuplicateMarker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := openDesk(t.Context(), 2)
		answered(t, d.reports(t, 0, 0, 1, nil), d.reports(t, 1, 0, 1, nil))
		marker := map[string]any{"__duplicate__": true}
		answered(t, d.reports(t, 0, 0, 1, marker))
		wantRefused(t, d.handed(t.Context(), 0, client.Report{Step: 2}), http.StatusConflict, "already done")
		answered(t, d.reports(t, 1, 0, 1, marker))
		if err := <-d.end; err != nil || d.n != 1 || len(d.said) != 1 {
			t.Errorf("%d iterations, %d in the log, %v", d.n, len(d.said), err)
		}
	})
}

// A rank's own time measurement overrides the trainer's, and does not make the
// ranks differ.
func TestOwnTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := openDesk(t.Context(), 2)
		answered(t, d.reports(t, 0, 5*time.Second, 1, map[string]any{"loss": 1.0, "time_this_iter_s": 0.25}),
			d.reports(t, 1, 0, 1, map[string]any{"loss": 1.0, "time_this_iter_s": 0.5}))
		answered(t, d.reports(t, 0, 5*time.Second, 1, map[string]any{"loss": 1.0}),
			d.reports(t, 1, 0, 1, map[string]any{"loss": 1.0, "time_this_iter_s": 0.5}))
		for _, wrong := range []any{"soon", -1.0, "NaN", nil, true} {
			wantRefused(t, d.handed(t.Context(), 0, client.Report{Metrics: map[string]any{"time_this_iter_s": wrong}}), http.StatusBadRequest, "want seconds")
		}
		d.Ended(0)
		d.Ended(1)
		if err := <-d.end; err != nil || d.n != 2 {
			t.Fatalf("%d iterations, %v", d.n, err)
		}
		for i, want := range []float64{0.25, 5} {
			if m := d.said[i]; m.Seconds != want || len(m.Others) != 0 || len(m.Metrics) != 1 {
				t.Errorf("iteration %d is %+v, want %v s and the loss alone", i+1, m, want)
			}
		}
	})
}

// handed hands over a report and returns only its error.
func (d *desk) handed(ctx context.Context, rank int, r client.Report) error {
	_, err := d.Report(ctx, rank, r)
	return err
}
