package launch_test

import (
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
)

// TestOthersBlob: a job does not read other runs' events, even if part of them is
// gone.
func TestOthersBlob(t *testing.T) {
	t.Parallel()
	j := newJob(t, 1, savesAndEnds...)
	bad := &events.LocalPlan{
		Attempt: 1, Checkpoint: "step-1.a1", Name: "step-1", Step: 1, Participants: []int{0},
		Plan: events.Blob{Digest: strings.Repeat("0", 64), Size: events.MaxInline + 1},
	}
	ended := make(chan struct{})
	var others sync.WaitGroup
	others.Go(func() {
		for {
			f, err := events.NewFact(events.Stamp{ID: j.cfg.NewID(), Source: "test", Time: time.Now()},
				events.Scope{Run: j.cfg.Run + "2", Trial: j.cfg.Trial, Actor: events.Rank(0)}, bad)
			if err == nil {
				_, err = home.Log.Append(t.Context(), f)
			}
			if err != nil {
				t.Error(err)
				return
			}
			select {
			case <-ended:
				return
			case <-time.After(time.Millisecond):
			}
		}
	})
	j.start()
	err := j.wait()
	close(ended)
	others.Wait()
	if err != nil {
		t.Error(err)
	}
}
