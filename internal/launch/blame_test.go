package launch

import (
	"fmt"
	"strings"
	"testing"
)

// A node must be excluded when its ranks have failed so often and no rank of another node has
// failed in between.
func TestBlame(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		limit int
		fails string // host, place
		want  string // excluded or not
	}{
		"once":                         {2, "b1", "-"},
		"twice":                        {2, "b1 b1", "-x"},
		"others fail too":              {2, "b1 a0 b1 a0 b1", "-----"},
		"another fails, then twice":    {2, "b1 a0 b1 b1", "---x"},
		"at once":                      {1, "b1", "x"},
		"three times":                  {3, "b1 b1 b1", "--x"},
		"never":                        {0, "b1 b1 b1 b1", "----"},
		"the next node of this place":  {2, "b1 b1 c1 c1 c1", "-x---"},
		"a node of another place then": {2, "b1 b1 a0 a0", "-x-x"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := blame{limit: c.limit}
			got := ""
			for _, f := range strings.Fields(c.fails) {
				place := int(f[1] - '0')
				if b.failed(blamed{place, f[:1]}, place) {
					b.excluded(place)
					got += "x"
				} else {
					got += "-"
				}
			}
			if got != c.want {
				t.Errorf("%s, want %s", got, c.want)
			}
		})
	}
}

// A failure that follows from another one, or of which no rank is the cause, blames no node.
func TestBlamesRank(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		f    FailedError
		want bool
	}{
		{FailedError{Rank: 2, Cause: "node 1: rank 2 was killed by SIGKILL"}, true},
		{FailedError{Rank: 0, Kind: WorkerFailure, Cause: "rank 0: exit code 1", Tail: []string{"RuntimeError: CUDA error: uncorrectable ECC error"}}, true},
		{FailedError{Rank: -1, Cause: "rank 1 has made no request for 1m"}, false},
		{FailedError{Rank: 2, Kind: InfrastructureFailure, Cause: "the GPU of rank 2 is lost"}, false},
		{FailedError{Rank: 2, Kind: PreemptionFailure}, false},
		{FailedError{Rank: 2, Cause: "rank 2: exit code 1: [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=6)"}, false},
		{FailedError{Rank: 2, Cause: "rank 2: exit code 1", Tail: []string{"Connection closed by peer [10.0.0.2]:4711"}}, false},
		{FailedError{Rank: 2, Cause: "rank 2: exit code 1: collective 7 (gather): rank 2 waited for rank 3, which did not join: look at the last output of rank 3"}, false},
	} {
		if got := blamesRank(&c.f); got != c.want {
			t.Errorf("%v: %v", fmt.Sprint(c.f.Cause, c.f.Tail), got)
		}
	}
}

// Restarts of workers that a node was to blame for are not charged.
func TestBudgetExcused(t *testing.T) {
	t.Parallel()
	b := budgets{workers: 1, infrastructure: 1}
	if !b.charge(WorkerFailure) {
		t.Fatal("no budget")
	}
	b.excuse(1)
	if !b.charge(InfrastructureFailure) || !b.charge(WorkerFailure) || b.charge(WorkerFailure) {
		t.Errorf("budgets %+v", b)
	}
	b.excuse(7)
	if b.used(WorkerFailure) != 0 {
		t.Errorf("%d used", b.used(WorkerFailure))
	}
}

// A bad node stays, with the reason, where the job needs it or the user wants it.
func TestBadNodeKept(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		exclude            Exclusion
		copies, index      int
		coordinates, spare bool
		want               string // part of the reason; "": it is excluded
	}{
		"a spare is there":          {ExcludeSpared, 0, 1, false, true, ""},
		"no spare":                  {ExcludeSpared, 0, 1, false, false, "no spare"},
		"no spare is needed":        {ExcludeAlways, 0, 1, false, false, ""},
		"never":                     {ExcludeNever, 0, 1, false, true, "--max-node-failures is 0"},
		"the coordinating node":     {ExcludeAlways, 0, 0, true, true, "coordinates"},
		"a copy of the log":         {ExcludeAlways, 3, 2, false, true, "copies of the log"},
		"a copy of the log, spared": {ExcludeSpared, 3, 1, false, true, "copies of the log"},
		"a node beyond the copies":  {ExcludeAlways, 3, 3, false, true, ""},
	} {
		config := Config{Exclude: c.exclude, LogCopies: c.copies}
		got := config.keeps(c.index, c.coordinates, func() bool { return c.spare })
		if got == "" != (c.want == "") || !strings.Contains(got, c.want) {
			t.Errorf("%s: kept because %q, want %q", name, got, c.want)
		}
	}
}
