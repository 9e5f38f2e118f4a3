package launch

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"iter"
	"log/slog"
	"math"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/launch/process"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/session/handoff"
	"github.com/ckptstore/ckptstore/projections"
)

// A worker that survives even SIGKILL does not hold up the trainer forever.
func TestUnkillableWorker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, _, _ := watched(t) // no process to send a signal to
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(errors.New("stop"))
		began := time.Now()
		cause, err := w.wait(ctx, t.Context())
		if err == nil || !strings.Contains(err.Error(), "do not die 30s after SIGKILL") || cause.Cause != "stop" {
			t.Errorf("cause %v, error %v", cause, err)
		}
		if took := time.Since(began); took != 40*time.Second {
			t.Errorf("it took %v", took)
		}
	})
}

// recorder is the log and the views of a trial. It only records the events.
type recorder struct {
	session.Log
	session.Views
	kinds []events.Kind
}

// Append implements Log.
func (r *recorder) Append(_ context.Context, facts ...events.Fact) ([]uint64, error) {
	for _, f := range facts {
		r.kinds = append(r.kinds, f.Kind)
	}
	return nil, nil
}

// ReadTrial implements Log.
func (r *recorder) ReadTrial(ctx context.Context, _ events.Aggregate, _, _ uint64) iter.Seq2[events.Recorded, error] {
	return func(func(events.Recorded, error) bool) { <-ctx.Done() }
}

// Trial implements Views.
func (r *recorder) Trial(context.Context, string, string) (projections.Trial, error) {
	return projections.Trial{Run: "run", Name: "main"}, nil
}

// OpenCheckpoints implements Views.
func (r *recorder) OpenCheckpoints(context.Context, string, string) ([]projections.Checkpoint, error) {
	return nil, nil
}

// logBuffer collects a logger's output, even during writes.
type logBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

// Write implements io.Writer.
func (s *logBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(p)
}

func (s *logBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}

// watched is a watch over one process that cannot be signalled, in attempt 1.
func watched(t *testing.T) (w *watch, heard *recorder, warned *logBuffer) {
	t.Helper()
	heard, warned = &recorder{}, &logBuffer{}
	cfg := Config{
		Config: session.Config{
			Run: "run", Trial: "main", Job: "none", Nodes: session.OneNode(1),
			NewID: rand.Text, Logger: slog.New(slog.NewTextHandler(warned, nil)),
		},
		Grace: 10 * time.Second,
	}.withDefaults()
	w = &watch{
		job: prepare(t.Context(), cfg, session.Store{Log: heard, Views: heard}, nil), signals: newHeldSignals(nil),
		procs: []*process.Process{process.Of(0, &exec.Cmd{Process: &os.Process{Pid: math.MaxInt32}})},
		exits: make(chan process.Exit, 1), reported: make(chan error, 1),
	}
	if _, err := w.OpenTrial(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	w.group = w.Begin(t.Context(), session.Attempt{Number: 1})
	return w, heard, warned
}

// A job that is stopped while some ranks have one report more than others ends
// because it was stopped, in whatever order the trainer learns of both.
func TestStoppedBetweenReports(t *testing.T) {
	for range 50 {
		w, _, warned := watched(t)
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(errors.New("stop"))
		w.exits <- process.Exit{}
		w.reported <- &handoff.UnevenError{Reported: []int{0}, Ended: []int{1}}
		cause, err := w.wait(ctx, t.Context())
		if err != nil || cause.Cause != "stop" || !strings.Contains(warned.String(), "last reports discarded") {
			t.Fatalf("cause %v, error %v, warned %q", cause, err, warned)
		}
	}
}

// A rank that sent hello just before its end is counted, in whatever order the
// trainer learns of both.
func TestHelloBeforeEnd(t *testing.T) {
	for range 50 {
		w, heard, warned := watched(t)
		hello := make(chan int, 1)
		hello <- 0
		w.hello = hello
		w.exits <- process.Exit{}
		w.reported <- nil
		if cause, err := w.wait(t.Context(), t.Context()); cause != nil || err != nil {
			t.Fatal(cause, err)
		}
		want := []events.Kind{events.TrainingStarted{}.Kind(), events.WorkerExited{}.Kind()}
		if !slices.Equal(heard.kinds, want) || !strings.Contains(warned.String(), "without reporting") {
			t.Fatalf("events %v, warned %q", heard.kinds, warned)
		}
	}
}

func TestRootCause(t *testing.T) {
	died := func(rank, code int, at int64, stopped bool, told told) failure {
		return failure{process.Exit{Rank: rank, Code: code}, told, at, stopped}
	}
	for _, c := range []struct {
		name     string
		failures []failure
		want     int
	}{
		{"alone", []failure{died(2, 1, 9, false, told{})}, 2},
		{"by the order of ends", []failure{died(1, 1, 9, false, told{}), died(0, 1, 9, false, told{})}, 1},
		{"told to be earlier", []failure{died(1, 1, 9, false, told{at: 8}), died(0, 1, 9, false, told{at: 7})}, 0},
		{"told in the same second", []failure{died(1, 1, 9, false, told{at: 8}), died(0, 1, 9, false, told{at: 8})}, 1},
		{"one tells, one does not", []failure{died(1, 1, 9, false, told{}), died(0, 1, 9, false, told{at: 8})}, 0},
		{"victims last", []failure{died(1, 143, 5, true, told{}), died(0, 1, 9, false, told{at: 8})}, 0},
	} {
		if got := rootCause(c.failures); got.Rank != c.want {
			t.Errorf("%s: rank %d, want %d", c.name, got.Rank, c.want)
		}
	}
}
