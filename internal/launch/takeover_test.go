package launch_test

import (
	"context"
	"errors"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/tensor"
)

// ghost writes the log of a dead trainer, event by event.
type ghost struct {
	t       *testing.T
	last    uint64
	attempt int
}

func (g *ghost) stamp() events.Stamp {
	return events.Stamp{ID: store.NewID(), Source: "trainer/ghost", Time: time.Now()}
}

func (g *ghost) decides(body events.Body) {
	g.t.Helper()
	d, err := events.NewDecision(g.stamp(), events.Aggregate{Run: runOf(g.t), Trial: projections.DefaultTrial}, body)
	if err != nil {
		g.t.Fatal(err)
	}
	if g.last, err = home.Log.Decide(g.t.Context(), d, g.last); err != nil {
		g.t.Fatal(err)
	}
}

func (g *ghost) says(actor events.Actor, body events.Body) {
	g.t.Helper()
	f, err := events.NewFact(g.stamp(), events.Scope{Run: runOf(g.t), Trial: projections.DefaultTrial, Actor: actor}, body)
	if err != nil {
		g.t.Fatal(err)
	}
	if _, err := home.Log.Append(g.t.Context(), f); err != nil {
		g.t.Fatal(err)
	}
}

// starts begins the next attempt, of two ranks.
func (g *ghost) starts() {
	g.t.Helper()
	if g.attempt++; g.attempt == 1 {
		g.decides(&events.TrialCreated{})
	}
	g.decides(&events.GroupStarted{Attempt: g.attempt, Job: store.NewID(), WorldSize: 2, Backend: "none"})
}

// bytesOf is the memory of one rank, in the order of its plan.
type bytesOf [][]byte

// Item implements data.Source.
func (b bytesOf) Item(i int) ([]byte, error) { return b[i], nil }

// saves performs a save of one value a rank, up to and with the events of the
// written ranks. It returns the ID.
func (g *ghost) saves(step int64, staged bool, written ...int) string {
	g.t.Helper()
	return g.savesBy(func(w *data.FileWriter, rank int, layout checkpoint.Layout) (data.Written, error) {
		return w.WriteData(g.t.Context(), rank, layout.Items(rank), bytesOf{{byte(rank)}})
	}, step, staged, written...)
}

// savesBy is saves with another way to write.
func (g *ghost) savesBy(write func(*data.FileWriter, int, checkpoint.Layout) (data.Written, error), step int64, staged bool, written ...int) string {
	g.t.Helper()
	id := planner.CheckpointID(planner.DefaultName(step), g.attempt, 1)
	var locals []checkpoint.Local
	for rank := range 2 {
		item := checkpoint.Item{Value: true, PerRank: true, Bytes: 1, Shard: tensor.Shard{FQN: "rng"}}
		locals = append(locals, checkpoint.Local{Rank: rank, Items: []checkpoint.Item{item}})
	}
	made, err := planner.Global(locals)
	if err != nil {
		g.t.Fatal(err)
	}
	layout := made.Layout
	for rank, l := range locals {
		encoded := checkpoint.EncodeLocal(l)
		g.says(events.Rank(rank), &events.LocalPlan{
			Attempt: g.attempt, Checkpoint: id, Name: planner.DefaultName(step), Step: step, Rank: rank,
			Participants: []int{0, 1}, Fingerprint: checkpoint.Sum(encoded).String(), Plan: events.InlineBlob(encoded),
		})
	}
	g.decides(&events.CheckpointBegun{
		Attempt: g.attempt, Checkpoint: id, Name: planner.DefaultName(step), Step: step, WorldSize: 2, Participants: []int{0, 1},
	})
	g.says(events.Node(0), &events.GlobalPlan{Attempt: g.attempt, Checkpoint: id, Layout: events.InlineBlob(checkpoint.EncodeLayout(layout))})
	for rank := range locals {
		g.says(events.Rank(rank), &events.WriteSealed{Attempt: g.attempt, Checkpoint: id, Rank: rank, Bytes: 1})
	}
	if staged {
		g.decides(&events.CheckpointStaged{Attempt: g.attempt, Checkpoint: id})
	}
	w := home.Data.Writer(checkpoint.RefOf(runOf(g.t), projections.DefaultTrial, id))
	for _, rank := range written {
		if err := w.SetUp(g.t.Context(), rank == 0); err != nil {
			g.t.Fatal(err)
		}
		done, err := write(w, rank, layout)
		if err != nil {
			g.t.Fatal(err)
		}
		g.says(events.Node(0), &events.WriteCompleted{
			Attempt: g.attempt, Checkpoint: id, Rank: rank, IndexDigest: done.Index.String(), BytesWritten: done.BytesWritten,
		})
	}
	return id
}

