//go:build outlive

package cmd_test

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/store"
)

// checkResumes reads the log and checks that each attempt resumed from the run's newest
// committed checkpoint at that time (by the order in which the saves began). It returns
// the jobs of all attempts.
func checkResumes(t *testing.T, s *store.Store) (jobs []string) {
	t.Helper()
	last, err := s.Log.Last(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	newest := map[string]string{}
	begun := map[string]uint64{} // by run and checkpoint
	attempts, resumed := 0, 0
	for r, err := range s.Log.Read(t.Context(), 1, last) {
		if err != nil {
			t.Fatal(err)
		}
		run := r.Scope.Run
		switch r.Kind {
		case events.CheckpointBegun{}.Kind():
			var e events.CheckpointBegun
			if err := json.Unmarshal(r.Data, &e); err != nil {
				t.Fatal(err)
			}
			begun[run+"@"+e.Checkpoint] = r.Sequence
		case events.CheckpointCommitted{}.Kind():
			var e events.CheckpointCommitted
			if err := json.Unmarshal(r.Data, &e); err != nil {
				t.Fatal(err)
			}
			// Saves that overlap may be committed in another order.
			if begun[run+"@"+e.Checkpoint] > begun[run+"@"+newest[run]] {
				newest[run] = e.Checkpoint
			}
		case events.GroupStarted{}.Kind():
			var e events.GroupStarted
			if err := json.Unmarshal(r.Data, &e); err != nil {
				t.Fatal(err)
			}
			attempts++
			if e.Resume != "" {
				resumed++
			}
			if e.Resume != newest[run] {
				t.Errorf("attempt %d of %s resumed from %q; the newest checkpoint was %q", e.Attempt, run, e.Resume, newest[run])
			}
			jobs = append(jobs, e.Job)
		}
	}
	t.Logf("attempts: %d, of which %d resumed from a checkpoint", attempts, resumed)
	if resumed < kills/4 {
		t.Errorf("%d of %d attempts resumed: too few to mean anything", resumed, attempts)
	}
	return jobs
}

// noneNamed waits until no process, such as a guard, has one of the jobs in its command
// line.
func noneNamed(t *testing.T, jobs []string) {
	t.Helper()
	deadline := time.After(killSettle)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		left := named(t, jobs)
		if len(left) == 0 {
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Errorf("processes that are left %v after their trainers: %q", killSettle, left)
			return
		}
	}
}

func named(t *testing.T, jobs []string) (left []string) {
	t.Helper()
	lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range lines {
		line, err := os.ReadFile(path)
		if err != nil {
			continue // gone
		}
		for _, job := range jobs {
			if bytes.Contains(line, []byte(job)) {
				left = append(left, string(line))
			}
		}
	}
	return left
}
