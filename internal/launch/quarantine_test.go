package launch

import (
	"fmt"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/launch/process"
)

// A node must be excluded when its ranks have failed so often in a row: no other node's rank fails
// in between, nothing is committed, and no other node was excluded since the last commit.
func TestBlame(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		limit int
		fails string // host of the node to blame, or - for none; after a commit with +
		want  string // x: the node is excluded, p: the program is to blame
	}{
		"once":                         {2, "b", "-"},
		"twice":                        {2, "b b", "-x"},
		"others fail too":              {2, "b a b a b", "-----"},
		"another fails, then twice":    {2, "b a b b", "---x"},
		"at once":                      {1, "b", "x"},
		"three times":                  {3, "b b b", "--x"},
		"never":                        {0, "b b b b", "----"},
		"a blameless one in between":   {2, "b - b", "---"},
		"a commit in between":          {2, "b b+", "--"},
		"a commit, then twice":         {2, "b b+ b", "--x"},
		"a bug in the last rank":       {2, "d d c c b b a a", "-x-p-p-p"},
		"the next node, then a commit": {2, "b b c c c+ c", "-x-p-x"},
		"another node, then a commit":  {1, "b c a+", "xpx"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := blame{limit: c.limit}
			got := ""
			for _, f := range strings.Fields(c.fails) {
				host, commit := strings.CutSuffix(f, "+")
				switch b.failed(blamed{int(host[0]), host}, host != "-", commit) {
				case nobody:
					got += "-"
				case theNode:
					b.excluded()
					got += "x"
				case theProgram:
					got += "p"
				}
			}
			if got != c.want {
				t.Errorf("%s, want %s", got, c.want)
			}
		})
	}
}

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
		{FailedError{Rank: 0, Kind: WorkerFailure, Cause: "rank 0: exit code 1", Tail: ecc}, true},
		{FailedError{Rank: 0, Cause: "rank 0: exit code 1", failed: map[int]bool{1: true}}, true},
		{FailedError{Rank: 0, Cause: "rank 0: exit code 1", failed: map[int]bool{0: false, 1: true}}, true},
		{FailedError{Rank: 0, Cause: "rank 0: exit code 1", Tail: ecc, failed: map[int]bool{0: true, 1: true}}, false},
		{FailedError{Rank: -1, Cause: "rank 1 has made no request for 1m"}, false},
		{FailedError{Rank: 2, Kind: InfrastructureFailure, Cause: "the GPU of rank 2 is lost"}, false},
		{FailedError{Rank: 2, Kind: PreemptionFailure}, false},
		{FailedError{Rank: 2, Cause: "rank 2: exit code 1", Tail: []string{"Connection closed by peer [10.0.0.2]:4711"}}, false},
	} {
		if got := c.f.blames(1); got != c.want {
			t.Errorf("%v: %v", fmt.Sprint(c.f.Cause, c.f.Tail, c.f.failed), got)
		}
	}
}

// Messages of ranks whose peers are gone.
func TestBlameless(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]bool{
		"[Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=6, OpType=ALLREDUCE) ran for 600010 milliseconds before timing out.":                                                       true,
		"[PG ID 0 PG GUID 0 Rank 1] ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring enqueued collectives.":                                                     true,
		"torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2251, remote process exited or there was a network error\nncclRemoteError: A call failed possibly due to a network error": true,
		"ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.":                                                                                              true,
		"torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to connect to (node0, 29500).":                                                                    true,
		"[rank1]:[W TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=4): failed to recv, got 0 bytes. The connection was likely closed. Did the remote server shutdown or crash?":                true,
		"sendBytes failed on SocketImpl(fd=4, addr=[node1]:51234, remote=[node0]:29500): Broken pipe":                                                                                                      true,
		"RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:4711":                                                                                     true,
		"RuntimeError: [gloo/transport/tcp/buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete":                                                                                       true,
		"ConnectionRefusedError: [Errno 111] Connection refused":                                                                                                                                           true,
		"socketStartConnect: Connect to 10.0.0.2<43127> failed : Connection timed out":                                                                                                                     true,
		"socketPollConnect poll() returned 1, no POLLOUT events: No route to host":                                                                                                                         true,
		"collective 7 (gather): rank 2 waited for rank 3, which did not join: look at the last output of rank 3":                                                                                           true,
		"RuntimeError: CUDA error: uncorrectable ECC error encountered":                                                                                                                                    false,
		"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.":                                                                                                                          false,
		"Bus error (core dumped)": false,
	} {
		if inCause, inTail := blameless("rank 2: exit code 1: "+text, nil), blameless("rank 2: exit code 1", []string{"loading", text}); inCause != want || inTail != want {
			t.Errorf("%q: %v and %v, want %v", text, inCause, inTail, want)
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
		"its node is lost":         {FailedError{Rank: -1, Kind: InfrastructureFailure}, "early"},
		"another rank of its node": {FailedError{Rank: 3, Tail: []string{"of rank 3"}}, "early"},
	} {
		f := FailedError{Rank: 2, Tail: []string{"early"}}
		if f.complete(&c.later); strings.Join(f.Tail, "") != c.want {
			t.Errorf("%s: %v, want %s", name, f.Tail, c.want)
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
	b.excuse(WorkerFailure, 1)
	if !b.charge(InfrastructureFailure) || !b.charge(WorkerFailure) || b.charge(WorkerFailure) {
		t.Errorf("budgets %+v", b)
	}
	b.excuse(WorkerFailure, 7)
	if b.used(WorkerFailure) != 0 || b.used(InfrastructureFailure) != 1 {
		t.Errorf("%d and %d used", b.used(WorkerFailure), b.used(InfrastructureFailure))
	}
	b.excuse(InfrastructureFailure, -1)
	if b.used(InfrastructureFailure) != 1 {
		t.Errorf("%d used", b.used(InfrastructureFailure))
	}
	b.excuse(InfrastructureFailure, 1)
	if b.used(InfrastructureFailure) != 0 {
		t.Errorf("%d used", b.used(InfrastructureFailure))
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