var resumesFrom = shell(`echo resumes "$CKPTSTORE_RESUME"`)

// A job finishes the saves of a dead trainer before its own first attempt: it
// commits a save if all files are written, and aborts it otherwise.
func TestTakeOver(t *testing.T) {
	t.Parallel()
	for _, dead := range []struct {
		name    string
		staged  bool
		written []int
		commits bool
	}{
		{"sealed", false, nil, false},
		{"staged", true, nil, false},
		{"half written", true, []int{1}, false},
		{"written but not staged", false, []int{0, 1}, true},
		{"written", true, []int{0, 1}, true},
	} {
		t.Run(dead.name, func(t *testing.T) {
			t.Parallel()
			g := &ghost{t: t}
			g.starts()
			id := g.saves(5, dead.staged, dead.written...)
			j := newJob(t, 1, resumesFrom...).must()
			if !dead.commits {
				wantEnded(t, nil, []string{id})
				wantText(t, j.out, "resumes \n")
				if got := one[events.CheckpointAborted](t, runOf(t)); got.Reason != "the trainer ended before the save was complete" || len(got.Ranks) != 2-len(dead.written) {
					t.Errorf("checkpoint.aborted: %+v", got)
				}
				if _, err := os.Stat(dirOf(t, id)); !errors.Is(err, os.ErrNotExist) {
					t.Errorf("leftovers of the aborted save: %v", err)
				}
				return
			}
			wantEnded(t, []string{id}, nil)
			wantText(t, j.out, "resumes "+id+"\n")
			ref := checkpoint.RefOf(runOf(t), projections.DefaultTrial, id)
			report, err := home.Data.Verify(t.Context(), ref, checkpoint.Digest{}, nil)
			if err != nil || !report.Clean() {
				t.Errorf("the checkpoint is not whole: %+v, %v", report, err)
			}
			if trial := trialOf(t); trial.Attempt != 2 || trial.Head != id {
				t.Errorf("trial %+v", trial)
			}
		})
	}
}

// Only the newest attempt's saves can still be committed.
func TestTakeOverOfAttempts(t *testing.T) {
	t.Parallel()
	g := &ghost{t: t}
	g.starts()
	first := g.saves(1, true, 0, 1)
	g.starts()
	second, third := g.saves(2, true, 0, 1), g.saves(3, true, 0)
	j := newJob(t, 1, resumesFrom...).must()
	committed, aborted := ended(t, runOf(t))
	slices.Sort(aborted)
	if !slices.Equal(committed, []string{second}) || !slices.Equal(aborted, []string{first, third}) {
		t.Errorf("committed %q, aborted %q", committed, aborted)
	}
	wantText(t, j.out, "resumes "+second+"\n")
}

var savesOnce = workerRole("saves once", func(ctx context.Context, c *client.Client) error {
	if c.Attempt > 1 {
		emit("resumes %s", c.Resume)
		return load(ctx, c, "", 1)
	}
	emit("save: %v", save(ctx, c, 1))
	return untilTerm(ctx)
})

// A coordinator that is paused after its last write, and continues after its
// successor has committed and started, makes no more decisions.
func TestPausedCoordinator(t *testing.T) {
	t.Parallel()
	old := newJob(t, 1, savesOnce...)
	g := old.gated("manifest-")
	old.start()
	g.await(t)

	// On another machine, as far as memory goes.
	successor := newJob(t, 1, savesOnce...)
	successor.store.Shared = t.TempDir()
	successor.must()
	wantText(t, successor.out, "resumes step-1.a1")

	close(g.open)
	if err := old.wait(); !errors.Is(err, session.ErrFenced) {
		t.Errorf("the old trainer ends with %v", err)
	}
	wantNobody(t, old.cfg.Job)
	wantEnded(t, []string{"step-1.a1"}, nil)
	if trial := trialOf(t); trial.Attempt != 2 || trial.Status != projections.Completed || trial.Head != "step-1.a1" {
		t.Errorf("trial %+v", trial)
	}
}
