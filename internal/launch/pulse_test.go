package launch

import (
	"bytes"
	"context"
	"log/slog"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ckptstore/ckptstore/internal/launch/process"
)

// A rank is silent when it spoke before and has no request under way; those that
// meet in the trainer wait for it.
func TestSilentRanks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const limit = time.Minute
		p := newPulses(6)
		p.begin(0, "report")                              // waits for all
		p.begin(1, "hello")()                             // silent since
		p.begin(2, "wait")                                // the trainer works for it
		answered := p.begin(3, "gather")                  // and again
		p.begin(4, "load")()                              // has ended
		p.begin(1, "recv")                                // its agent's
		lives := func(rank int) bool { return rank != 4 } // 5 never spoke
		look := func(wantSilent, wantWaiting []int) {
			t.Helper()
			silent, waiting := p.silent(limit, time.Now(), lives)
			var ranks []int
			for _, s := range silent {
				ranks = append(ranks, s.rank)
			}
			if !slices.Equal(ranks, wantSilent) || !slices.Equal(waiting, wantWaiting) {
				t.Errorf("silent %v, waiting %v, want %v and %v", ranks, waiting, wantSilent, wantWaiting)
			}
		}
		time.Sleep(limit - 1) //nolint:forbidigo // the clock of the test's bubble
		look(nil, []int{0, 3})
		p.begin(1, "recv")() // answers an agent, not the training
		answered()
		time.Sleep(1 * time.Nanosecond) //nolint:forbidigo // the clock of the test's bubble
		look([]int{1}, []int{0})
		p.begin(1, "heartbeat")()
		look(nil, []int{0})
		time.Sleep(limit) //nolint:forbidigo // the clock of the test's bubble
		look([]int{1, 3}, []int{0})
		p.shift(limit)
		look(nil, []int{0})

		silent, waiting := p.silent(0, time.Now(), lives)
		if got := hangCause(silent[:1], append(waiting, 2)); got != "rank 1 silent for 0s, last request heartbeat; ranks 0, 2 wait for it" {
			t.Errorf("cause %q", got)
		}
	})
}

// A trainer that was stopped does not take that for silence of its ranks.
func TestStoppedTrainer(t *testing.T) {
	for _, late := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			const limit = 10 * time.Second
			warned := &bytes.Buffer{}
			w := &watch{
				job:   &job{log: slog.New(slog.NewTextHandler(warned, nil))},
				group: &group{pulses: newPulses(1), signals: newHeldSignals()}, procs: []*process.Process{process.Of(0, &exec.Cmd{})},
			}
			w.group.pulses.begin(0, "hello")()
			began := time.Now()
			if late { // as if the last look had been before the stop
				w.group.pulses.shift(-limit)
				began = began.Add(-limit)
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			silent, _ := w.awaitSilence(ctx, limit, began)
			if len(silent) != 1 || strings.Contains(warned.String(), "did not run for some time") != late {
				t.Errorf("silent %v, warned %q", silent, warned)
			}
			if took := time.Since(began); late && took < 2*limit || took > 3*limit {
				t.Errorf("it took %v", took)
			}
		})
	}
}
