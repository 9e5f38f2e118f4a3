package viewdb_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/projections/viewdb"
)

// training returns a log of so many checkpoints, with ten reports between two.
func training(checkpoints int) []events.Recorded {
	log := []events.Recorded{event(1, lane, events.GroupStarted{Attempt: 1, WorldSize: 1})}
	add := func(scope events.Scope, body events.Body) {
		log = append(log, event(uint64(len(log)+1), scope, body))
	}
	rank := events.Scope{Run: lane.Run, Trial: lane.Trial, Actor: events.Rank(0)}
	for i := range checkpoints {
		for j := range 10 {
			step := 10*i + j + 1
			add(rank, events.Metrics{
				Attempt: 1, Iteration: step, Step: int64(step), Seconds: 0.25,
				Metrics: map[string]any{"loss": 1 / float64(step), "lr": 0.001, "grad_norm": 1.5},
			})
		}
		name := fmt.Sprintf("step-%d", 10*(i+1))
		add(lane, events.CheckpointBegun{Attempt: 1, Checkpoint: name + ".a1", Name: name, Step: int64(10 * (i + 1)), WorldSize: 1, Participants: []int{0}})
		add(rank, events.WriteSealed{Attempt: 1, Checkpoint: name + ".a1", Bytes: 1 << 30})
		add(lane, events.CheckpointStaged{Attempt: 1, Checkpoint: name + ".a1"})
		add(rank, events.WriteCompleted{Attempt: 1, Checkpoint: name + ".a1", IndexDigest: "d", BytesWritten: 1 << 30})
		add(lane, events.CheckpointCommitted{Attempt: 1, Checkpoint: name + ".a1", Manifest: "m", Bytes: 1 << 30})
	}
	return log
}

func BenchmarkReplay(b *testing.B) {
	log := training(1000)
	src := newLog(log...)
	for b.Loop() {
		if _, err := viewdb.Replay(b.Context(), src, 0); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(len(log)*b.N)/b.Elapsed().Seconds(), "events/s")
}

func BenchmarkRebuild(b *testing.B) {
	log := training(1000)
	src := newLog(log...)
	for b.Loop() {
		db, err := viewdb.Open(b.TempDir(), viewdb.Options{Store: storeID})
		if err != nil {
			b.Fatal(err)
		}
		if err := db.CatchUp(b.Context(), src); err != nil {
			b.Fatal(err)
		}
		if err := db.Close(); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(len(log)*b.N)/b.Elapsed().Seconds(), "events/s")
}

// silent returns a log of so many checkpoints of a run that never reports, for example
// because it only calls a framework's save.
func silent(checkpoints int) []events.Recorded {
	log := []events.Recorded{event(1, lane, events.GroupStarted{Attempt: 1, WorldSize: 1})}
	rank := events.Scope{Run: lane.Run, Trial: lane.Trial, Actor: events.Rank(0)}
	for i := range checkpoints {
		name := fmt.Sprintf("step-%d", i+1)
		for _, e := range []struct {
			scope events.Scope
			body  events.Body
		}{
			{lane, events.CheckpointBegun{Attempt: 1, Checkpoint: name + ".a1", Name: name, Step: int64(i + 1), WorldSize: 1, Participants: []int{0}}},
			{rank, events.WriteSealed{Attempt: 1, Checkpoint: name + ".a1", Bytes: 1 << 30}},
			{lane, events.CheckpointStaged{Attempt: 1, Checkpoint: name + ".a1"}},
			{rank, events.WriteCompleted{Attempt: 1, Checkpoint: name + ".a1", IndexDigest: "d", BytesWritten: 1 << 30}},
			{lane, events.CheckpointCommitted{Attempt: 1, Checkpoint: name + ".a1", Manifest: "m", Bytes: 1 << 30}},
		} {
			log = append(log, event(uint64(len(log)+1), e.scope, e.body))
		}
	}
	return log
}

