package launch_test

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"
)

// By how much the memory may grow between two moments of a soak, in KiB. The log's
// server and the views are in the trainer's process here. The server has some blocks
// of 8 MiB at one time and none at another: its heap is left out of the trainer's,
// which is looked at between two saves and then stays the same to 0.2 MiB. What the
// process has of the machine may go up by a few blocks.
const (
	soakWorkerKiB  = 2 << 10
	soakWarmingKiB = 64 << 10
	soakTrainerKiB = 48 << 10
	soakHeapKiB    = 1 << 10
)

// soakHeapRate is one sample in so many bytes: 10 MiB are known to 0.2 MiB.
const soakHeapRate = 4096

// soakAt are the saves after which a soak is looked at.
var soakAt = []int{10, 100, 200}

// sampleOf is what trainer and worker have of this machine.
type sampleOf struct {
	save                       int
	heapKiB, logKiB            int // of the trainer, and of the log's server in it
	trainerKiB, trainerFDs     int
	workerKiB, workerFDs, maps int
	files                      int // in shared memory
	bytes                      int64
}

// grown lists what a sample has too much of, compared with an earlier one, where
// the trainer may have so many KiB.
func (s sampleOf) grown(from sampleOf, trainerKiB int64) error {
	var errs []error
	check := func(what string, was, is, more int64) {
		if is > was+more {
			errs = append(errs, fmt.Errorf("%s: %d after save %d, %d after save %d, and %d more are tolerated", what, was, from.save, is, s.save, more))
		}
	}
	check("heap of the trainer in KiB", int64(from.heapKiB), int64(s.heapKiB), soakHeapKiB)
	check("memory of the trainer in KiB", int64(from.trainerKiB), int64(s.trainerKiB), trainerKiB)
	check("memory of the worker in KiB", int64(from.workerKiB), int64(s.workerKiB), soakWorkerKiB)
	// The store opens and closes files as it likes.
	check("descriptors of the trainer", int64(from.trainerFDs), int64(s.trainerFDs), 8)
	check("descriptors of the worker", int64(from.workerFDs), int64(s.workerFDs), 3) // idle connections
	check("maps of the worker", int64(from.maps), int64(s.maps), 0)
	check("files in shared memory", int64(from.files), int64(s.files), 0)
	check("bytes in shared memory", from.bytes, s.bytes, 0)
	return errors.Join(errs...)
}

// BenchmarkSoak saves 3,500 tensors 200 times, and fails when memory,
// descriptors or shared memory of trainer or worker grow. It prints what they
// have.
func BenchmarkSoak(b *testing.B) {
	for b.Loop() {
		samples, err := soak(b, soakAt, 3500, 14_000_000)
		var table strings.Builder
		fmt.Fprintf(&table, "%6s %9s %9s %12s %11s %12s %11s %11s %9s %13s\n", "save", "heap KiB", "log KiB", "trainer KiB", "trainer fds", "worker KiB", "worker fds", "worker maps", "shm files", "shm bytes")
		for _, s := range samples {
			fmt.Fprintf(&table, "%6d %9d %9d %12d %11d %12d %11d %11d %9d %13d\n", s.save, s.heapKiB, s.logKiB, s.trainerKiB, s.trainerFDs, s.workerKiB, s.workerFDs, s.maps, s.files, s.bytes)
		}
		b.Logf("\n%s", &table)
		if err != nil {
			b.Fatalf("it does not stay flat: %v", err)
		}
		last := samples[len(samples)-1]
		b.ReportMetric(float64(last.trainerKiB-samples[0].trainerKiB), "KiB-trainer-grew")
		b.ReportMetric(float64(last.workerKiB-samples[0].workerKiB), "KiB-worker-grew")
	}
}

