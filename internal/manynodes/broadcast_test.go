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
	const nodes, bytes, rate = 8, 128 << 20, 48 << 20
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
