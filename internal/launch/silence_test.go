package launch

import (
	"bytes"
	"context"
	"log/slog"
	"os/exec"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ckptstore/ckptstore/internal/launch/process"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/session/pulse"
)

// A trainer that was stopped does not count that as silence of its ranks.
func TestStoppedTrainer(t *testing.T) {
	for _, late := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			const limit = 10 * time.Second
			warned := &bytes.Buffer{}
			w := &watch{
				job:    &job{cfg: Config{Config: session.Config{Nodes: session.OneNode(1)}}, log: slog.New(slog.NewTextHandler(warned, nil))},
				pulses: pulse.New(1), procs: []*process.Process{process.Of(0, &exec.Cmd{})},
			}
			w.pulses.Begin(0, "hello")()
			began := time.Now()
			if late { // as if the last look had been before the stop
				w.pulses.Shift(-limit)
				began = began.Add(-limit)
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			silent, _ := w.awaitSilence(ctx, limit, began)
			if len(silent) != 1 || strings.Contains(warned.String(), "trainer was suspended") != late {
				t.Errorf("silent %v, warned %q", silent, warned)
			}
			if took := time.Since(began); late && took < 2*limit || took > 3*limit {
				t.Errorf("it took %v", took)
			}
		})
	}
}

// The cause of a hang names the silent ranks and those that wait for them.
func TestHangCause(t *testing.T) {
	t.Parallel()
	got := hangCause([]pulse.Silence{{Rank: 1, Last: "heartbeat"}}, []int{0, 2})
	if got != "rank 1 silent for 0s, last request heartbeat; ranks 0, 2 wait for it" {
		t.Errorf("cause %q", got)
	}
}
