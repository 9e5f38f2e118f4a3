//go:build testbed || outlive

package main

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

const preemptGrace = 4 * time.Second

// elasticJob is a job of two or three nodes that grows soon.
func elasticJob(worker ...string) job {
	return job{
		nnodes: "2:3", nproc: 1, timeout: firm, worker: append([]string{"--elastic"}, worker...),
		more: []string{"--grow-interval", "500ms", "--last-call", "2s", "--preempt-grace", preemptGrace.String(), "--max-restarts", "0"},
	}
}

// elasticScene starts such a job on a and b.
func elasticScene(t *testing.T, j job) *scene {
	t.Helper()
	on := threeNodes()
	ctx, c := start(t, on)
	s := &scene{t: t, ctx: ctx, cluster: c, job: j}
	s.elastic = true
	s.a = s.launch("a")
	check(t, s.a.prints(ctx, "waiting for nodes"))
	s.b = s.launch("b")
	return s
}

// A third node joins: the group saves and ends at a step boundary, and three ranks continue with the
// next step. Then that node loses its power: two ranks continue from the last commit. Each loss is that of
// an unbroken run on the same schedule of world sizes. The growth costs no restart: none is allowed.
func TestGrowAndShrink(t *testing.T) {
	t.Parallel()
	s := elasticScene(t, elasticJob())
	s.on(s.group(0, 25), "a", "b")
	s.c = s.launch("c")
	s.on(s.group(1, 25), "a", "b", "c")
	check(t, s.node("c").PowerOff())
	s.on(s.group(2, 25), "a", "b")
	s.ends(s.ctx, t, s.a, s.b)

	lives := must[[]life](t)(readLives(s.lives, 0))
	all := elastic(&verdict{}, lives)
	if len(all) != 3 {
		t.Fatalf("attempts %+v", all)
	}
	two, three, again := all[0], all[1], all[2]
	t.Logf("attempts %+v", all)
	if two.world != 2 || three.world != 3 || again.world != 2 {
		t.Errorf("world sizes %d, %d, %d", two.world, three.world, again.world)
	}
	if two.committed != two.last || three.first != two.last+1 {
		t.Errorf("two ranks end with step %d, of which %d is committed; three begin with step %d", two.last, two.committed, three.first)
	}
	// The newest commit of three ranks is the log's: they may have ended before they learned of it.
	newest := ""
	for _, e := range of(s.events(), "checkpoint.committed") {
		if strings.HasSuffix(e.Data.Checkpoint, ".a2") {
			newest = e.Data.Checkpoint
		}
	}
	if newest != fmt.Sprintf("step-%d.a2", again.first-1) || again.first <= three.committed || again.first > three.last+1 {
		t.Errorf("three ranks have committed %s, know of step %d and end with %d; two begin with step %d", newest, three.committed, three.last, again.first)
	}
	reasons := of(s.events(), "group.stopped")
	if want := "grown from 2 to 3 nodes: node 2 on c joined, and the workers saved and ended as asked"; len(reasons) != 3 || reasons[0].Data.Reason != want {
		t.Errorf("attempts ended because %+v, want %q first", reasons, want)
	}
}

// A third node joins whose rank fails at once: it is excluded, and two ranks continue. The failure costs no
// restart: none is allowed.
func TestGrowthByBrokenNode(t *testing.T) {
	t.Parallel()
	s := elasticScene(t, elasticJob("--broken-on", "c"))
	s.group(0, 25)
	s.c = s.launch("c")
	if code := must[int](t)(s.c.code(s.ctx)); code != 1 || !strings.Contains(s.c.log.String(), "excluded from the job: the group grew by it") {
		t.Errorf("the trainer on c exits with %d", code)
	}
	s.on(s.group(2, 25), "a", "b")
	s.ends(s.ctx, t, s.a, s.b)
	if got := s.nodeStates()["c"]; !strings.HasPrefix(got, "excluded: the group grew by it, and failed before a checkpoint was committed: ") {
		t.Errorf("node c is %q", got)
	}
}

// A node that joins a group which does not grow is a spare.
func TestNoGrowth(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		worker  []string
		command []string
		more    []string
		want    string        // in the output of a; "": nothing
		over    time.Duration // after which the ranks have shown that they continue
	}{
		"nothing is committed":    {worker: []string{"--every", "0"}},
		"switched off":            {more: []string{"--grow-interval", "0"}},
		"workers that do not ask": {command: []string{"sh", "-c", "while [ ! -e " + livesAt + "/" + finishFile + " ]; do sleep 0.1; done"}, want: "its workers neither report nor poll for stop requests"},
		"workers that do not end": {worker: []string{"--heedless"}, want: "its workers did not end when asked; they continue", over: preemptGrace + time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			j := elasticJob(c.worker...)
			j.more = append(j.more, c.more...)
			j.command = c.command
			s := elasticScene(t, j)
			if c.command == nil {
				s.group(0, 25)
			} else {
				check(t, s.a.prints(s.ctx, "attempt started"))
			}
			s.c = s.launch("c")
			check(t, s.a.prints(s.ctx, `msg="node joined" node=2`))
			if c.want != "" {
				check(t, s.a.prints(s.ctx, c.want))
			}
			check(t, s.pass(c.over))
			if c.command == nil {
				must[int](t)(s.moves(s.ctx, 0, s.a, s.b, s.c))
			}
			if c.want == "" {
				check(t, s.pass(2*s.job.timeout))
			}
			if c.want == "" && strings.Contains(s.a.log.String(), "the group grows") {
				t.Error("the group was asked to grow")
			}
			check(t, s.finish()) // with a commit, after which the group may still be asked
			s.ended(s.a, s.b, s.c)
			if n := len(of(s.events(), "group.started")); n != 1 {
				t.Errorf("%d groups, want 1", n)
			}
		})
	}
}
