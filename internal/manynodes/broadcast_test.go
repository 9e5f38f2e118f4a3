//go:build testbed || outlive

package main

import (
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/testbed/netfs"
)

// bulkJob is a job of so many nodes with a rank each, which has so many bytes.
func bulkJob(t *testing.T, nodes int, bytes int64, more ...string) job {
	t.Helper()
	self := must[string](t)(os.Executable())
	return job{
		nnodes: fmt.Sprint(nodes), nproc: 1, timeout: 10 * time.Second, more: more,
		command: []string{self, bulkVerb, "--lives", livesAt, "--bytes", fmt.Sprint(bytes)},
	}
}

// bulkScene is a cluster whose store has a checkpoint of so many bytes.
func bulkScene(t *testing.T, nodes int, bytes int64) *scene {
	t.Helper()
	var names []string
	for i := range nodes {
		names = append(names, string(rune('a'+i)))
	}
	ctx, c := start(t, setting{nodes: names, disk: netfs.NFS(), shm: 4 * bytes})
	s := &scene{t: t, ctx: ctx, cluster: c, job: bulkJob(t, 1, bytes)}
	s.a = s.launch("a")
	if code := must[int](t)(s.a.code(ctx)); code != 0 {
		t.Fatalf("the job that saves exits with %d", code)
	}
	return s
}

// restart switches all nodes off and on: their kernels have none of the files' pages then.
func (s *scene) restart() {
	s.t.Helper()
	for _, m := range s.nodes {
		check(s.t, m.PowerOff())
		check(s.t, m.PowerOn(s.ctx))
	}
}

// bulkLoad is what a job of loads did.
type bulkLoad struct {
	read  int64   // bytes that all nodes have read from the disk
	took  float64 // seconds of the slowest load
	from  map[string]int64
	event event // restore.completed
}

// loads runs a job on the first nodes, each of which loads what was saved. during is called while
// it runs.
func (s *scene) loads(nodes int, bytes int64, during func(), more ...string) (out bulkLoad) {
	s.t.Helper()
	s.restart()
	before := map[string]int64{}
	read := func(name string) int64 { return s.node(name).Disk(sharedAt).Counters().BytesRead }
	for _, name := range s.names() {
		before[name] = read(name)
	}
	lives := must[[]life](s.t)(readLives(s.lives, 0))
	s.job = bulkJob(s.t, nodes, bytes, more...)
	var trainers []*trainer
	for _, name := range s.names()[:nodes] {
		trainers = append(trainers, s.launch(name))
	}
	if during != nil {
		during()
	}
	for _, tr := range trainers {
		if code := must[int](s.t)(tr.code(s.ctx)); code != 0 {
			s.t.Errorf("the trainer on %s exits with %d", tr.on.Name(), code)
		}
	}
	out.from = map[string]int64{}
	for _, name := range s.names() {
		out.from[name] = read(name) - before[name]
		out.read += out.from[name]
	}
	now := must[[]life](s.t)(readLives(s.lives, 0))
	loaded := 0
	for _, l := range now {
		if slices.ContainsFunc(lives, func(old life) bool { return old.identity == l.identity }) {
			continue
		}
		for _, line := range l.Lines {
			if line.What == whatLoaded {
				out.took = max(out.took, line.Took)
				loaded++
			}
		}
	}
	if loaded != nodes {
		s.t.Errorf("%d ranks have loaded every byte, want %d", loaded, nodes)
	}
	all := must[[]event](s.t)(s.eventsFrom("a"))
	done := of(all, "restore.completed")
	if len(done) == 0 {
		s.t.Fatal("no load is complete")
	}
	out.event = done[len(done)-1]
	return out
}

// Eight nodes want the same tensors. All of them together read each byte from the storage once,
// and pass it on. The disk counts.
func TestBroadcast(t *testing.T) {
	const nodes, bytes, rate = 8, 96 << 20, 16 << 20
	s := bulkScene(t, nodes, bytes)
	s.disk.Throttle(rate)
	one := s.loads(1, bytes, nil)
	alone := s.loads(2, bytes, nil, "--broadcast=false")
	all := s.loads(nodes, bytes, nil)
	unique := one.event.Data.Wanted
	t.Logf("%d bytes, storage with %d bytes in a second\n1 node: %d bytes read in %.2f s\n2 nodes, each for itself: %d bytes in %.2f s\n%d nodes: %d bytes (%.3f x) in %.2f s (%.2f x), %d passed on",
		unique, rate, one.read, one.took, alone.read, alone.took, nodes, all.read, float64(all.read)/float64(unique), all.took, all.took/one.took, all.event.Data.Passed)
	if float64(all.read) > 1.05*float64(unique) {
		t.Errorf("%d nodes read %d bytes, want at most 1.05 x %d; %v", nodes, all.read, unique, all.from)
	}
	if alone.event.Data.Passed != 0 || float64(alone.read) < 1.9*float64(unique) {
		t.Errorf("without --broadcast, two nodes read %d bytes, and %d were passed on", alone.read, alone.event.Data.Passed)
	}
	// Each node gets from others what it has not read.
	if passed := all.event.Data.Passed; float64(passed) < 0.98*float64((nodes-1)*unique) {
		t.Errorf("%d bytes were passed on, want %d", passed, (nodes-1)*unique)
	}
}

