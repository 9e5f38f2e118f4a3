//go:build testbed || outlive

package main

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/natstest"
	"github.com/ckptstore/ckptstore/internal/testbed/netfs"
)

// crashes is the number of leaders' hosts that lose their power: MANYNODES_CRASHES.
func crashes(t *testing.T) int {
	t.Helper()
	text := os.Getenv("MANYNODES_CRASHES")
	if text == "" {
		return 10
	}
	return must[int](t)(strconv.Atoi(text))
}

// A log of three copies has more than one block of events, and a load appends to it while a job
// trains and saves. Again and again the host that leads the log loses its power, all of its
// processes at once, and is back after some seconds with its disk. No acknowledged event is lost or
// stored twice, no decision is accepted that has not seen the one before, and the job's group trains
// on: neither a rank nor the job ends.
func TestLeadersHostsCrash(t *testing.T) {
	t.Parallel()
	n := crashes(t)
	ctx, c := startFor(t, setting{nodes: []string{"a", "b", "c", "d", "e"}, disk: netfs.NFS()}, limit+time.Duration(n)*time.Minute)
	j := twoNodes()
	j.meet, j.timeout, j.worker = "d", usualTimeout, []string{"--every", "25", "--pace", "20ms"}
	s := &scene{t: t, ctx: ctx, cluster: c, job: j}
	servers := s.natsCluster("a", "b", "c")
	config := must[[]byte](t)(json.Marshal(loadConfig{URL: s.job.store, Dir: livesAt}))
	load := must[*trainer](t)(s.execute(ctx, s.node("d"), must[string](t)(os.Executable()), []string{loadVerb, string(config)}, nil))
	check(t, load.prints(ctx, "loaded"))
	s.a, s.b = s.launch("d"), s.launch("e")
	s.group(0, 60)

	seed := uint64(time.Now().UnixNano())    //nolint:gosec // any number
	random := rand.New(rand.NewPCG(seed, 0)) //nolint:gosec // for tests
	t.Logf("seed %d, %d crashes", seed, n)
	hosts := map[string]int{}
	var at []int64
	for range n {
		check(t, s.pass(time.Duration(random.IntN(1000))*time.Millisecond))
		led := s.leads(servers)
		name := servers[led].on.Name()
		hosts[name]++
		at = append(at, monotonic())
		check(t, s.node(name).PowerOff())
		must[int](t)(servers[led].code(ctx))
		check(t, s.pass(time.Second+time.Duration(random.IntN(8000))*time.Millisecond))
		check(t, s.node(name).PowerOn(ctx))
		servers[led] = s.again(servers[led])
		s.leads(servers) // whole again
		for _, p := range []*trainer{s.a, s.b, load} {
			if p.gone() {
				t.Fatalf("a process on %s has ended after %d crashes", p.on.Name(), len(at))
			}
		}
		must[int](t)(s.moves(ctx, 0, s.a, s.b))
	}
	check(t, os.WriteFile(filepath.Join(s.lives, loadOver), nil, 0o600))
	s.ended(load)
	check(t, s.finish())
	s.ended(s.a, s.b)

	var v logVerdict
	check(t, json.Unmarshal(must[[]byte](t)(os.ReadFile(filepath.Join(s.lives, loadFound))), &v))
	t.Logf("hosts %v; %d events in the log, %d acknowledged to the load, %d conflicts", hosts, v.Events, v.Acked, v.Conflicts)
	t.Logf("longest time without an acknowledgement in each crash: %s", gapsOf(at, v.At))
	if v.Lost+v.Twice+v.Unseen > 0 {
		t.Errorf("of the acknowledged events %d are lost, %d stored twice, %d decisions had not seen the one before", v.Lost, v.Twice, v.Unseen)
	}
	if v.Events <= loadEvents || v.Conflicts == 0 {
		t.Errorf("the load was none: %d events, %d conflicts", v.Events, v.Conflicts)
	}
	var saves []int64
	for _, l := range must[[]life](t)(readLives(s.lives, 0)) {
		if l.Attempt != 1 {
			t.Errorf("the group was restarted: rank %d of attempt %d", l.Rank, l.Attempt)
		}
		for _, line := range l.Lines {
			if l.Rank == 0 && line.What == whatSaved {
				saves = append(saves, line.At)
			}
		}
	}
	t.Logf("longest time between two commits of the job in each crash: %s (%d commits)", gapsOf(at, saves), len(saves))
	for _, server := range servers {
		check(t, unix.Kill(server.Process.Pid, unix.SIGKILL))
	}
}

// leads waits until one server leads the log and the two others have what it has, and returns the
// leader.
func (s *scene) leads(servers []*trainer) (leader int) {
	s.t.Helper()
	check(s.t, await(s.ctx, "a leader with two current followers", func() (bool, error) {
		leaders, current := 0, 0
		for i, server := range servers {
			lines := strings.Split(strings.TrimSpace(server.log.String()), "\n")
			switch lines[len(lines)-1] {
			case natstest.Leads:
				leader = i
				leaders++
			case natstest.Current:
				current++
			}
		}
		return leaders == 1 && current == 2, nil
	}))
	return leader
}

// gapsOf describes the longest time between two moments that follow each other and end between each fault and
// the next one.
func gapsOf(faults, moments []int64) string {
	moments = slices.Sorted(slices.Values(moments))
	var longest []time.Duration
	for i, from := range faults {
		until := int64(1 << 62)
		if i+1 < len(faults) {
			until = faults[i+1]
		}
		var most int64
		for k := 1; k < len(moments); k++ {
			if moments[k] > from && moments[k] <= until {
				most = max(most, moments[k]-moments[k-1])
			}
		}
		longest = append(longest, time.Duration(most))
	}
	slices.Sort(longest)
	at := func(part float64) time.Duration {
		return longest[int(part*float64(len(longest)-1)+0.5)].Round(time.Millisecond)
	}
	return fmt.Sprintf("p50 %v, p99 %v, most %v", at(0.5), at(0.99), at(1))
}
