package observe

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"github.com/prometheus/common/expfmt"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/natstest"
	"github.com/ckptstore/ckptstore/internal/otlp"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/internal/store/space"
	"github.com/ckptstore/ckptstore/projections"
)

var update = flag.Bool("update", false, "rewrite docs/reference/metrics.md")

func TestMain(m *testing.M) { natstest.Main(m) }

// scene is a store with a clock for its events.
type scene struct {
	t     *testing.T
	store *store.Store
	now   time.Time
	ends  map[string]uint64 // of lanes, by run
}

// begin is when the first event of a scene happens.
func newScene(t *testing.T, begin time.Time) *scene {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "s")
	if _, err := store.Init(t.Context(), dir, ""); err != nil {
		t.Fatal(err)
	}
	s, err := store.Open(t.Context(), store.Options{Location: dir})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return &scene{t: t, store: s, now: begin, ends: map[string]uint64{}}
}

// add appends events of a run's job, a second after one another.
func (s *scene) add(run, job string, bodies ...events.Body) {
	s.t.Helper()
	for _, b := range bodies {
		s.now = s.now.Add(time.Second)
		stamp := events.Stamp{ID: store.NewID(), Source: "trainer/" + job, Time: s.now}
		if b.Kind().Decides() {
			d, err := events.NewDecision(stamp, events.Aggregate{Run: run, Trial: projections.DefaultTrial}, b)
			if err == nil {
				s.ends[run], err = s.store.Log.Decide(s.t.Context(), d, s.ends[run])
			}
			if err != nil {
				s.t.Fatal(err)
			}
			continue
		}
		scope := events.Scope{Run: run, Trial: projections.DefaultTrial, Actor: events.Node(0)}
		if b.Kind().Family() == "job" {
			scope.Trial = events.None
		}
		f, err := events.NewFact(stamp, scope, b)
		if err == nil {
			_, err = s.store.Log.Append(s.t.Context(), f)
		}
		if err != nil {
			s.t.Fatal(err)
		}
	}
}

// story appends a run with two attempts, saves, a load and a GPU that failed; the run's second
// job is left running.
func (s *scene) story(run string) (job string) {
	s.t.Helper()
	first, second := store.NewID(), store.NewID()
	s.add(
		run, first,
		&events.JobStarted{Job: first, Host: "here", PID: 1, NProc: 1, NNodes: 1},
		&events.GroupStarted{Attempt: 1, Job: first, WorldSize: 1, Ranks: []events.RankPlacement{{}}},
		&events.TrainingStarted{Attempt: 1},
		&events.Metrics{Attempt: 1, Iteration: 1, Step: 10},
		&events.CheckpointBegun{Attempt: 1, Checkpoint: "step-10.a1", Name: "step-10", Step: 10, WorldSize: 1},
		&events.WriteSealed{Attempt: 1, Checkpoint: "step-10.a1", Waited: seconds(0.25), Copied: seconds(0.75)},
		&events.CheckpointStaged{Attempt: 1, Checkpoint: "step-10.a1"},
		&events.WriteCompleted{Attempt: 1, Checkpoint: "step-10.a1", BytesWritten: 70, BytesReused: 30, Write: seconds(1)},
		&events.CheckpointCommitted{Attempt: 1, Checkpoint: "step-10.a1", Manifest: "m", Bytes: 100},
		&events.CheckpointBegun{Attempt: 1, Checkpoint: "step-20.a1", Name: "step-20", Step: 20, WorldSize: 1},
		&events.CheckpointAborted{Attempt: 1, Checkpoint: "step-20.a1", Reason: "no room"},
		&events.WorkerExited{Attempt: 1, Signal: "SIGKILL"},
		&events.GPUUnhealthy{Device: "GPU-1", Reason: "Xid 79"},
		&events.GroupStopped{Attempt: 1, Failure: "worker"},
		&events.JobEnded{Job: first, ExitCode: 1},
	)
	s.add(
		run, second,
		&events.JobStarted{Job: second, Host: "here", PID: 1, NProc: 1, NNodes: 1},
		&events.GroupStarted{Attempt: 2, Job: second, WorldSize: 1, Ranks: []events.RankPlacement{{}}, Resume: "step-10.a1"},
		&events.TrainingStarted{Attempt: 2},
		&events.RestoreBegun{Attempt: 2, Load: 1, Checkpoint: "step-10.a1", WorldSize: 1},
		&events.RestoreCompleted{Attempt: 2, Load: 1, Checkpoint: "step-10.a1", Tier: "slots+files"},
		&events.CheckpointBegun{Attempt: 2, Checkpoint: "step-15.a2", Name: "step-15", Step: 15, WorldSize: 1},
		&events.CheckpointCommitted{Attempt: 2, Checkpoint: "step-15.a2", Manifest: "m"},
		&events.CheckpointBegun{Attempt: 2, Checkpoint: "step-20.a2", Name: "step-20", Step: 20, WorldSize: 1},
		&events.WriteSealed{Attempt: 2, Checkpoint: "step-20.a2", Copied: seconds(0)},
		&events.CheckpointCommitted{Attempt: 2, Checkpoint: "step-20.a2", Manifest: "m", Bytes: 100},
		&events.CheckpointBegun{Attempt: 2, Checkpoint: "step-30.a2", Name: "step-30", Step: 30, WorldSize: 1},
		&events.Metrics{Attempt: 2, Iteration: 1, Step: 34},
	)
	return second
}