// midLoad starts a job of so many nodes that loads, of which c reads and passes on a part, and
// returns when c has read some of it.
func (s *scene) midLoad(nodes int, bytes int64, timeout time.Duration) (trainers []*trainer) {
	s.t.Helper()
	s.disk.Throttle(4 << 20)
	s.restart()
	s.job = bulkJob(s.t, nodes, bytes)
	s.job.timeout = timeout
	for _, name := range s.names()[:nodes] {
		trainers = append(trainers, s.launch(name))
	}
	disk := s.node("c").Disk(sharedAt)
	check(s.t, await(s.ctx, "the reads of c", func() (bool, error) { return disk.Counters().BytesRead > 2<<20, nil }))
	return trainers
}

// A node that reads for the others is stopped, or its disk is silent, in the middle of a load. The
// others read the rest from the files after some seconds. The load is complete when the node is
// back, in the same attempt, and every rank has every byte.
func TestBroadcastWithoutPassing(t *testing.T) {
	const nodes, bytes = 4, 32 << 20
	for name, fault := range map[string]struct {
		begin func(t *testing.T, s *scene, c *trainer)
		end   func(t *testing.T, s *scene, c *trainer)
	}{
		"stopped": {
			func(t *testing.T, _ *scene, c *trainer) { check(t, c.pause()) },
			func(t *testing.T, _ *scene, c *trainer) { check(t, c.resume()) },
		},
		"frozen": {
			func(t *testing.T, s *scene, _ *trainer) { check(t, s.node("c").Freeze()) },
			func(t *testing.T, s *scene, _ *trainer) { check(t, s.node("c").Thaw()) },
		},
		"cut off from another node": {
			func(_ *testing.T, s *scene, _ *trainer) { s.bed.Switch().Cut("c", "b") },
			func(_ *testing.T, s *scene, _ *trainer) { s.bed.Switch().Heal("c", "b") },
		},
		"silent disk": {
			func(_ *testing.T, s *scene, _ *trainer) {
				s.node("c").Disk(sharedAt).Break(netfs.Fault{Ops: []netfs.Op{netfs.OpRead}, Hang: true})
			},
			func(_ *testing.T, s *scene, _ *trainer) { s.node("c").Disk(sharedAt).Heal() },
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := bulkScene(t, nodes, bytes)
			trainers := s.midLoad(nodes, bytes, time.Minute) // the fault is shorter
			fault.begin(t, s, trainers[2])
			const text = "blocks of a load not passed on by another node"
			if name == "cut off from another node" {
				check(t, trainers[1].prints(s.ctx, text))
				check(t, trainers[2].prints(s.ctx, text))
			} else {
				for _, at := range []int{0, 1, 3} {
					check(t, trainers[at].prints(s.ctx, text))
				}
			}
			fault.end(t, s, trainers[2])
			for _, tr := range trainers {
				if code := must[int](t)(tr.code(s.ctx)); code != 0 {
					t.Errorf("the trainer on %s exits with %d", tr.on.Name(), code)
				}
			}
			all := must[[]event](t)(s.eventsFrom("a"))
			done := of(all, "restore.completed")
			if len(done) != 1 || len(of(all, "restore.failed")) > 0 || len(of(all, "group.started")) != 2 {
				t.Fatalf("the log has %d completed loads, %d failed ones and %d attempts", len(done), len(of(all, "restore.failed")), len(of(all, "group.started")))
			}
			if d := done[0].Data; d.Passed == 0 || d.Passed > (nodes-1)*d.Wanted/nodes {
				t.Errorf("%d bytes were passed on of %d", d.Passed, d.Wanted)
			}
		})
	}
}

// A node that reads for the others loses its power in the middle of a load. The group that follows
// has a spare in its place, and loads every byte.
func TestBroadcastPowerOff(t *testing.T) {
	t.Parallel()
	const nodes, bytes = 4, 32 << 20
	s := bulkScene(t, nodes, bytes)
	trainers := s.midLoad(nodes-1, bytes, firm)
	check(t, s.node("c").PowerOff())
	trainers = append(trainers[:2], s.launch("d"))
	for _, tr := range trainers {
		if code := must[int](t)(tr.code(s.ctx)); code != 0 {
			t.Errorf("the trainer on %s exits with %d", tr.on.Name(), code)
		}
	}
	all := must[[]event](t)(s.eventsFrom("a"))
	if done := of(all, "restore.completed"); len(done) != 1 || done[0].Data.Passed == 0 {
		t.Errorf("%+v", done)
	}
}
