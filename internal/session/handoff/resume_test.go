package handoff

import (
	"context"
	"testing"
	"testing/synctest"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
)

// Reports continue under another coordinator. A rank that has the answer to the last iteration reports the
// next one; a rank that has not gets the same answer, and nothing is recorded twice.
func TestReportsResume(t *testing.T) {
	for name, last := range map[string]int{"recorded": 5, "answered before it was recorded": 4} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := &desk{end: make(chan error, 1)}
				d.Handoff = handoffOf(4, 3, func(_ context.Context, bodies ...events.Body) error {
					for _, b := range bodies {
						d.said = append(d.said, b.(*events.Metrics))
					}
					return nil
				})
				of := Earlier{Last: Reported{Iteration: last, Step: 50}, Reports: map[int]Reported{
					0: {Iteration: 5, Step: 50, Stop: client.Preempt}, 1: {Iteration: 4, Step: 40}, 2: {Iteration: 5, Step: 50, Done: true, Stop: client.Preempt},
				}}
				if err := of.Check(3); err != nil {
					t.Fatal(err)
				}
				d.Resume(of)
				go func() {
					var err error
					d.n, err = d.Run(t.Context())
					d.end <- err
				}()
				late, err := d.Report(t.Context(), 1, client.Report{Step: 50, Done: true})
				if err != nil || late != (Reported{Iteration: 5, Step: 50, Done: true, Stop: client.Preempt}) {
					t.Errorf("the late rank gets %+v, %v", late, err)
				}
				if got := d.Step(); got != 50 {
					t.Errorf("step %d", got)
				}
				if _, err := d.Report(t.Context(), 2, client.Report{Step: 60}); err == nil {
					t.Error("a rank reports after its last report")
				}
				d.Ended(0)
				if err := <-d.end; err != nil || d.n != 5 || len(d.said) > 0 {
					t.Errorf("%d iterations, %v, recorded %+v", d.n, err, d.said)
				}
			})
		})
	}
}

// The iterations are counted on.
func TestIterationsAfterResume(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &desk{end: make(chan error, 1)}
		d.Handoff = handoffOf(4, 2, func(_ context.Context, bodies ...events.Body) error {
			for _, b := range bodies {
				d.said = append(d.said, b.(*events.Metrics))
			}
			return nil
		})
		d.Resume(Earlier{Last: Reported{Iteration: 7, Step: 7}, Reports: map[int]Reported{0: {Iteration: 7, Step: 7}, 1: {Iteration: 6, Step: 6}}})
		go func() { _, _ = d.Run(t.Context()) }()
		r0 := d.reports(t, 0, 0, 8, nil)
		waiting(t, "rank 1 has not reported step 8", r0)
		answered(t, d.reports(t, 1, 0, 7, nil))
		waiting(t, "rank 1 has not reported step 8", r0)
		answered(t, r0, d.reports(t, 1, 0, 8, nil))
		if len(d.said) != 1 || d.said[0].Iteration != 8 || d.said[0].Step != 8 {
			t.Errorf("recorded %+v", d.said)
		}
		d.Ended(0)
		d.Ended(1)
	})
}

// Ranks that are two reports apart cannot continue.
func TestResumedTooFarApart(t *testing.T) {
	of := Earlier{Last: Reported{Iteration: 3}, Reports: map[int]Reported{0: {Iteration: 3}, 1: {Iteration: 1}}}
	if err := of.Check(2); err == nil {
		t.Error("two reports apart")
	}
	of.Reports[1] = Reported{Iteration: 1, Done: true}
	if err := of.Check(2); err != nil {
		t.Errorf("a rank that is done: %v", err)
	}
}

func TestReportedHeader(t *testing.T) {
	for _, want := range []Reported{{}, {Iteration: 3, Step: -1}, {Iteration: 12, Stop: client.Stop, Done: true, Step: 1 << 40}} {
		if got, err := ParseReported(want.String()); err != nil || got != want {
			t.Errorf("%+v, %v from %q, want %+v", got, err, want.String(), want)
		}
	}
	if _, err := ParseReported("x"); err == nil {
		t.Error("no error for another text")
	}
}