// soak saves so many tensors of together so many bytes, up to the last of the
// moments, and looks at each of them.
func soak(tb testing.TB, moments []int, tensors, bytes int) (samples []sampleOf, err error) {
	tb.Helper()
	out, shown := newTranscript(), 0
	defer func(rate int) { runtime.MemProfileRate = rate }(runtime.MemProfileRate)
	runtime.MemProfileRate = soakHeapRate
	rests := tb.TempDir()
	for _, n := range moments {
		if err := os.WriteFile(filepath.Join(rests, fmt.Sprint(n)), nil, 0o600); err != nil {
			tb.Fatal(err)
		}
	}
	run := fmt.Sprint("soak ", time.Now().UnixNano())
	last := moments[len(moments)-1] + 10 // what is looked at is not the end of the job
	cfg := config(run, 1, append(slices.Clone(blocks), fmt.Sprint(tensors), fmt.Sprint(bytes), fmt.Sprint(last), rests), out, newTranscript())
	done := make(chan error, 1)
	go func() { done <- runJobIn(tb, cfg) }()
	for ended := false; !ended; {
		more := out.next()
		for _, line := range out.lines("used ")[shown:] {
			if shown++; slices.Contains(moments, shown) {
				s, serr := look(tb, run, shown, line)
				samples, err = append(samples, s), errors.Join(err, serr, os.Remove(filepath.Join(rests, fmt.Sprint(shown))))
			}
		}
		select {
		case jerr := <-done:
			if ended = true; jerr != nil {
				tb.Fatalf("%v\n%s", jerr, out)
			}
		case <-more:
		}
	}
	if len(samples) != len(moments) {
		tb.Fatalf("%d samples, want %d", len(samples), len(moments))
	}
	err = errors.Join(err, samples[1].grown(samples[0], soakWarmingKiB))
	for _, s := range samples[2:] {
		err = errors.Join(err, s.grown(samples[1], soakTrainerKiB))
	}
	return samples, err
}

// look takes a sample; the worker's part is as printed by the worker.
func look(tb testing.TB, run string, save int, worker string) (sampleOf, error) {
	tb.Helper()
	for range 2 { // pools keep what they have for one collection, and the profile is as old as two
		runtime.GC()
	}
	debug.FreeOSMemory()
	s := sampleOf{save: save}
	s.heapKiB, s.logKiB = heapOf()
	ignored := 0
	_, err := fmt.Sscan(worker, &s.workerKiB, &s.workerFDs, &s.maps)
	_, terr := fmt.Sscan(used(run), &s.trainerKiB, &s.trainerFDs, &ignored)
	s.files, s.bytes = inMemory(tb, run)
	return s, errors.Join(err, terr)
}

// heapOf is what is in use of the heap, in KiB, and apart from it what the log's
// server has.
func heapOf() (own, server int) {
	records := make([]runtime.MemProfileRecord, 1<<10)
	for {
		n, ok := runtime.MemProfile(records, false)
		if ok {
			records = records[:n]
			break
		}
		records = make([]runtime.MemProfileRecord, n+n/4)
	}
	var bytes [2]float64
	for _, r := range records {
		of, frames := 0, runtime.CallersFrames(r.Stack())
		for more := true; more; {
			var f runtime.Frame
			if f, more = frames.Next(); strings.HasPrefix(f.Function, "github.com/nats-io/nats-server/") {
				of = 1
			}
		}
		// As package runtime/pprof does: the larger, the more likely to be sampled.
		size := float64(r.InUseBytes()) / float64(r.InUseObjects())
		bytes[of] += float64(r.InUseBytes()) / (1 - math.Exp(-size/soakHeapRate))
	}
	return int(bytes[0]) >> 10, int(bytes[1]) >> 10
}

// A soak sees what grows.
func TestSoakSeesGrowth(t *testing.T) {
	flat := sampleOf{save: 10, trainerKiB: 100_000, trainerFDs: 50, workerKiB: 50_000, workerFDs: 8, maps: 2, files: 2, bytes: 1 << 20}
	if err := flat.grown(flat, soakTrainerKiB); err != nil {
		t.Error(err)
	}
	for what, change := range map[string]func(*sampleOf){
		"heap of the trainer":        func(s *sampleOf) { s.heapKiB += soakHeapKiB + 1 },
		"memory of the trainer":      func(s *sampleOf) { s.trainerKiB += soakTrainerKiB + 1 },
		"memory of the worker":       func(s *sampleOf) { s.workerKiB += soakWorkerKiB + 1 },
		"descriptors of the trainer": func(s *sampleOf) { s.trainerFDs += 9 },
		"descriptors of the worker":  func(s *sampleOf) { s.workerFDs += 4 },
		"maps of the worker":         func(s *sampleOf) { s.maps++ },
		"files in shared memory":     func(s *sampleOf) { s.files++ },
		"bytes in shared memory":     func(s *sampleOf) { s.bytes++ },
	} {
		later := flat
		later.save = 100
		change(&later)
		if err := later.grown(flat, soakTrainerKiB); err == nil || !strings.HasPrefix(err.Error(), what) {
			t.Errorf("%s: %v", what, err)
		}
	}
}
