//go:build testbed || outlive

package main

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/testbed"
	"github.com/ckptstore/ckptstore/internal/testbed/netfs"
)

// scene is a cluster with a job, and the trainers on its nodes.
type scene struct {
	*cluster
	t       *testing.T
	ctx     context.Context
	job     job
	a, b, c *trainer
}

// scenario starts a job on the nodes a and b.
func scenario(t *testing.T, on setting, j job) *scene {
	t.Helper()
	ctx, c := start(t, on)
	s := &scene{t: t, ctx: ctx, cluster: c, job: j}
	s.a, s.b = s.launch("a"), s.launch("b")
	return s
}

// pair starts a job of two nodes.
func pair(t *testing.T) *scene {
	t.Helper()
	return scenario(t, setting{nodes: []string{"a", "b"}, disk: netfs.NFS()}, twoNodes())
}

// launch starts the job's trainer on a node.
func (s *scene) launch(name string) *trainer {
	s.t.Helper()
	return must[*trainer](s.t)(s.start(s.ctx, s.node(name), s.job))
}

// group waits for a group after an attempt that has trained so many steps.
func (s *scene) group(after, steps int) []life {
	s.t.Helper()
	return must[[]life](s.t)(s.trains(s.ctx, after, steps))
}

// on checks which nodes a group has, in the order of their indexes.
func (s *scene) on(group []life, names ...string) {
	s.t.Helper()
	got := map[int]string{}
	for _, l := range group {
		got[l.Node] = l.Host
	}
	for i, name := range names {
		if got[i] != name {
			s.t.Errorf("attempt %d runs on %v, want %v", group[0].Attempt, got, names)
			return
		}
	}
}

// steady returns a job whose T is firm.
func steady(j job) job {
	j.timeout = firm
	return j
}

// placed waits until a group after an attempt has trained 12 steps on these nodes, in the order of their indexes. Groups
// before it may have ended because the machine was busy.
func (s *scene) placed(after int, names ...string) {
	s.t.Helper()
	check(s.t, await(s.ctx, fmt.Sprintf("a group on %v after attempt %d", names, after), func() (bool, error) {
		lives, err := readLives(s.lives, after)
		return slices.ContainsFunc(lives, func(l life) bool {
			group := groupOf(lives, l.Attempt)
			return len(group) == l.World && !slices.ContainsFunc(group, func(l life) bool {
				return l.steps() < 12 || l.Node >= len(names) || l.Host != names[l.Node]
			})
		}), err
	}))
}

// newest returns the number of the last attempt that has started a rank.
func (s *scene) newest() (attempt int) {
	s.t.Helper()
	for _, l := range must[[]life](s.t)(readLives(s.lives, 0)) {
		attempt = max(attempt, l.Attempt)
	}
	return attempt
}

func (s *scene) workers(name string) int {
	s.t.Helper()
	return must[int](s.t)(s.workersOn(s.node(name)))
}

// killWorker kills the process of a rank.
func (s *scene) killWorker(l life) {
	s.t.Helper()
	m := s.node(l.Host)
	all, err := m.Processes()
	check(s.t, err)
	i := slices.IndexFunc(all, func(p testbed.Process) bool { return p.NodePID == l.PID })
	if i < 0 {
		s.t.Fatalf("rank %d of attempt %d has ended", l.Rank, l.Attempt)
	}
	check(s.t, unix.Kill(all[i].PID, unix.SIGKILL))
}

// pass waits: for the length of a fault, not for its effect.
func (s *scene) pass(d time.Duration) error { return wait(s.ctx, d) }

// guarded waits until the trainer on a node has its guard, and so can start workers.
func (s *scene) guarded(name string) error {
	return await(s.ctx, "a guard on "+name, func() (bool, error) {
		all, err := s.node(name).Processes()
		return len(all) > 2, err // pid 1, the trainer, the guard
	})
}