// cpu returns the processor time that this process has used.
func cpu(b *testing.B) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// epochs returns a log of so many checkpoints whose steps are epochs, with ten reports between
// two whose steps are batches.
func epochs(checkpoints int) []events.Recorded {
	return stepped(training(checkpoints), func(int64) int64 { return 0 }, nil)
}

// ahead returns a log like that of epochs, with reports whose steps are epochs and saves whose
// steps are batches: no report reaches the step of a save.
func ahead(checkpoints int) []events.Recorded {
	return stepped(training(checkpoints), func(step int64) int64 { return 1e9 + step }, nil)
}

// one returns a log of so many checkpoints within one epoch, which is the step of all.
func one(checkpoints int) []events.Recorded {
	zero := func(int64) int64 { return 0 }
	return stepped(training(checkpoints), zero, zero)
}

// stepped changes the steps of the saves and the reports of a log.
func stepped(log []events.Recorded, save, report func(step int64) int64) []events.Recorded {
	change := func(r events.Recorded, body events.Body, step *int64, to func(int64) int64, out func() events.Body) events.Recorded {
		if err := json.Unmarshal(r.Data, body); err != nil {
			panic(err)
		}
		*step = to(*step)
		return event(r.Sequence, r.Scope, out())
	}
	for i, r := range log {
		switch {
		case r.Kind == (events.CheckpointBegun{}).Kind():
			var b events.CheckpointBegun
			log[i] = change(r, &b, &b.Step, save, func() events.Body { return b })
		case report != nil && r.Kind == (events.Metrics{}).Kind():
			var b events.Metrics
			log[i] = change(r, &b, &b.Step, report, func() events.Body { return b })
		}
	}
	return log
}

// BenchmarkSaves folds saves with ten reports between two, saves of a run that never reports,
// and saves whose steps are smaller than those of reports, greater, or equal, in memory
// and in a database. Events per CPU second must not fall with the number of saves.
func BenchmarkSaves(b *testing.B) {
	for _, run := range []struct {
		name string
		log  func(saves int) []events.Recorded
	}{{"reports", training}, {"silent", silent}, {"epochs", epochs}, {"ahead", ahead}, {"one", one}} {
		for _, saves := range []int{1000, 4000, 16_000} {
			log := run.log(saves)
			src := newLog(log...)
			measure := func(in string, fold func(*testing.B)) {
				b.Run(fmt.Sprintf("%s/%s/saves=%d", run.name, in, saves), func(b *testing.B) {
					runtime.GC()
					begin, rounds := cpu(b), 0
					for b.Loop() {
						fold(b)
						rounds++
					}
					b.ReportMetric(float64(len(log)*rounds)/(cpu(b)-begin).Seconds(), "events/cpu-s")
				})
			}
			measure("memory", func(b *testing.B) {
				if _, err := viewdb.Replay(b.Context(), src, 0); err != nil {
					b.Fatal(err)
				}
			})
			measure("database", func(b *testing.B) {
				db, err := viewdb.Open(b.TempDir(), viewdb.Options{Store: storeID})
				if err != nil {
					b.Fatal(err)
				}
				if err := errors.Join(db.CatchUp(b.Context(), src), db.Close()); err != nil {
					b.Fatal(err)
				}
			})
		}
	}
}