// tracer returns a tracer whose collector is down.
func (s *scene) tracer() *otlp.Tracer {
	s.t.Helper()
	c, err := otlp.FromEnvironment(func(name string) string {
		if name == "OTEL_EXPORTER_OTLP_ENDPOINT" {
			return "http://127.0.0.1:1"
		}
		return ""
	})
	if err != nil {
		s.t.Fatal(err)
	}
	tracer := otlp.Start(s.t.Context(), s.store, c, otlp.Options{})
	s.t.Cleanup(tracer.Close)
	return tracer
}

func seconds(s float64) *float64 { return &s }

// get asks a handler.
func get(t *testing.T, h http.Handler, path, accept string) (status int, body string) {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil)
	r.Header.Set("Accept", accept)
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	text, err := io.ReadAll(w.Result().Body)
	if err != nil {
		t.Fatal(err)
	}
	return w.Code, string(text)
}

const openMetrics = "application/openmetrics-text; version=1.0.0"

// TestMetrics checks the values of a run with two attempts against its story, in both formats.
func TestMetrics(t *testing.T) {
	t.Parallel()
	begin := time.Now().Add(-10 * time.Minute).Truncate(time.Second)
	s := newScene(t, begin)
	job := s.story(`bert "x"`)
	_, release, err := s.store.HoldRun(t.Context(), `bert "x"`, job)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = release() }()
	if _, err := query.Ask(t.Context(), s.store.Views(), query.Devices, query.Params{}); err != nil { // the views have caught up
		t.Fatal(err)
	}
	h := Handler(s.store, Options{Version: "v1", Traces: s.tracer()})
	status, got := get(t, h, "/metrics", openMetrics)
	if status != http.StatusOK || !strings.HasSuffix(got, "# EOF\n") {
		t.Fatalf("%d\n%s", status, got)
	}
	values := strings.ReplaceAll(got, ".0\n", "\n") // a whole number may have a fraction in this format
	for _, want := range []string{
		`ckptstore_build_info{version="v1"} 1`,
		`ckptstore_store_info{store="` + s.store.ID + `"} 1`,
		`ckptstore_traces_sent_total 0`,
		`ckptstore_traces_waiting 0`,
		`ckptstore_traces_dropped_total{reason="full"} 0`,
		`ckptstore_traces_dropped_total{reason="unread"} 0`,
		`ckptstore_owner 1`,
		`ckptstore_log_last_sequence 28`,
		`ckptstore_views_lag_events 0`,
		`ckptstore_views_halted 0`,
		`ckptstore_scrub_findings 0`,
		`ckptstore_metrics_complete 1`,
		`ckptstore_metrics_runs_omitted 0`,
		`ckptstore_gpu_unhealthy{device="GPU-1",node="0"} 1`,
		`ckptstore_run_state{run="bert \"x\"",state="running"} 1`,
		`ckptstore_run_step{run="bert \"x\""} 34`,
		`ckptstore_run_commit_interval_seconds{run="bert \"x\""} 3`,
		`ckptstore_run_steps_at_risk{run="bert \"x\""} 14`,
		// Attempt 1 trains from its third second to the exit in the twelfth, and attempt 2 from the
		// eighteenth on: the first training up to the save of step 10 is kept, and that save held it up for
		// a second.
		`ckptstore_run_time_seconds{run="bert \"x\"",use="kept"} 10`,
		`ckptstore_run_time_seconds{run="bert \"x\"",use="lost"} 6`,
		`ckptstore_run_time_seconds{run="bert \"x\"",use="restoring"} 1`,
		`ckptstore_run_time_seconds{run="bert \"x\"",use="blocked"} 1`,
		`ckptstore_run_time_seconds{run="bert \"x\"",use="other"} 4`,
		`ckptstore_saves_total{result="committed",run="bert \"x\""} 3`,
		`ckptstore_saves_total{result="aborted",run="bert \"x\""} 1`,
		`ckptstore_saves_in_flight{run="bert \"x\""} 1`,
		`ckptstore_save_bytes_total{kind="written",run="bert \"x\""} 70`,
		`ckptstore_save_bytes_total{kind="reused",run="bert \"x\""} 30`,
		`ckptstore_save_duration_seconds_bucket{phase="total",run="bert \"x\"",le="2.0"} 2`,
		`ckptstore_save_duration_seconds_sum{phase="total",run="bert \"x\""} 7`,
		`ckptstore_save_duration_seconds_count{phase="staged",run="bert \"x\""} 1`,
		`ckptstore_save_duration_seconds_count{phase="blocked",run="bert \"x\""} 2`,
		`ckptstore_save_duration_seconds_sum{phase="blocked",run="bert \"x\""} 1`,
		`ckptstore_save_slowest_rank{run="bert \"x\""} 0`,
		`ckptstore_restores_total{result="completed",run="bert \"x\"",tier="slots+files"} 1`,
		`ckptstore_restores_total{result="failed",run="bert \"x\"",tier="none"} 0`,
		`ckptstore_restore_duration_seconds_sum{run="bert \"x\"",tier="slots+files"} 1`,
		`ckptstore_attempts_total{failure="worker",run="bert \"x\""} 1`,
		`ckptstore_attempts_total{failure="lost",run="bert \"x\""} 0`,
		`checkpoint="step-20.a2"`, `sequence="26"`, // the exemplar
	} {
		if !strings.Contains(values, want) {
			t.Errorf("no %s", want)
		}
	}
	if t.Failed() {
		t.Log(got)
	}
	if committed := fmt.Sprintf("ckptstore_run_last_commit_timestamp_seconds{run=\"bert \\\"x\\\"\"} %v\n", float64(begin.Unix()+25)); !strings.Contains(values, committed) {
		t.Errorf("no %s", committed)
	}
	status, older := get(t, h, "/metrics", "text/plain")
	problems, err := promlint.New(strings.NewReader(older)).Lint()
	if status != http.StatusOK || err != nil || len(problems) > 0 {
		t.Errorf("%d, %v, %+v", status, err, problems)
	}
	if strings.Contains(got, "step=") || strings.Contains(got, "rank=") {
		t.Error("a series has a step or a rank")
	}
}

