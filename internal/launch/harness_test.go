package launch_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/launch/process"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// patience is how long a test waits for an event that must come.
const patience = 60 * time.Second

// views are a job's queries, on a store.
type views struct{ source query.Source }

var _ session.Views = views{}

// Trial implements session.Views.
func (v views) Trial(ctx context.Context, run, trial string) (projections.Trial, error) {
	return query.Ask(ctx, v.source, query.Trial, query.Params{Run: run, Trial: trial})
}

// Attempts implements session.Views.
func (v views) Attempts(ctx context.Context, run, trial string) ([]projections.Attempt, error) {
	return query.Ask(ctx, v.source, query.Attempts, query.Params{Run: run, Trial: trial})
}

// OpenCheckpoints implements session.Views.
func (v views) OpenCheckpoints(ctx context.Context, run, trial string) ([]projections.Checkpoint, error) {
	return query.Ask(ctx, v.source, query.OpenCheckpoints, query.Params{Run: run, Trial: trial})
}

// Resolve implements session.Views.
func (v views) Resolve(ctx context.Context, ref string) (projections.Checkpoint, error) {
	return query.Ask(ctx, v.source, query.Resolve, query.Params{Ref: ref})
}

// Trials implements session.Views.
func (v views) Trials(ctx context.Context, run string) ([]projections.Trial, error) {
	return query.Ask(ctx, v.source, query.Trials, query.Params{Run: run})
}

// storeOf returns a job's part of a store.
func storeOf(st *store.Store, shared string) session.Store {
	return session.Store{
		ID: st.ID, Log: st.Log, Views: views{st.Views()}, Blobs: st.Blobs, Data: st.Data, Foreign: store.OpenForeign,
		Conflict: func(err error) bool { return errors.Is(err, jetlog.ErrConflict) }, Unserved: store.Unserved,
		Runtime: st.Runtime, Shared: shared,
	}
}

// job is one call of launch.Run.
type job struct {
	t      *testing.T
	cfg    launch.Config
	store  session.Store
	out    *transcript // of the workers
	log    *transcript // of the trainer
	cancel context.CancelCauseFunc
	done   chan error
	ended  bool
	shared string // directory with the credentials of a job over several nodes
	// differs changes a node of the job before it joins or listens, by its index; may be nil.
	differs func(index int, cfg *launch.Config, s *session.Store)
	beaten  func() // runs after each answered beat of another node, which sends no beat meanwhile; may be nil
	// unheard reports that the guard of another node does not hear of an answered beat; may be nil.
	unheard func(*process.Contact) bool
}

var (
	naming sync.Mutex
	named  = map[*testing.T]string{} // the run of each test
	times  = map[string]int{}        // how often a test has run in this process
)

// runOf is the name of a test's run; each time that the test runs, another.
func runOf(t *testing.T) string {
	naming.Lock()
	defer naming.Unlock()
	name, ok := named[t]
	if !ok {
		name = t.Name()
		if times[name]++; times[name] > 1 {
			name += fmt.Sprint(" again ", times[name])
		}
		named[t] = name
	}
	return name
}

// newJob makes a job of the run that is named after the test.
func newJob(t *testing.T, nproc int, command ...string) *job {
	j := &job{t: t, store: storeOf(home, memory), out: newTranscript(), log: newTranscript(), done: make(chan error, 1)}
	j.cfg = config(runOf(t), nproc, command, j.out, j.log)
	return j
}

func config(run string, nproc int, command []string, out, log io.Writer) launch.Config {
	return launch.Config{
		Config: session.Config{
			Run: run, Trial: projections.DefaultTrial, Job: store.NewID(), Nodes: session.OneNode(nproc),
			SaveTimeout: patience, DrainTimeout: patience, Collective: patience,
			NewID: store.NewID, Logger: slog.New(slog.NewTextHandler(log, nil)),
		},
		Command: command, Grace: patience, Stdout: out, Stderr: out,
	}
}

// runJobIn runs a job in the store that the tests share.
func runJobIn(tb testing.TB, cfg launch.Config) error {
	tb.Helper()
	cfg.SaveTimeout = 10 * patience
	return launch.Run(tb.Context(), cfg, storeOf(home, memory))
}

// start runs the job until wait.
func (j *job) start() *job {
	ctx, cancel := context.WithCancelCause(context.Background())
	j.cancel = cancel
	go func() { j.done <- launch.Run(ctx, j.cfg, j.store) }()
	j.t.Cleanup(func() {
		if !j.ended {
			cancel(errors.New("the test is over"))
			j.t.Logf("the job was stopped: %v", <-j.done)
		}
		if j.t.Failed() {
			j.t.Logf("workers:\n%strainer:\n%s", j.out, j.log)
		}
	})
	return j
}

func (j *job) wait() error {
	j.t.Helper()
	select {
	case err := <-j.done:
		j.ended = true
		j.cancel(nil)
		return err
	case <-time.After(patience):
		j.t.Fatalf("the job does not end")
		return nil
	}
}

func (j *job) run() error {
	j.t.Helper()
	return j.start().wait()
}

// must is run for a job that has to go well.
func (j *job) must() *job {
	j.t.Helper()
	if err := j.run(); err != nil {
		j.t.Fatal(err)
	}
	return j
}

// loses is run for a job whose workers end well after a save that was aborted.
func (j *job) loses(checkpoint string) *job {
	j.t.Helper()
	j.lost(j.run(), checkpoint)
	return j
}

// lost expects a job's error to report that its last save is lost, and its trial
// to be one to continue.
func (j *job) lost(err error, checkpoint string) {
	j.t.Helper()
	var lost *launch.LostSaveError
	if !errors.As(err, &lost) || lost.Checkpoint != checkpoint {
		j.t.Fatalf("error %v, want that the save of %s is lost", err, checkpoint)
	}
	if trial := trialOf(j.t); trial.Status != projections.Paused || trial.Head != lost.Newest {
		j.t.Errorf("trial %+v", trial)
	}
}

// fails is run for a job whose budget is used up.
func (j *job) fails() *launch.FailedError {
	j.t.Helper()
	err := j.run()
	var failed *launch.FailedError
	if !errors.As(err, &failed) {
		j.t.Fatalf("error %v, want a FailedError", err)
	}
	return failed
}

// survivors lists the live processes that carry the marker of a job.
func survivors(t *testing.T, job string) []string {
	t.Helper()
	var out []string
	entries, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if _, err := strconv.Atoi(e.Name()); err != nil {
			continue
		}
		env, err := os.ReadFile(filepath.Join("/proc", e.Name(), "environ"))
		if err == nil && bytes.Contains(env, []byte(client.EnvJob+"="+job)) {
			line, _ := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
			out = append(out, e.Name()+" "+string(bytes.ReplaceAll(line, []byte{0}, []byte(" "))))
		}
	}
	return out
}

func wantNobody(t *testing.T, job string) {
	t.Helper()
	if left := survivors(t, job); len(left) > 0 {
		t.Fatalf("processes of the job are left: %q", left)
	}
}

// slots are the staging files of a job's run in memory.
func slots(t *testing.T, j *job) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(arenasOf(j), "r*"))
	if err != nil {
		t.Fatal(err)
	}
	return files
}

func arenasOf(j *job) string {
	return filepath.Join(j.store.Shared, fmt.Sprintf("ckptstore-memory-%d", os.Geteuid()), "ckptstore-"+j.store.ID[24:]+"-"+events.EncodeName(j.cfg.Run)+"-n0")
}
