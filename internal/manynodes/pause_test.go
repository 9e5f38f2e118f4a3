//go:build testbed || outlive

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// usualTimeout is the default of --node-timeout.
const usualTimeout = 10 * time.Second

// longest is a pause in addition to those of CI, such as 60s: MANYNODES_PAUSE.
var longest = func() time.Duration {
	text := os.Getenv("MANYNODES_PAUSE")
	if text == "" {
		return 0
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		panic(fmt.Sprintf("MANYNODES_PAUSE: %v", err))
	}
	return d
}()

// The coordinating trainer, which owns the log, or another owner of the log is stopped by
// SIGSTOP. Shorter than T/2, no worker dies. Longer, the group restarts from slots at most
// once. No job ends, and no node is taken for lost or gives way to the spare.
func TestPauses(t *testing.T) {
	t.Parallel()
	pauses := []time.Duration{3 * time.Second, 12 * time.Second}
	if longest > 0 {
		pauses = append(pauses, longest)
	}
	for _, d := range pauses {
		for _, apart := range []bool{false, true} {
			who := "coordinator"
			if apart {
				who = "owner of the log"
			}
			t.Run(fmt.Sprint(who, " for ", d), func(t *testing.T) {
				t.Parallel()
				testPause(t, apart, d)
			})
		}
	}
}

func testPause(t *testing.T, apart bool, d time.Duration) {
	ctx, c := start(t, threeNodes())
	j := job{nnodes: "2", nproc: 2, timeout: usualTimeout, worker: []string{"--stubborn"}}
	j.more = []string{"--max-restarts", "0", "--max-infra-restarts", "1"}
	s := &scene{t: t, ctx: ctx, cluster: c, job: j}
	var stopped *trainer
	if apart {
		stopped = s.serve("a")
	}
	s.a, s.b = s.launch("a"), s.launch("b")
	s.group(0, 12)
	s.c = s.launch("c")
	check(t, s.a.prints(ctx, "node=2"))
	if !apart {
		stopped = s.a
	}
	check(t, stopped.pause())
	check(t, s.pass(d))
	check(t, stopped.resume())
	began := time.Now()
	attempt := must[int](t)(s.moves(ctx, 0, s.a, s.b, s.c))
	t.Logf("trained %v after the pause", time.Since(began))
	lives := must[[]life](t)(readLives(s.lives, attempt-1))
	s.on(groupOf(lives, attempt), "a", "b")
	check(t, s.finish())
	s.ended(s.a, s.b, s.c)
	if apart {
		check(t, unix.Kill(stopped.Process.Pid, unix.SIGTERM))
		s.ended(stopped)
	}
	v := s.over(ctx, t)
	switch short := d < usualTimeout/2; {
	case short && (v.Attempts != 1 || v.Lives != 4), v.Attempts > 2:
		t.Errorf("%d attempts of %d processes", v.Attempts, v.Lives)
	}
	all := s.events()
	for _, e := range lostNodes(all) {
		t.Errorf("node %d was lost: %s", e.Data.Node, e.Data.Reason)
	}
	loads := of(all, "restore.completed")
	for _, e := range loads {
		if want := int64(4 * 8 * blockSize); e.Data.Slots < want {
			t.Errorf("attempt %d has %d bytes from slots, want the %d of all ranks' tensors", e.Data.Attempt, e.Data.Slots, want)
		}
	}
	if len(loads) != v.Attempts-1 {
		t.Errorf("%d restores in %d attempts", len(loads), v.Attempts)
	}
}

// serve starts an owner of the store on a node, and waits until it owns it.
func (s *scene) serve(name string) *trainer {
	s.t.Helper()
	program := filepath.Join(s.bin, "ckptstore")
	check(s.t, s.node(name).Command(s.ctx, program, "init", "--store", storeAt).Run())
	owner := must[*trainer](s.t)(s.execute(s.ctx, s.node(name), program, []string{"serve", "--store", storeAt}, nil))
	check(s.t, owner.prints(s.ctx, "serving store"))
	return owner
}

// ended checks that programs end with 0.
func (s *scene) ended(programs ...*trainer) {
	s.t.Helper()
	for _, p := range programs {
		if code := must[int](s.t)(p.code(s.ctx)); code != 0 {
			s.t.Errorf("%s on %s exits with %d", filepath.Base(p.Path), p.on.Name(), code)
		}
	}
}