// memoryRows are rows that a test has folded.
type memoryRows struct{ *projections.Memory }

var _ query.Rows = memoryRows{}

// Read implements query.Rows.
func (m memoryRows) Read(_ context.Context, read func(projections.Reader) error) (bool, error) {
	return true, read(m.Memory)
}

// TestManyRuns checks the bounds of a scrape with 1,000 runs, all live, and with 1,000 runs, few
// of them live: live ones are listed first, then those of the last hour, the rest is counted.
func TestManyRuns(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 1, 2, 0, 0, 0, 0, time.UTC)
	for _, c := range []struct {
		name          string
		live          func(run int) bool
		age           func(run int) time.Duration
		listed, exact int // runs that must be listed or counted; runs that must be shown
	}{
		{"all live", func(int) bool { return true }, func(run int) time.Duration { return time.Duration(run) * time.Hour }, 1000, -1},
		{"few live, all old", func(run int) bool { return run%100 == 7 }, func(int) time.Duration { return 2 * time.Hour }, 10, 10},
		{"half live, and heard of before the others", func(run int) bool { return run >= 500 }, func(run int) time.Duration {
			if run >= 500 {
				return 2 * time.Hour
			}
			return time.Minute
		}, 1000, -1},
		{"none live, some of the last hour", func(int) bool { return false }, func(run int) time.Duration { return time.Duration(run) * time.Minute }, 61, 61},
	} {
		rows := projections.NewMemory()
		seq := uint64(0)
		apply := func(run int, at time.Time, body events.Body) {
			seq++
			stamp := events.Stamp{ID: fmt.Sprint(seq), Source: fmt.Sprint("trainer/", run), Time: at}
			agg := events.Aggregate{Run: fmt.Sprintf("run-%04d", run), Trial: projections.DefaultTrial}
			e := events.Recorded{Sequence: seq}
			if body.Kind().Decides() {
				d, err := events.NewDecision(stamp, agg, body)
				if err != nil {
					t.Fatal(err)
				}
				e.Event = d.Event
			} else {
				scope := events.Scope{Run: agg.Run, Trial: agg.Trial, Actor: events.Node(0)}
				if body.Kind().Family() == "job" {
					scope.Trial = events.None
				}
				f, err := events.NewFact(stamp, scope, body)
				if err != nil {
					t.Fatal(err)
				}
				e.Event = f.Event
			}
			if err := projections.Apply(rows, e); err != nil {
				t.Fatal(err)
			}
		}
		for run := range 1000 {
			at := now.Add(-c.age(run))
			id := fmt.Sprint("job-", run)
			apply(run, at.Add(-3*time.Second), &events.JobStarted{Job: id, NNodes: 1})
			apply(run, at.Add(-2*time.Second), &events.GroupStarted{Attempt: 1, Job: id, WorldSize: 1})
			apply(run, at.Add(-time.Second), &events.CheckpointBegun{Attempt: 1, Checkpoint: "a.a1", Name: "a", WorldSize: 1})
			apply(run, at, &events.CheckpointCommitted{Attempt: 1, Checkpoint: "a.a1", Manifest: "m"})
			apply(run, at, &events.RestoreBegun{Attempt: 1, Load: 1, Checkpoint: "a.a1"})
			apply(run, at, &events.RestoreCompleted{Attempt: 1, Load: 1, Checkpoint: "a.a1", Tier: "files"})
			apply(run, at, &events.Metrics{Attempt: 1, Iteration: 1, Step: 5})
		}
		asked := 0
		col := &collector{options: Options{Now: func() time.Time { return now }}, live: map[string]checked{}, liveJob: func(_ context.Context, run string) (string, error) {
			asked++
			var n int
			_, err := fmt.Sscanf(run, "run-%04d", &n)
			if c.live(n) {
				return fmt.Sprint("job-", n), err
			}
			return "", err
		}}
		b := &builder{}
		if err := col.list(t.Context(), b, memoryRows{rows}); err != nil {
			t.Fatal(err)
		}
		registry := prometheus.NewRegistry()
		registry.MustRegister(gathered(b.metrics))
		got, err := registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		var text bytes.Buffer
		states, omitted := map[string]int{}, -1
		for _, f := range got {
			if _, err := expfmt.MetricFamilyToText(&text, f); err != nil {
				t.Fatal(err)
			}
			for _, m := range f.GetMetric() {
				switch f.GetName() {
				case "ckptstore_run_state":
					for _, l := range m.GetLabel() {
						if l.GetName() == "state" {
							states[l.GetValue()]++
						}
					}
				case "ckptstore_metrics_runs_omitted":
					omitted = int(m.GetGauge().GetValue())
				}
			}
		}
		series := 0
		for line := range strings.Lines(text.String()) {
			if !strings.HasPrefix(line, "#") {
				series++
			}
		}
		shown := states["running"] + states["lost"]
		t.Logf("%s: %d runs, %d omitted, %d series", c.name, shown, omitted, series)
		if series > MaxSeries || series != b.series || shown > MaxRuns || shown+omitted != c.listed || c.exact >= 0 && shown != c.exact || shown == 0 {
			t.Errorf("%s: %d series, counted %d; %d of %d runs, %d omitted", c.name, series, b.series, shown, c.listed, omitted)
		}
		if c.live(507) && states["lost"] > 0 || !c.live(507) && states["running"] > 0 {
			t.Errorf("%s: states %v", c.name, states)
		}
		if asked != 1000 {
			t.Errorf("%s: %d leases were asked for", c.name, asked)
		}
		asked = 0
		if err := col.list(t.Context(), &builder{}, memoryRows{rows}); err != nil || asked != 0 {
			t.Errorf("%s: a second scrape at once asks for %d leases, %v", c.name, asked, err)
		}
	}
}

