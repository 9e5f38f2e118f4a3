//go:build testbed || outlive

package main

import (
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/testbed/netfs"
)

// A trainer of another run, and one with another --rdzv-id, get the endpoint of a job. They do not train in it, and the
// job waits for a node of its own.
func TestTrainerOfAnotherJob(t *testing.T) {
	t.Parallel()
	ctx, c := start(t, setting{nodes: []string{"a", "b"}, disk: netfs.NFS()})
	own := twoWithin(calm)
	s := &scene{t: t, ctx: ctx, cluster: c, job: own}
	s.job.more = []string{"--rdzv-id", "42"}
	s.a = s.launch("a")
	check(t, s.a.prints(ctx, "waiting for nodes"))
	for _, flags := range [][]string{{"--name", "another"}, {"--rdzv-id", "43"}} {
		s.job.more = flags
		other := s.launch("b")
		code := must[int](t)(other.code(ctx))
		if text := "this trainer was started with " + flags[1]; code != 64 || !strings.Contains(other.log.String(), text) {
			t.Errorf("%v: exit code %d, want 64 and %q", flags, code, text)
		}
	}
	s.job.more = []string{"--rdzv-id", "42"}
	s.b = s.launch("b")
	if group := s.group(0, 12); group[0].Attempt != 1 {
		t.Errorf("attempt %d", group[0].Attempt)
	}
	s.ends(ctx, t, s.a, s.b)
}
