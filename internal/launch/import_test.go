package launch_test

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/format/dcp"
	"github.com/ckptstore/ckptstore/internal/launch/process"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// pytorch is a checkpoint that PyTorch wrote on four ranks.
func pytorch(t *testing.T) *data.Foreign {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "saved")
	if err := os.CopyFS(dir, os.DirFS(filepath.Join("..", "format", "dcp", "testdata", "torch-2.14", "mesh2x2"))); err != nil {
		t.Fatal(err)
	}
	f, err := store.OpenForeign(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func importInto(ctx context.Context, t *testing.T, run string, from *data.Foreign, change func(*session.ImportConfig)) (session.Imported, error) {
	t.Helper()
	cfg := session.ImportConfig{
		Run: run, Trial: projections.DefaultTrial, Job: store.NewID(), Step: 5, From: from, Command: []string{"import"},
		Logger: slog.New(slog.DiscardHandler), NewID: store.NewID,
	}
	if change != nil {
		change(&cfg)
	}
	cfg.Reap = process.ReapEarlier
	return session.Import(ctx, cfg, storeOf(home, memory))
}

// TestImportIsAnOrdinaryJob imports the same step twice, and looks at the log
// and the line.
func TestImportIsAnOrdinaryJob(t *testing.T) {
	run, from := runOf(t), pytorch(t)
	for attempt, want := range []string{"step-5.a1", "step-5.a2"} {
		got, err := importInto(t.Context(), t, run, from, func(c *session.ImportConfig) { c.InPlace = attempt == 1 })
		if err != nil || got.Checkpoint != want || got.Attempt != attempt+1 || got.Ranks != 4 {
			t.Fatalf("imported %+v, %v", got, err)
		}
		if got.Written != 0 && attempt == 1 {
			t.Errorf("%d bytes were copied in place", got.Written)
		}
	}
	if jobs := bodiesOf[events.JobEnded](t, run); len(jobs) != 2 || jobs[0].ExitCode != 0 || jobs[1].ExitCode != 0 {
		t.Errorf("jobs ended %+v", jobs)
	}
	groups := bodiesOf[events.GroupStarted](t, run)
	if len(groups) != 2 || groups[0].WorldSize != 4 || groups[0].Backend != session.ImportBackend || groups[1].Resume != "step-5.a1" {
		t.Errorf("groups %+v", groups)
	}
	if n := len(bodiesOf[events.WriteCompleted](t, run)); n != 8 {
		t.Errorf("%d writes, want 8", n)
	}
	q := store.Queries{From: home.Views()}
	trial, err := q.Trial(t.Context(), run, projections.DefaultTrial)
	if err != nil || trial.Head != "step-5.a2" || trial.Status != projections.Paused {
		t.Errorf("trial %+v, %v", trial, err)
	}
	for _, id := range []string{"step-5.a1", "step-5.a2"} {
		c, err := q.Resolve(t.Context(), run+"@"+id)
		if err != nil || !c.Visible() {
			t.Fatalf("%s: %+v, %v", id, c, err)
		}
		report, err := home.Learn(t.Context(), c, nil)
		if err != nil || !report.Clean() {
			t.Errorf("%s: %v, %v", id, report.Findings, err)
		}
		again, err := q.Resolve(t.Context(), run+"@"+id)
		if wantSums := map[string]int{"step-5.a1": 0, "step-5.a2": 4}[id]; err != nil || len(again.Attachments) != wantSums {
			t.Errorf("%s has attachments %v, %v", id, again.Attachments, err)
		}
	}
}

// TestImportOfHoles leaves chunks out of a checkpoint, of one rank and of four:
// it can be inspected, but not imported.
func TestImportOfHoles(t *testing.T) {
	for name, keep := range map[string]func(c dcp.Chunk, nth int) bool{
		"one rank":   func(c dcp.Chunk, _ int) bool { return c.Where.File == "__0_0.distcp" },
		"four ranks": func(_ dcp.Chunk, nth int) bool { return nth > 0 },
	} {
		t.Run(name, func(t *testing.T) {
			run, dir := runOf(t), pytorch(t).Path()
			file := filepath.Join(dir, dcp.MetadataFile)
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			m, err := dcp.ReadMetadata(text)
			if err != nil {
				t.Fatal(err)
			}
			holes := map[string]bool{}
			for i := range m.Tensors {
				x, nth := &m.Tensors[i], 0
				whole := len(x.Chunks)
				x.Chunks = slices.DeleteFunc(x.Chunks, func(c dcp.Chunk) bool { nth++; return whole > 1 && !keep(c, nth-1) })
				if len(x.Chunks) < whole {
					holes[x.FQN] = true
				}
			}
			m.Tensors = slices.DeleteFunc(m.Tensors, func(x dcp.Tensor) bool {
				gone := name == "one rank" && (len(x.Chunks) == 0 || x.Chunks[0].Where.File != "__0_0.distcp")
				if gone {
					delete(holes, x.FQN)
				}
				return gone
			})
			m.Values = slices.DeleteFunc(m.Values, func(v dcp.Value) bool { return name == "one rank" && v.Where.File != "__0_0.distcp" })
			if text, err = dcp.WriteMetadata(m); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(file, text, 0o600); err != nil {
				t.Fatal(err)
			}
			from, err := store.OpenForeign(t.Context(), dir)
			if err != nil {
				t.Fatal(err)
			}
			if ranks := len(from.Manifest().Ranks); (ranks == 1) != (name == "one rank") || len(holes) == 0 {
				t.Fatalf("%d ranks, holes in %v", ranks, holes)
			}
			report, err := store.VerifyForeign(t.Context(), from, nil)
			if err != nil {
				t.Fatal(err)
			}
			found := map[string]bool{}
			for _, f := range report.Findings {
				if f.Kind != data.Missing || f.Chunk == "" {
					t.Errorf("finding %v", f)
				}
				found[f.FQN] = true
			}
			if !maps.Equal(found, holes) {
				t.Errorf("holes in %v, want %v", found, holes)
			}
			for _, inPlace := range []bool{false, true} {
				_, err = importInto(t.Context(), t, run, from, func(c *session.ImportConfig) { c.InPlace = inPlace })
				if corrupt := (*data.CorruptError)(nil); !errors.As(err, &corrupt) || !strings.Contains(err.Error(), "does not cover") {
					t.Errorf("imported with holes: %v", err)
				}
			}
		})
	}
}

// TestImportThatFails aborts its save, reports it, and leaves nothing.
func TestImportThatFails(t *testing.T) {
	for name, spoil := range map[string]func(*session.ImportConfig, context.CancelCauseFunc){
		"interrupted": func(c *session.ImportConfig, cancel context.CancelCauseFunc) {
			c.Read = func(int64) { cancel(errors.New("the user is impatient")) }
		},
		"file is gone": func(c *session.ImportConfig, _ context.CancelCauseFunc) {
			c.Read = func(int64) { _ = os.Remove(filepath.Join(c.From.Path(), "__3_0.distcp")) }
		},
		"adopted file changed": func(c *session.ImportConfig, _ context.CancelCauseFunc) {
			c.InPlace = true
			_ = os.Truncate(filepath.Join(c.From.Path(), "__3_0.distcp"), 5)
		},
	} {
		t.Run(name, func(t *testing.T) {
			run, from := runOf(t), pytorch(t)
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			_, err := importInto(ctx, t, run, from, func(c *session.ImportConfig) { spoil(c, cancel) })
			if err == nil {
				t.Fatal("it succeeds")
			}
			aborted := one[events.CheckpointAborted](t, run)
			if aborted.Checkpoint != "step-5.a1" || !strings.Contains(aborted.Reason, "could not be written") {
				t.Errorf("aborted %+v", aborted)
			}
			one[events.GroupStopped](t, run)
			if ended := one[events.JobEnded](t, run); ended.ExitCode == 0 {
				t.Errorf("ended %+v", ended)
			}
			dir := filepath.Join(home.Data.Dir(), checkpoint.RefOf(run, projections.DefaultTrial, "step-5.a1").String())
			if _, err := os.Stat(dir); !os.IsNotExist(err) {
				t.Errorf("%s is left: %v", dir, err)
			}
			// The run is good for another import.
			if _, err := importInto(t.Context(), t, run, pytorch(t), nil); err != nil {
				t.Error(err)
			}
		})
	}
}