// TestReadiness checks each condition with its reason.
func TestReadiness(t *testing.T) {
	t.Parallel()
	well := store.Health{Owns: true, Log: 100_000, Views: 100_000}
	for name, c := range map[string]struct {
		change func(*store.Health)
		line   string // empty: ready
	}{
		"well":            {func(*store.Health) {}, ""},
		"a little behind": {func(h *store.Health) { h.Views -= maxLag }, ""},
		"stands by":       {func(h *store.Health) { h.Owns, h.Views = false, 0 }, ""},
		"in memory":       {func(h *store.Health) { h.Memory = true }, ""},
		"far behind":      {func(h *store.Health) { h.Views -= maxLag + 1 }, "views: not ready: they are 10001 events behind the log, more than 10000"},
		"halted":          {func(h *store.Health) { h.Views, h.Halted = 7, errors.New("event 8\nis missing") }, "views: not ready: they halted at event 7: event 8 is missing; run `ckptstore verify`, then start the owner again"},
		"no answer":       {func(h *store.Health) { h.LogErr = errors.New("the log does not answer") }, "log: not ready: the log does not answer"},
		"full":            {func(h *store.Health) { h.Room = &space.NoSpaceError{Dir: "/s", Free: 1, Size: 100, Need: 10} }, "disk: not ready: the disk of /s, which is 99 % full, has 1 bytes free and the log needs 10: free space, then run the command again; `ckptstore ls --offline` works meanwhile"},
	} {
		h := well
		c.change(&h)
		lines, ready := readiness(h)
		if ready != (c.line == "") || c.line != "" && !slices.Contains(strings.Split(lines, "\n"), c.line) || strings.Count(lines, "\n") != 3 {
			t.Errorf("%s: %v\n%s", name, ready, lines)
		}
	}
}

