package query

import (
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/projections"
)

// pages asks for a list page by page, and returns all rows.
func pages[T any](t *testing.T, s *store, q Query[[]T], p Params, key func(T) string) (rows []T) {
	t.Helper()
	for {
		page := agree(t, s, q, p)
		if len(page) > p.Limit {
			t.Fatalf("%s: %d rows in a page of %d", q.Name, len(page), p.Limit)
		}
		rows = append(rows, page...)
		if len(page) < p.Limit {
			return rows
		}
		p.After = key(page[len(page)-1])
	}
}

// The pages of a list are the list, whatever their size.
func TestPages(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	s.story()
	for i := range 7 {
		for _, trial := range []string{"a", "b"} {
			s.record("sweep", trial, saved(fmt.Sprintf("step-%d.a1", i+2), fmt.Sprintf("step-%d", i+2), 1, int64(i+2))...)
		}
		s.record("sweep", "a", events.JobStarted{Job: fmt.Sprintf("j%d", i), Host: "h"})
	}
	s.record("sweep", "a", events.CheckpointBegun{Attempt: 1, Checkpoint: "step-99.a1", Name: "step-99", Step: 99, WorldSize: 1},
		events.CheckpointAborted{Attempt: 1, Checkpoint: "step-99.a1", Reason: "deadline"})
	s.catchUp()
	for limit := 1; limit < 9; limit++ {
		for _, all := range []bool{false, true} {
			whole := agree(t, s, Checkpoints, Params{Run: "sweep", All: all})
			got := pages(t, s, Checkpoints, Params{Run: "sweep", All: all, Limit: limit}, func(c projections.Checkpoint) string { return fmt.Sprint(c.BegunSeq) })
			if !reflect.DeepEqual(got, whole) || len(whole) < 16 {
				t.Errorf("pages of %d have %d checkpoints, the list has %d", limit, len(got), len(whole))
			}
		}
		if got := pages(t, s, Runs, Params{Limit: limit}, func(r projections.Run) string { return r.Name }); len(got) != 3 {
			t.Errorf("pages of %d have %d runs", limit, len(got))
		}
		jobs := pages(t, s, Jobs, Params{Run: "sweep", Limit: limit}, func(j projections.Job) string { return j.ID })
		if !reflect.DeepEqual(jobs, agree(t, s, Jobs, Params{Run: "sweep"})) || len(jobs) != 7 {
			t.Errorf("pages of %d have the jobs %+v", limit, jobs)
		}
		main := Params{Run: "run", Trial: projections.DefaultTrial, Attempt: 1, Limit: limit}
		if got := pages(t, s, Attempts, main, func(a projections.Attempt) string { return fmt.Sprint(a.Attempt) }); len(got) != 2 {
			t.Errorf("pages of %d have %d attempts", limit, len(got))
		}
		ranks := pages(t, s, Workers, main, func(w projections.Worker) string { return fmt.Sprint(w.Rank) })
		if !slices.EqualFunc(ranks, []int{0, 1}, func(w projections.Worker, rank int) bool { return w.Rank == rank }) {
			t.Errorf("pages of %d have the ranks %+v", limit, ranks)
		}
	}
	for _, bad := range []struct {
		query string
		p     Params
	}{
		{Checkpoints.Name, Params{Run: "sweep", After: "x"}},
		{Checkpoints.Name, Params{Run: "sweep", After: "0"}},
		{Workers.Name, Params{Run: "run", Trial: projections.DefaultTrial, Attempt: 1, After: "x"}},
		{Jobs.Name, Params{Run: "sweep", After: "gone"}},
	} {
		if _, err := s.client().Answer(t.Context(), bad.query, bad.p); !errors.Is(err, projections.ErrReference) && !errors.Is(err, projections.ErrNotFound) {
			t.Errorf("%s of %+v: %v", bad.query, bad.p, err)
		}
	}
	if status, _, body := get(t, s, http.MethodGet, "/v1/runs?limit=-1"); status != 400 || !strings.Contains(body, "limit") {
		t.Errorf("a negative limit: %d %s", status, body)
	}
}

// A save has its ranks' parts, and points have numbers.
func TestSaveAndPoints(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	s.story()
	s.record("run", projections.DefaultTrial,
		events.CheckpointBegun{Attempt: 2, Checkpoint: "step-7.a2", Name: "step-7", Step: 7, WorldSize: 2},
		events.WriteSealed{Attempt: 2, Checkpoint: "step-7.a2", Rank: 0, Waited: seconds(3), Copied: seconds(1)},
		events.WriteSealed{Attempt: 2, Checkpoint: "step-7.a2", Rank: 1, Copied: seconds(2)},
		events.WriteCompleted{Attempt: 2, Checkpoint: "step-7.a2", Rank: 0, Queued: seconds(9), Digest: seconds(0.5), Write: seconds(1), Sync: seconds(0.25)},
		events.CheckpointAborted{Attempt: 2, Checkpoint: "step-7.a2", Reason: "deadline"})
	s.catchUp()
	got := agree(t, s, Save, Params{Ref: "run@step-7.a2"})
	want := &projections.Phases{
		Waited: seconds(3), Copied: seconds(2), Queued: seconds(9), Digest: seconds(0.5), Write: seconds(1), Sync: seconds(0.25),
		Slowest: 0, SlowestTook: 2.75,
	}
	if c := got.Checkpoint; c.State != projections.Aborted || !reflect.DeepEqual(c.Phases, want) || c.ManifestTook != nil {
		t.Errorf("the aborted save is %+v with %+v", c, c.Phases)
	}
	if len(got.Writes) != 2 || got.Writes[0].Node != 0 || got.Writes[1].Node != -1 || got.Writes[1].Waited != nil || *got.Writes[1].Copied != 2 || got.Writes[1].Write.Write != nil {
		t.Errorf("writes %+v", got.Writes)
	}
	// Events without durations are unknown, not zero.
	if old := agree(t, s, Save, Params{Ref: "run@step-1.a1"}); old.Checkpoint.Phases != nil || len(old.Writes) != 1 || old.Writes[0].Write.Write != nil {
		t.Errorf("a save without durations is %+v", old)
	}
	table := agree(t, s, Points, Params{Run: "run", Trial: projections.DefaultTrial, All: true})
	loss := table.Lines[0].Metrics["loss"]
	if len(table.Lines) != 2 || !table.Lines[1].Hidden || table.Lines[1].Attempt != 1 || !reflect.DeepEqual(loss.X, []int{1, 2, 3}) || *loss.Last[2] != 0.1 {
		t.Errorf("points %+v, loss %+v", table, loss)
	}
	if nan := table.Lines[0].Metrics["nan"]; nan == nil || nan.NonFinite[0] != 1 || nan.Last[0] != nil || nan.Min[0] != nil {
		t.Errorf("NaN is %+v", nan)
	}
	if !slices.Contains(table.Names, "ok") || table.Lines[0].Metrics["ok"] != nil {
		t.Errorf("a boolean is among the points: %+v", table)
	}
}

func seconds(s float64) *float64 { return &s }
