package launch

import (
	"fmt"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/launch/blame"
	"github.com/ckptstore/ckptstore/internal/launch/process"
	"github.com/ckptstore/ckptstore/internal/nodes"
)

// A failure that follows from another one, of which no rank is the cause, or that ranks of other
// nodes share, blames no node.
func TestBlamesNode(t *testing.T) {
	t.Parallel()
	ecc := []string{"RuntimeError: CUDA error: uncorrectable ECC error"}
	for _, c := range []struct {
		f    FailedError
		want bool
	}{
		{FailedError{Rank: 2, Cause: "node 1: rank 2 was killed by SIGKILL"}, true},
		{FailedError{Rank: 0, Kind: blame.Worker, Cause: "rank 0: exit code 1", Tail: ecc}, true},
		{FailedError{Rank: 0, Cause: "rank 0: exit code 1", failed: map[int]bool{1: true}}, true},
		{FailedError{Rank: 0, Cause: "rank 0: exit code 1", failed: map[int]bool{0: false, 1: true}}, true},
		{FailedError{Rank: 0, Cause: "rank 0: exit code 1", Tail: ecc, failed: map[int]bool{0: true, 1: true}}, false},
		{FailedError{Rank: -1, Cause: "rank 1 has made no request for 1m"}, false},
		{FailedError{Rank: 2, Kind: blame.Infrastructure, Cause: "the GPU of rank 2 is lost"}, false},
		{FailedError{Rank: 2, Kind: blame.Preemption}, false},
		{FailedError{Rank: 2, Cause: "rank 2: exit code 1", Tail: []string{"Connection closed by peer [10.0.0.2]:4711"}}, false},
	} {
		if got := c.f.blames(1); got != c.want {
			t.Errorf("%v: %v", fmt.Sprint(c.f.Cause, c.f.Tail, c.f.failed), got)
		}
	}
}

// A rank failed by itself unless the signals that end a group, or the end of another rank, explain it.
func TestFailedItself(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		f    failure
		tail string
		want bool
	}{
		"first, killed":                 {failure{Exit: process.Exit{Signal: "SIGKILL"}}, "", true},
		"first, code 1":                 {failure{Exit: process.Exit{Code: 1}}, "KeyError: 'loss'", true},
		"ended by SIGTERM":              {failure{Exit: process.Exit{Signal: "SIGTERM"}, stopped: true}, "", false},
		"ended by SIGKILL":              {failure{Exit: process.Exit{Signal: "SIGKILL"}, stopped: true}, "", false},
		"its handler exits with 143":    {failure{Exit: process.Exit{Code: 143}, stopped: true}, "", false},
		"its shell exits with 137":      {failure{Exit: process.Exit{Code: 137}, stopped: true}, "", false},
		"SIGTERM after an error report": {failure{Exit: process.Exit{Signal: "SIGTERM"}, stopped: true, told: told{message: "KeyError: 'loss'"}}, "", true},
		"the same bug, later":           {failure{Exit: process.Exit{Code: 1}, stopped: true}, "KeyError: 'loss'", true},
		"a crash, later":                {failure{Exit: process.Exit{Signal: "SIGSEGV"}, stopped: true}, "", true},
		"its peer is gone":              {failure{Exit: process.Exit{Code: 1}, stopped: true}, "Connection reset by peer", false},
		"its peer is gone, first":       {failure{Exit: process.Exit{Code: 1}}, "Connection reset by peer", false},
	} {
		if got := c.f.itself([]string{c.tail}); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

// The output of a failed rank is that of its node's last report about this rank.
func TestFailureCompleted(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		later FailedError
		want  string
	}{
		"its node's last report":   {FailedError{Rank: 2, Tail: []string{"all"}}, "all"},
		"without output":           {FailedError{Rank: 2}, "early"},
		"its node is lost":         {FailedError{Rank: -1, Kind: blame.Infrastructure}, "early"},
		"another rank of its node": {FailedError{Rank: 3, Tail: []string{"of rank 3"}}, "early"},
	} {
		f := FailedError{Rank: 2, Tail: []string{"early"}}
		if f.complete(&c.later); strings.Join(f.Tail, "") != c.want {
			t.Errorf("%s: %v, want %s", name, f.Tail, c.want)
		}
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

// A rank whose connections broke because a node was lost is no failure of the workers.
func TestFailureByLoss(t *testing.T) {
	t.Parallel()
	b := nodes.Member{Node: nodes.Node{Index: 1, Host: "b"}, Why: "nothing was received for 10s"}
	for name, c := range map[string]struct {
		tail string
		lost []nodes.Member
		want blame.Kind
	}{
		"a broken connection":     {"Connection reset by peer", []nodes.Member{b}, blame.Infrastructure},
		"no node is lost":         {"Connection reset by peer", nil, blame.Worker},
		"an error of the program": {"KeyError: 'loss'", []nodes.Member{b}, blame.Worker},
	} {
		e := &FailedError{Rank: 0, Cause: "rank 0: exit code 1", Tail: []string{c.tail}}
		if e.fell(c.lost); e.Kind.Or() != c.want || strings.Contains(e.Cause, "node 1 is lost: nothing was received") != (c.want == blame.Infrastructure) {
			t.Errorf("%s: %s: %s", name, e.Kind.Or(), e.Cause)
		}
	}
	(*FailedError)(nil).fell([]nodes.Member{b})
}

func TestFailedErrorNamesItsBudget(t *testing.T) {
	e := &FailedError{Attempt: 12, Restarts: 10, Kind: blame.Infrastructure, Cause: "a device is lost", Advice: "look at it"}
	if got := e.Error(); !strings.Contains(got, "no restart for failures of the infrastructure is left (10 used): a device is lost; look at it") {
		t.Error(got)
	}
}
