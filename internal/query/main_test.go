package query

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/projections/viewdb"
	"github.com/cockroachdb/pebble/v2/vfs"
	"go.uber.org/goleak"
	"golang.org/x/sync/errgroup"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// store is a log, its views in a database, and a server of them on a socket.
type store struct {
	t      *testing.T
	log    *jetlog.Log
	views  *viewdb.DB
	dial   func(context.Context) (net.Conn, error)
	minted int
	ends   map[string]uint64 // of lanes, by run and trial
}

const storeID = "0190a000-0000-7000-8000-000000000001"

func newStore(t *testing.T) *store {
	t.Helper()
	s := &store{t: t, ends: map[string]uint64{}}
	server, err := jetlog.StartServer(t.Context(), jetlog.ServerOptions{Dir: filepath.Join(t.TempDir(), "log")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Shutdown)
	s.log, err = jetlog.Connect(t.Context(), jetlog.Options{Dial: func(context.Context) (net.Conn, error) { return server.Dial() }})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.log.Close)
	created, err := events.NewDecision(s.stamp(), events.Aggregate{}, events.StoreCreated{Store: storeID, Format: 1, Data: "data"})
	if err == nil {
		err = s.log.Create(t.Context(), created)
	}
	if err != nil {
		t.Fatal(err)
	}
	if s.views, err = viewdb.Open("views", viewdb.Options{FS: vfs.NewMem(), Store: storeID}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.views.Close(); err != nil {
			t.Error(err)
		}
	})
	s.dial = listen(t, Handler(s.views))
	return s
}

// listen serves h on a unix socket until the end of the test.
func listen(t *testing.T, h http.Handler) func(context.Context) (net.Conn, error) {
	t.Helper()
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: h, ReadHeaderTimeout: 10 * time.Second}
	var served errgroup.Group
	served.Go(func() error { return server.Serve(l) })
	t.Cleanup(func() {
		if err := server.Close(); err != nil {
			t.Error(err)
		}
		_ = served.Wait() // the error of a closed server
	})
	return func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", l.Addr().String())
	}
}

func (s *store) client() *Client { return NewClient(s.dial, s.log.Last) }
func (s *store) local() *Local   { return &Local{Views: s.views, Last: s.log.Last} }

func (s *store) stamp() events.Stamp {
	s.minted++
	return events.Stamp{ID: fmt.Sprintf("e%d", s.minted), Source: "test", Time: time.Unix(1e9+int64(s.minted), 0)}
}

// record appends a fact or a decision about a trial.
func (s *store) record(run, trial string, bodies ...events.Body) {
	s.t.Helper()
	for _, b := range bodies {
		if !b.Kind().Decides() {
			scope := events.Scope{Run: run, Trial: trial, Actor: events.Node(0)}
			if b.Kind().Family() == "job" {
				scope.Trial = events.None
			}
			f, err := events.NewFact(s.stamp(), scope, b)
			if err == nil {
				_, err = s.log.Append(s.t.Context(), f)
			}
			if err != nil {
				s.t.Fatal(err)
			}
			continue
		}
		d, err := events.NewDecision(s.stamp(), events.Aggregate{Run: run, Trial: trial}, b)
		if err != nil {
			s.t.Fatal(err)
		}
		lane := run + "/" + trial
		if s.ends[lane], err = s.log.Decide(s.t.Context(), d, s.ends[lane]); err != nil {
			s.t.Fatal(err)
		}
	}
}

func (s *store) catchUp() {
	s.t.Helper()
	if err := s.views.CatchUp(s.t.Context(), s.log); err != nil {
		s.t.Fatal(err)
	}
}

func saved(id, name string, attempt int, step int64) []events.Body {
	return []events.Body{
		events.CheckpointBegun{Attempt: attempt, Checkpoint: id, Name: name, Step: step, WorldSize: 2, Participants: []int{0, 1}},
		events.WriteCompleted{Attempt: attempt, Checkpoint: id, Rank: 0, BytesWritten: 7},
		events.CheckpointCommitted{Attempt: attempt, Checkpoint: id, Manifest: fmt.Sprintf("%064x", step), Bytes: 7},
	}
}

// story appends a run with two attempts, of which the second resumed from the
// middle of the first, and a run with two trials.
func (s *store) story() {
	const odd = `räder & "runs"?ref=x#%41+`
	for i, run := range []string{"run", odd} {
		job := fmt.Sprintf("job-%d", i)
		s.record(run, projections.DefaultTrial,
			events.JobStarted{Job: job, Host: "here", PID: 1, Command: []string{"python", "<train>.py"}, NProc: 2, NNodes: 1, Resume: "auto"},
			events.TrialCreated{Config: map[string]any{"lr": 0.1, "name": "<a&b>"}},
			events.GroupStarted{Attempt: 1, Job: job, WorldSize: 2, Backend: "gloo", Ranks: []events.RankPlacement{{Rank: 0}, {Rank: 1, LocalRank: 1, Devices: []string{"GPU-1"}}}},
			events.TrainingStarted{Attempt: 1})
		for step := range int64(4) {
			s.record(run, projections.DefaultTrial, events.Metrics{
				Attempt: 1, Iteration: int(step) + 1, Step: step, Seconds: 0.25,
				Metrics: map[string]any{"loss": 1 / float64(step+1), "big": 12345678901, "nan": "NaN", "ok": true},
			})
		}
		s.record(run, projections.DefaultTrial, saved("step-1.a1", "step-1", 1, 1)...)
		s.record(run, projections.DefaultTrial, saved("step-3.a1", "step-3", 1, 3)...)
		s.record(run, projections.DefaultTrial,
			events.WorkerExited{Attempt: 1, Rank: 1, Signal: "SIGKILL", Traceback: "line 1\nline 2"},
			events.GPUUnhealthy{Device: "GPU-1", Reason: "Xid 79"},
			events.ReplicaNode{Attempt: 1, Checkpoint: "step-3.a1", Ranks: []events.RankRun{{First: 0, Count: 2}}, Node: 1, Bytes: 100, Seconds: 0.5},
			events.GroupStopped{Attempt: 1, Reason: "a worker was killed"},
			events.GroupStarted{Attempt: 2, Job: job, WorldSize: 1, Resume: "step-1.a1", Backend: "gloo", Ranks: []events.RankPlacement{{Rank: 0}}},
			events.RestoreBegun{Attempt: 2, Load: 1, Checkpoint: "step-1.a1", WorldSize: 1},
			events.Metrics{Attempt: 2, Iteration: 1, Step: 2, Metrics: map[string]any{"loss": 0.1}},
			events.CheckpointBegun{Attempt: 2, Checkpoint: "step-2.a2", Name: "step-2", Step: 2, WorldSize: 1, Participants: []int{0}})
	}
	s.record("sweep", "a", saved("step-1.a1", "step-1", 1, 1)...)
	s.record("sweep", "b", saved("step-1.a1", "step-1", 1, 1)...)
	s.catchUp()
}
