package handoff

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
)

// desk is a hand-off whose events go to a list.
type desk struct {
	*Handoff
	said []*events.Metrics
	err  error // of appends
	end  chan error
	n    int
}

// handoffOf returns the hand-off of an attempt whose iterations record takes.
func handoffOf(attempt, world int, record func(context.Context, ...events.Body) error) *Handoff {
	return New(Config{Attempt: attempt, World: world, Limit: time.Minute, Now: time.Now, Log: slog.New(slog.DiscardHandler), Record: record})
}

func openDesk(ctx context.Context, world int) *desk {
	d := &desk{end: make(chan error, 1)}
	d.Handoff = handoffOf(4, world, func(_ context.Context, bodies ...events.Body) error {
		for _, b := range bodies {
			d.said = append(d.said, b.(*events.Metrics))
		}
		return d.err
	})
	go func() {
		var err error
		d.n, err = d.Run(ctx)
		d.end <- err
	}()
	return d
}

// reports starts rank's report after a while, and returns the channel of its
// answer.
func (d *desk) reports(t *testing.T, rank int, after time.Duration, step int64, metrics map[string]any) <-chan error {
	out := make(chan error, 1)
	go func() {
		<-time.After(after)
		_, err := d.Report(t.Context(), rank, client.Report{Step: step, Metrics: metrics})
		out <- err
	}()
	return out
}

func waiting(t *testing.T, what string, answers ...<-chan error) {
	t.Helper()
	synctest.Wait()
	for rank, answer := range answers {
		select {
		case err := <-answer:
			t.Fatalf("%s: rank %d was let go: %v", what, rank, err)
		default:
		}
	}
}

func answered(t *testing.T, answers ...<-chan error) {
	t.Helper()
	for _, answer := range answers {
		if err := <-answer; err != nil {
			t.Fatal(err)
		}
	}
}

// Every rank is held until all have reported. Waiting is not counted as a rank's
// own time. Metrics that differ from rank 0's are listed.
func TestHandoff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := openDesk(t.Context(), 3)
		same := map[string]any{"loss": 0.5}
		r0 := d.reports(t, 0, 2*time.Second, 10, same)
		r1 := d.reports(t, 1, 5*time.Second, 10, map[string]any{"loss": 0.75})
		<-time.After(30 * time.Second)
		waiting(t, "rank 2 has not reported", r0, r1)
		// A second report of the same rank waits for the next iteration.
		again := d.reports(t, 0, 0, 20, same)
		waiting(t, "rank 2 has not reported", r0, r1, again)
		answered(t, r0, r1, d.reports(t, 2, 0, 10, map[string]any{"loss": 0.5}))
		waiting(t, "one report an iteration", again)
		r1, r2 := d.reports(t, 1, 3*time.Second, 20, same), d.reports(t, 2, 0, 20, same)
		answered(t, again, r1, r2)
		for rank := range 3 {
			d.Ended(rank)
		}
		if err := <-d.end; err != nil || d.n != 2 {
			t.Fatalf("%d iterations, %v", d.n, err)
		}
		want := []*events.Metrics{
			{Attempt: 4, Iteration: 1, Step: 10, Metrics: same, Seconds: 2, Others: []events.RankMetrics{{Rank: 1, Metrics: map[string]any{"loss": 0.75}}}, Slowest: &events.SlowestRank{Rank: 2, Late: 28}},
			{Attempt: 4, Iteration: 2, Step: 20, Metrics: same, Seconds: 0, Slowest: &events.SlowestRank{Rank: 1, Late: 3}},
		}
		if !reflect.DeepEqual(d.said, want) {
			got, _ := json.Marshal(d.said)
			t.Errorf("events: %s", got)
		}
		if _, err := d.Report(t.Context(), 1, client.Report{}); err == nil || !strings.Contains(err.Error(), "the attempt is over") {
			t.Errorf("a report after the end: %v", err)
		}
	})
}

// All ranks of an iteration get the same request, whenever it comes.
func TestHandoffAsksAllAlike(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := openDesk(t.Context(), 3)
		asked := 0
		d.cfg.Stop = func() string {
			if asked++; asked > 1 {
				return client.Preempt // as if requested at this moment
			}
			return ""
		}
		for _, want := range []string{"", client.Preempt} {
			answers := make(chan string, 3)
			for rank := range 3 {
				go func() {
					stop, err := d.Report(t.Context(), rank, client.Report{Step: 1})
					if err != nil {
						t.Error(err)
					}
					answers <- stop.Stop
				}()
			}
			for range 3 {
				if got := <-answers; got != want {
					t.Errorf("a rank is asked to %q, want %q", got, want)
				}
			}
		}
		for rank := range 3 {
			d.Ended(rank)
		}
		if err := <-d.end; err != nil {
			t.Error(err)
		}
	})
}

// The callback gets each iteration when the log has it. The reply has the request that was made until
// then, and the wait is no part of a rank's time.
func TestHandoffTells(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := openDesk(t.Context(), 2)
		stop := ""
		d.cfg.Stop = func() string { return stop }
		d.cfg.Told = func(_ context.Context, m *events.Metrics) {
			if len(d.said) != m.Iteration || d.said[m.Iteration-1] != m {
				t.Errorf("the callback gets iteration %d, and the log has %d", m.Iteration, len(d.said))
			}
			<-time.After(time.Minute)
			if m.Step == 2 {
				stop = client.Preempt
			}
		}
		for _, want := range []string{"", client.Preempt} {
			answers := make(chan string, 2)
			for rank := range 2 {
				go func() {
					<-time.After(time.Second)
					got, err := d.Report(t.Context(), rank, client.Report{Step: int64(len(want))/7 + 1})
					if err != nil {
						t.Error(err)
					}
					answers <- got.Stop
				}()
			}
			for range 2 {
				if got := <-answers; got != want {
					t.Errorf("a rank is asked to %q, want %q", got, want)
				}
			}
		}
		d.Ended(0)
		d.Ended(1)
		if err := <-d.end; err != nil {
			t.Error(err)
		}
		for _, m := range d.said {
			if m.Seconds != 1 {
				t.Errorf("iteration %d took %v s, want 1", m.Iteration, m.Seconds)
			}
		}
	})
}