// TestProbes asks a real store: ready while it is open, and not once it is closed.
func TestProbes(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "s")
	if _, err := store.Init(t.Context(), dir, ""); err != nil {
		t.Fatal(err)
	}
	s, err := store.Open(t.Context(), store.Options{Location: dir})
	if err != nil {
		t.Fatal(err)
	}
	h := Handler(s, Options{})
	for _, path := range []string{"/healthz", "/readyz"} {
		if status, text := get(t, h, path, ""); status != http.StatusOK {
			t.Errorf("%s: %d %s", path, status, text)
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if status, text := get(t, h, "/readyz", ""); status != http.StatusServiceUnavailable || !strings.Contains(text, "log: not ready: ") {
		t.Errorf("closed: %d %s", status, text)
	}
	if status, text := get(t, h, "/metrics", openMetrics); status != http.StatusOK || !strings.Contains(text, "ckptstore_owner 0") || strings.Contains(text, "views_lag") {
		t.Errorf("closed: %d %s", status, text)
	}
}

// twoNodes returns the start of a job on two nodes.
func twoNodes(job string) []events.Body {
	return []events.Body{
		&events.JobStarted{Job: job, Host: "a", PID: 1, NProc: 1, NNodes: 2},
		&events.NodeJoined{Job: job, Node: 0, Host: "a"},
		&events.NodeJoined{Job: job, Node: 1, Host: "b"},
	}
}

// groupOfTwo returns the start of a group of one rank on each of two nodes.
func groupOfTwo(attempt int, job string) *events.GroupStarted {
	return &events.GroupStarted{Attempt: attempt, Job: job, WorldSize: 2, Ranks: []events.RankPlacement{{}, {Rank: 1, Node: 1}}}
}

// slowNode returns the fact that a node is slow, or is so no longer.
func slowNode(job string, attempt, node int, over bool) *events.NodeSlow {
	return &events.NodeSlow{Job: job, Attempt: attempt, Node: node, Over: over, By: "busy", Seconds: 2, Others: 1, Behind: 20, Of: 30}
}

// TestSlowNode checks that a slow node of the live group has a series until it is well again, and
// that one of an earlier attempt has none.
func TestSlowNode(t *testing.T) {
	t.Parallel()
	s := newScene(t, time.Now().Add(-10*time.Minute))
	job := store.NewID()
	series := func() (all []string) {
		if _, err := query.Ask(t.Context(), s.store.Views(), query.Devices, query.Params{}); err != nil { // the views have caught up
			t.Fatal(err)
		}
		_, got := get(t, Handler(s.store, Options{}), "/metrics", "text/plain")
		for line := range strings.Lines(got) {
			if strings.HasPrefix(line, "ckptstore_node_slow{") {
				all = append(all, strings.TrimSpace(line))
			}
		}
		return all
	}
	s.add("bert", job, twoNodes(job)...)
	s.add("bert", job, groupOfTwo(1, job), slowNode(job, 1, 0, false), groupOfTwo(2, job), slowNode(job, 2, 1, false))
	_, release, err := s.store.HoldRun(t.Context(), "bert", job)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = release() }()
	if got := series(); len(got) != 1 || got[0] != `ckptstore_node_slow{node="1",run="bert"} 1` {
		t.Errorf("series %q", got)
	}
	s.add("bert", job, slowNode(job, 2, 1, true))
	if got := series(); len(got) > 0 {
		t.Errorf("series %q of a node that is well again", got)
	}
}
