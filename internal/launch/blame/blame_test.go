package blame

import (
	"strings"
	"testing"
)

// A node must be excluded when its ranks have failed so often in a row: no other node's rank fails
// in between, nothing is committed, and no other node was excluded since the last commit.
func TestFailures(t *testing.T) {
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
			b := Failures{Limit: c.limit}
			got := ""
			for _, f := range strings.Fields(c.fails) {
				host, commit := strings.CutSuffix(f, "+")
				switch b.Failed(Node{Index: int(host[0]), Host: host}, host != "-", commit) {
				case Undecided:
					got += "-"
				case TheNode:
					b.Excluded()
					got += "x"
				case TheProgram:
					got += "p"
				}
			}
			if got != c.want {
				t.Errorf("%s, want %s", got, c.want)
			}
		})
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
		if inCause, inTail := Blameless("rank 2: exit code 1: "+text, nil), Blameless("rank 2: exit code 1", []string{"loading", text}); inCause != want || inTail != want {
			t.Errorf("%q: %v and %v, want %v", text, inCause, inTail, want)
		}
	}
}