func BenchmarkQueries(b *testing.B) {
	db, err := viewdb.Open("views", viewdb.Options{FS: vfs.NewMem(), Store: storeID})
	if err != nil {
		b.Fatal(err)
	}
	defer shut(b, db)
	if err := db.CatchUp(b.Context(), newLog(training(10_000)...)); err != nil {
		b.Fatal(err)
	}
	for _, q := range []struct {
		name string
		ask  func(projections.Reader) error
	}{
		{"list", func(r projections.Reader) error { _, err := projections.Checkpoints(r, "demo", false); return err }},
		{"id", func(r projections.Reader) error { _, err := projections.Resolve(r, "demo@step-50000.a1"); return err }},
		{"name", func(r projections.Reader) error { _, err := projections.Resolve(r, "demo@step-50000"); return err }},
		{"latest", func(r projections.Reader) error { _, err := projections.Resolve(r, "demo"); return err }},
		{"trial", func(r projections.Reader) error { _, err := projections.GetTrial(r, "demo", "main"); return err }},
		{"best", func(r projections.Reader) error { _, err := projections.Resolve(r, "demo@best:loss:min"); return err }},
	} {
		b.Run(q.name, func(b *testing.B) {
			for b.Loop() {
				if err := db.View(q.ask); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// reporting returns a log of so many reports of five metrics in four attempts, each of which
// goes back a hundredth of the reports.
func reporting(reports int) []events.Recorded {
	log := []events.Recorded{event(1, lane, events.GroupStarted{Attempt: 1, WorldSize: 1})}
	add := func(scope events.Scope, body events.Body) {
		log = append(log, event(uint64(len(log)+1), scope, body))
	}
	rank := events.Scope{Run: lane.Run, Trial: lane.Trial, Actor: events.Rank(0)}
	step, resume := 0, ""
	for attempt := 1; attempt <= 4; attempt++ {
		if attempt > 1 {
			step -= reports / 100
			add(lane, events.GroupStarted{Attempt: attempt, WorldSize: 1, Resume: resume})
		}
		for i := range reports / 4 {
			step++
			x := float64(step)
			add(rank, events.Metrics{
				Attempt: attempt, Iteration: i + 1, Step: int64(step), Seconds: 0.25,
				Metrics: map[string]any{"loss": 1 / x, "lr": 1e-3 / x, "grad_norm": 1.5 + 1/x, "tokens": x * 4096, "accuracy": 1 - 1/x},
			})
			if i == reports/4-reports/100-1 {
				resume = fmt.Sprintf("step-%d.a%d", step, attempt)
				add(lane, events.CheckpointBegun{Attempt: attempt, Checkpoint: resume, Name: fmt.Sprintf("step-%d", step), Step: int64(step), WorldSize: 1})
				add(lane, events.CheckpointCommitted{Attempt: attempt, Checkpoint: resume, Manifest: "m"})
			}
		}
	}
	return log
}

// BenchmarkPoints answers the queries of a chart over a million reports.
func BenchmarkPoints(b *testing.B) {
	db, err := viewdb.Open(b.TempDir(), viewdb.Options{Store: storeID})
	if err != nil {
		b.Fatal(err)
	}
	defer shut(b, db)
	if err := db.CatchUp(b.Context(), newLog(reporting(1_000_000)...)); err != nil {
		b.Fatal(err)
	}
	one, five := []string{"loss"}, []string(nil)
	for _, q := range []struct {
		name  string
		names []string
		from  int
		until int
		all   bool
	}{
		{"one", one, 0, 0, false},
		{"one/all", one, 0, 0, true},
		{"five", five, 0, 0, false},
		{"window=300000", one, 200_000, 500_000, false},
		{"window=100000", one, 200_000, 300_000, false},
		{"window=12000", one, 200_000, 212_000, false},
		{"window=10000", one, 200_000, 210_000, false},
		{"window=5000", one, 200_000, 205_000, false},
		{"window=1000", one, 200_000, 201_000, false},
	} {
		b.Run(q.name, func(b *testing.B) {
			var took []time.Duration
			points, begin := 0, cpu(b)
			for b.Loop() {
				began := time.Now()
				err := db.View(func(r projections.Reader) error {
					t, err := projections.Points(r, projections.PointsRange{Run: "demo", Trial: "main", Names: q.names, From: q.from, Until: q.until, Points: 800, All: q.all})
					if err == nil {
						points = len(t.Lines[0].Metrics["loss"].X)
					}
					return err
				})
				if err != nil {
					b.Fatal(err)
				}
				took = append(took, time.Since(began))
			}
			slices.Sort(took)
			b.ReportMetric(float64((cpu(b)-begin).Microseconds())/1000/float64(len(took)), "cpu-ms/op")
			b.ReportMetric(float64(took[len(took)*99/100].Microseconds())/1000, "p99-ms")
			b.ReportMetric(float64(points), "points")
		})
	}
}