// The time of an iteration is rank 0's own, from the moment it was released.
func TestHandoffTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := openDesk(t.Context(), 2)
		for range 3 {
			answered(t, d.reports(t, 0, 2*time.Second, 1, nil), d.reports(t, 1, 7*time.Second, 1, nil))
		}
		d.Ended(0)
		d.Ended(1)
		if err := <-d.end; err != nil {
			t.Fatal(err)
		}
		for _, m := range d.said {
			if m.Seconds != 2 {
				t.Errorf("iteration %d took %v s, want 2", m.Iteration, m.Seconds)
			}
		}
	})
}

// When a rank stays silent, the others are released at the deadline, whose error
// names it. The clock starts with the first report, not with the iteration.
func TestHandoffDeadline(t *testing.T) {
	for silent, says := range []string{"ranks [0] have not reported within 1m0s, while ranks [1 2] have", "ranks [1] have", "ranks [2] have"} {
		synctest.Test(t, func(t *testing.T) {
			d := openDesk(t.Context(), 3)
			<-time.After(time.Hour)
			var answers []<-chan error
			for rank := range 3 {
				if rank != silent {
					answers = append(answers, d.reports(t, rank, time.Duration(rank)*time.Second, 1, nil))
				}
			}
			<-time.After(59 * time.Second)
			waiting(t, "before the deadline", answers...)
			for _, err := range append(answers, d.end) {
				if err := <-err; err == nil || !strings.Contains(err.Error(), says) {
					t.Errorf("error %v, want %q", err, says)
				}
			}
		})
	}
}

// Ranks that end while others report are named.
func TestHandoffOfUnequalRanks(t *testing.T) {
	for _, early := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			d := openDesk(t.Context(), 3)
			if early {
				d.Ended(0)
				d.Ended(2)
				synctest.Wait()
			}
			answer := d.reports(t, 1, 0, 1, nil)
			if !early {
				waiting(t, "others may still report", answer)
				d.Ended(2)
				d.Ended(0)
			}
			const says = "ranks [1] reported while ranks [0 2] have ended"
			for _, err := range []<-chan error{answer, d.end} {
				if err := <-err; err == nil || !strings.Contains(err.Error(), says) {
					t.Errorf("error %v, want %q", err, says)
				}
			}
		})
	}
}

// A report that was handed over counts, even if the rank's end is received first.
func TestHandoffLateReport(t *testing.T) {
	for range 50 {
		synctest.Test(t, func(t *testing.T) {
			d := &desk{end: make(chan error, 1)}
			d.Handoff = handoffOf(1, 2, func(_ context.Context, bodies ...events.Body) error {
				d.said = append(d.said, bodies[0].(*events.Metrics))
				return nil
			})
			answers := []<-chan error{d.reports(t, 0, 0, 1, nil), d.reports(t, 1, 0, 1, nil)}
			synctest.Wait()
			d.Ended(1)
			d.Ended(0)
			n, err := d.Run(t.Context())
			if n != 1 || err != nil || len(d.said) != 1 {
				t.Fatalf("%d iterations, %v", n, err)
			}
			answered(t, answers...)
		})
	}
}

// A report that is not in the log fails.
func TestHandoffWithoutLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := openDesk(t.Context(), 1)
		d.err = errors.New("no log")
		answer := d.reports(t, 0, 0, 1, nil)
		if err := <-answer; !errors.Is(err, d.err) {
			t.Errorf("the rank's error: %v", err)
		}
		if err := <-d.end; !errors.Is(err, d.err) {
			t.Errorf("the end is %v", err)
		}
	})
}

func TestHandoffCancelled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		d := openDesk(ctx, 2)
		answer := d.reports(t, 1, 0, 1, nil)
		waiting(t, "rank 0 has not reported", answer)
		cancel()
		if err := <-answer; !errors.Is(err, context.Canceled) {
			t.Errorf("the rank's error: %v", err)
		}
		if err := <-d.end; !errors.Is(err, context.Canceled) {
			t.Errorf("the end is %v", err)
		}
	})
}

func TestBareNumbers(t *testing.T) {
	for in, want := range map[string]string{
		`{"a":NaN,"b":[Infinity,-Infinity]}`:         `{"a":"NaN","b":["Infinity","-Infinity"]}`,
		`{"NaN":"NaN","q\"NaN":1,"\\":NaN}`:          `{"NaN":"NaN","q\"NaN":1,"\\":"NaN"}`,
		`{"a":1e-3,"b":null,"c":"-Infinity \\\" x"}`: `{"a":1e-3,"b":null,"c":"-Infinity \\\" x"}`,
		``: ``, `"NaN`: `"NaN`, `"\`: `"\`, `Na`: `Na`,
	} {
		if got := string(QuoteNonFinite([]byte(in))); got != want {
			t.Errorf("%s becomes %s, want %s", in, got, want)
		}
	}
}
