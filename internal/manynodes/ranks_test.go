//go:build testbed || outlive

package main

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/testbed"
)

// seat is the environment of a worker's process, as /proc of the host shows it.
type seat struct {
	host                                     string
	rank                                     int
	attempt, restart, addr, port, node, size string
}

// seats returns those of all workers, ordered by rank.
func (s *scene) seats() (all []seat) {
	s.t.Helper()
	for _, m := range s.nodes {
		for _, p := range must[[]testbed.Process](s.t)(s.workersOf(m)) {
			rank := must[int](s.t)(strconv.Atoi(p.Getenv("RANK")))
			all = append(all, seat{
				m.Name(), rank, p.Getenv(client.EnvAttempt), p.Getenv("TORCHELASTIC_RESTART_COUNT"),
				p.Getenv("MASTER_ADDR"), p.Getenv("MASTER_PORT"), p.Getenv("GROUP_RANK"), p.Getenv("WORLD_SIZE"),
			})
		}
	}
	slices.SortFunc(all, func(a, b seat) int { return cmp.Compare(a.rank, b.rank) })
	return all
}

// Over 10 restarts, each rank keeps its node and each node its index. In each attempt, all
// nodes have the same RESTART_COUNT, MASTER_ADDR and MASTER_PORT.
func TestTenRestarts(t *testing.T) {
	t.Parallel()
	const restarts = 10
	j := twoWithin(calm)
	j.more = []string{"--max-restarts", fmt.Sprint(restarts)}
	s := scenario(t, threeNodes(), j)
	s.group(0, 12)
	s.c = s.launch("c") // a spare moves no rank
	check(t, s.a.prints(s.ctx, "node=2"))
	ports := map[string]bool{}
	for n := range restarts + 1 {
		group := s.group(n, 12)
		seats := s.seats()
		if len(seats) != 4 {
			t.Fatalf("restart %d: %+v", n, seats)
		}
		for rank, got := range seats {
			want := seat{
				host: []string{"a", "a", "b", "b"}[rank], rank: rank, attempt: fmt.Sprint(n + 1), restart: fmt.Sprint(n),
				addr: s.node("a").Addr().String(), port: seats[0].port, node: []string{"0", "0", "1", "1"}[rank], size: "4",
			}
			if got != want {
				t.Errorf("restart %d: rank %d has %+v, want %+v", n, rank, got, want)
			}
		}
		ports[seats[0].port] = true
		if n < restarts {
			i := slices.IndexFunc(group, func(l life) bool { return l.Rank == n%4 })
			s.killWorker(group[i])
		}
	}
	t.Logf("master ports %v", slices.Sorted(maps.Keys(ports)))
	if ports[fmt.Sprint(endpointPort)] || ports[""] {
		t.Errorf("master ports %v", ports)
	}
	if v := s.ends(s.ctx, t, s.a, s.b, s.c); v.Attempts != restarts+1 {
		t.Errorf("%d attempts", v.Attempts)
	}
}

// One agent more than the most that a group takes waits without a worker, and is no error.
// When a node goes, it trains in its place.
func TestOneAgentTooMany(t *testing.T) {
	t.Parallel()
	s := withSpare(t, twoWithin(firm))
	before := s.seats()
	s.group(0, 60)
	if n := s.workers("c"); n != 0 || s.c.gone() {
		t.Errorf("the agent too many has %d workers, ended: %v", n, s.c.gone())
	}
	check(t, s.b.kill())
	s.on(s.group(1, 12), "a", "c")
	after := s.seats()
	if len(before) != 4 || len(after) != 4 {
		t.Fatalf("%+v, then %+v", before, after)
	}
	for rank, was := range before {
		// The restart counts against --max-infra-restarts, not --max-restarts.
		was.attempt, was.restart, was.port = "2", "0", after[0].port
		if was.host == "b" {
			was.host = "c"
		}
		if after[rank] != was {
			t.Errorf("rank %d has %+v, want %+v", rank, after[rank], was)
		}
	}
	s.ends(s.ctx, t, s.a, s.c)
}

// The machine of a spare is drained: it leaves, and the group continues.
func TestSparePreempted(t *testing.T) {
	t.Parallel()
	s := withSpare(t, twoWithin(calm))
	check(t, unix.Kill(s.c.Process.Pid, unix.SIGTERM))
	if code := must[int](t)(s.c.code(s.ctx)); code != 75 || !strings.Contains(s.c.log.String(), "this node had no ranks and has left the job") {
		t.Errorf("the spare exits with %d", code)
	}
	s.group(0, 60)
	if v := s.ends(s.ctx, t, s.a, s.b); v.Attempts != 1 {
		t.Errorf("%d attempts", v.Attempts)
	}
}
