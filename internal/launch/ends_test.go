package launch_test

import (
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/projections"
)

// blocked is output without a reader.
type blocked chan struct{}

// Write implements io.Writer.
func (b blocked) Write(p []byte) (int, error) {
	<-b
	return len(p), nil
}

// Output without a reader does not prevent the end of the job.
func TestBlockedOutput(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, shell("echo hello")...)
	out := make(blocked)
	defer close(out)
	j.cfg.Stdout = out
	j.must()
	wantText(t, j.log, "output has no reader")
}

// A program that fails at once is not restarted in a busy loop, and the wait ends
// with the job.
func TestBackoff(t *testing.T) {
	t.Parallel()
	j := newJob(t, 1, "/bin/false")
	j.cfg.MaxRestarts, j.cfg.ShortLife = -1, time.Hour
	j.start()
	awaitText(t, j.log, "after=400ms")
	j.cancel(errStop)
	if err := j.wait(); err == nil || !strings.Contains(err.Error(), errStop.Error()) {
		t.Errorf("error %v", err)
	}
	if n := len(bodiesOf[events.GroupStarted](t, runOf(t))); n != 3 {
		t.Errorf("%d attempts, want 3", n)
	}
	if trial := trialOf(t); trial.Status != projections.Paused {
		t.Errorf("trial %+v", trial)
	}
}

// A write that does not end when it is abandoned ends the job anyway, with an
// error that gives the reason.
func TestStuckDisk(t *testing.T) {
	t.Parallel()
	j := newJob(t, 1, savesAndEnds...)
	j.cfg.DrainTimeout = shortly
	g := j.gated("r00000.safetensors")
	defer close(g.open)
	j.start()
	g.await(t)
	if err := j.wait(); err == nil || !strings.Contains(err.Error(), "a disk does not answer") {
		t.Errorf("error %v", err)
	}
}
