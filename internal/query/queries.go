// Package query answers queries about a store over HTTP, for processes that do
// not own it.
//
//	query    one query: its name, and how rows answer it
//	params   the parameters of a query
//	Server   GET /v1/<query>?run=…&trial=…&ref=…&attempt=…&all=…&at_least=…
//	         for metrics and points also metric=… (repeated), from=…, until=…, points=…;
//	         for retention also metric=…; for lists also limit=…, after=…
//	Client   queries a server
//
// An answer is the JSON of the query's type. It covers at least the log up to
// sequence at_least. An error is {"error", "kind"} with status 400
// (bad_reference, ambiguous), 404 (not_found), 409 (newer: an event of the run is
// of a newer version), 503 (views behind or halted).
package query

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/ckptstore/ckptstore/planner/retention"
	"github.com/ckptstore/ckptstore/projections"
)

// Params are the parameters of a query, which ignores those that it does not
// need.
type Params struct {
	Run     string
	Trial   string
	Ref     string // a reference to a checkpoint
	Attempt int
	All     bool     // include hidden rows
	Metrics []string // names; none: all
	From    int      // first iteration along the line; 0: the first
	Until   int      // last iteration; 0: the last
	Points  int      // maximum number of rows; 0: no limit, for points 800
	Limit   int      // maximum number of rows of a list; 0: no limit
	After   string   // key of the last row of the page before; empty: the first page
}

// Query is one query and the type of its answer.
type Query[T any] struct {
	Name   string
	answer func(projections.Reader, Params) (T, error)
}

// The queries.
var (
	Runs = Query[[]projections.Run]{"runs", func(r projections.Reader, p Params) ([]projections.Run, error) {
		rows, err := projections.Runs(r)
		return page(rows, err, p, func(run projections.Run) bool { return run.Name <= p.After })
	}}
	Jobs = Query[[]projections.Job]{"jobs", func(r projections.Reader, p Params) ([]projections.Job, error) {
		rows, err := projections.Jobs(r, p.Run)
		return jobsPage(rows, err, p)
	}}
	// Launches is of one run, or of all with an empty one.
	Launches = Query[[]projections.Launches]{"launches", func(r projections.Reader, p Params) ([]projections.Launches, error) {
		return projections.AllLaunches(r, p.Run, false)
	}}
	// NewestLaunches is Launches with the newest job of each run alone: its cost does not grow with
	// the jobs of the past.
	NewestLaunches = Query[[]projections.Launches]{"newest_launches", func(r projections.Reader, p Params) ([]projections.Launches, error) {
		return projections.AllLaunches(r, p.Run, true)
	}}
	// Devices are those that were unhealthy, of one run or of all.
	Devices = Query[[]projections.Device]{"devices", func(r projections.Reader, p Params) ([]projections.Device, error) {
		return projections.Devices(r, p.Run)
	}}
	// Replicas are those of one run.
	Replicas = Query[[]projections.Replica]{"replicas", func(r projections.Reader, p Params) ([]projections.Replica, error) {
		return projections.Replicas(r, p.Run)
	}}
	Run = Query[projections.Run]{"run", func(r projections.Reader, p Params) (projections.Run, error) {
		return projections.GetRun(r, p.Run)
	}}
	Trials = Query[[]projections.Trial]{"trials", trialsPage}
	Trial  = Query[projections.Trial]{"trial", func(r projections.Reader, p Params) (projections.Trial, error) {
		return projections.GetTrial(r, p.Run, p.Trial)
	}}
	Attempts = Query[[]projections.Attempt]{"attempts", func(r projections.Reader, p Params) ([]projections.Attempt, error) {
		rows, err := projections.Attempts(r, p.Run, p.Trial)
		return pageByNumber(rows, err, p, func(a projections.Attempt) int { return a.Attempt })
	}}
	Workers = Query[[]projections.Worker]{"workers", func(r projections.Reader, p Params) ([]projections.Worker, error) {
		rows, err := projections.Workers(r, p.Run, p.Trial, p.Attempt)
		return pageByNumber(rows, err, p, func(w projections.Worker) int { return w.Rank })
	}}
	Checkpoints = Query[[]projections.Checkpoint]{"checkpoints", checkpointsPage}
	// Save is the save that a reference stands for, with its ranks' parts. With a run and a trial,
	// Ref is the ID of a checkpoint in any state.
	Save = Query[projections.Save]{"save", func(r projections.Reader, p Params) (projections.Save, error) {
		if p.Run != "" {
			return projections.GetSave(r, p.Run, p.Trial, p.Ref)
		}
		c, err := projections.Resolve(r, p.Ref)
		if err == nil {
			err = projections.Understood(r, c.Run)
		}
		if err != nil {
			return projections.Save{}, err
		}
		return projections.GetSave(r, c.Run, c.Trial, c.ID)
	}}
	// LastReport is the row of the newest report of the current line; without reports if there is
	// none.
	LastReport = Query[projections.MetricsRow]{"last_report", func(r projections.Reader, p Params) (row projections.MetricsRow, err error) {
		t, err := projections.GetTrial(r, p.Run, p.Trial)
		if err != nil || t.Iterations == 0 {
			return row, err
		}
		table, err := projections.Metrics(r, projections.MetricsRange{Run: p.Run, Trial: p.Trial, From: t.Iterations, Until: t.Iterations})
		if err == nil && len(table.Rows) > 0 {
			row = table.Rows[len(table.Rows)-1]
		}
		return row, err
	}}
	// Writes are those of the checkpoint with the ID Ref.
	Writes = Query[[]projections.Write]{"writes", func(r projections.Reader, p Params) ([]projections.Write, error) {
		return projections.Writes(r, p.Run, p.Trial, p.Ref)
	}}
	OpenCheckpoints = Query[[]projections.Checkpoint]{"open_checkpoints", func(r projections.Reader, p Params) ([]projections.Checkpoint, error) {
		return projections.OpenCheckpoints(r, p.Run, p.Trial)
	}}
	Resolve = Query[projections.Checkpoint]{"resolve", func(r projections.Reader, p Params) (projections.Checkpoint, error) {
		c, err := projections.Resolve(r, p.Ref)
		if err == nil {
			err = projections.Understood(r, c.Run)
		}
		return c, err
	}}
	Reports = Query[[]projections.Report]{"reports", func(r projections.Reader, p Params) ([]projections.Report, error) {
		return projections.Reports(r, p.Run, p.Trial)
	}}
	Metrics = Query[projections.MetricsTable]{"metrics", func(r projections.Reader, p Params) (projections.MetricsTable, error) {
		return projections.Metrics(r, projections.MetricsRange{
			Run: p.Run, Trial: p.Trial, Names: p.Metrics, From: p.From, Until: p.Until, Points: p.Points, All: p.All,
		})
	}}
	// Points are the numbers of a chart, of one attempt or, without one, of the line.
	Points = Query[projections.PointsTable]{"points", func(r projections.Reader, p Params) (projections.PointsTable, error) {
		q := projections.PointsRange{
			Run: p.Run, Trial: p.Trial, Names: p.Metrics, From: p.From, Until: p.Until, Points: p.Points, Attempt: p.Attempt, All: p.All,
		}
		if q.Points == 0 {
			q.Points = defaultPoints
		}
		return projections.Points(r, q)
	}}
	Restores = Query[[]projections.Restore]{"restores", func(r projections.Reader, p Params) ([]projections.Restore, error) {
		rows, err := projections.Restores(r, p.Run, p.Trial, p.Attempt)
		return pageByNumber(rows, err, p, func(l projections.Restore) int { return l.Load })
	}}
	Retention = Query[[]retention.Trial]{"retention", func(r projections.Reader, p Params) ([]retention.Trial, error) {
		trials, err := retention.Read(r, p.Run, p.Metrics)
		if err != nil {
			return nil, err
		}
		others, err := retention.Others(r)
		retention.Hold(trials, others)
		return trials, err
	}}
	// OwnRetention is Retention without the needs of other runs, for a collection
	// of many runs, which gets them once, by Needs.
	OwnRetention = Query[[]retention.Trial]{"retention_own", func(r projections.Reader, p Params) ([]retention.Trial, error) {
		return retention.Read(r, p.Run, p.Metrics)
	}}
	Needs = Query[[]retention.Need]{"needs", func(r projections.Reader, _ Params) ([]retention.Need, error) { return retention.Others(r) }}
	// Standing is that of one run.
	Standing = Query[projections.RunStanding]{"standing", func(r projections.Reader, p Params) (projections.RunStanding, error) {
		return projections.GetRunStanding(r, p.Run)
	}}
	Digest = Query[string]{"digest", func(r projections.Reader, _ Params) (string, error) {
		sum, err := projections.Digest(r)
		return fmt.Sprintf("%x", sum), err
	}}
)

// defaultPoints is the number of points of a chart.
const defaultPoints = 800

// answered returns the answer, if all events of its subject are known.
func (q Query[T]) answered(r projections.Reader, p Params) (out T, err error) {
	if p.Run != "" {
		if err := projections.Understood(r, p.Run); err != nil {
			return out, err
		}
	}
	return q.answer(r, p)
}

// answers is every query by name, for the server.
var answers = map[string]func(projections.Reader, Params) (any, error){
	Runs.Name: erase(Runs), Run.Name: erase(Run), Jobs.Name: erase(Jobs), Trials.Name: erase(Trials), Trial.Name: erase(Trial),
	Attempts.Name: erase(Attempts), Workers.Name: erase(Workers), Checkpoints.Name: erase(Checkpoints),
	OpenCheckpoints.Name: erase(OpenCheckpoints), Resolve.Name: erase(Resolve), Reports.Name: erase(Reports), Metrics.Name: erase(Metrics),
	Retention.Name: erase(Retention), OwnRetention.Name: erase(OwnRetention), Needs.Name: erase(Needs), Digest.Name: erase(Digest),
	Save.Name: erase(Save), Points.Name: erase(Points), Restores.Name: erase(Restores),
	Writes.Name: erase(Writes), LastReport.Name: erase(LastReport),
	Standing.Name: erase(Standing),
	Launches.Name: erase(Launches), NewestLaunches.Name: erase(NewestLaunches), Devices.Name: erase(Devices), Replicas.Name: erase(Replicas),
}

func erase[T any](q Query[T]) func(projections.Reader, Params) (any, error) {
	return func(r projections.Reader, p Params) (any, error) { return q.answered(r, p) }
}

// Source answers queries by name, as JSON.
type Source interface {
	// Answer covers at least the log at the time of the call.
	Answer(ctx context.Context, query string, p Params) (json.RawMessage, error)
}

// Rows is a source that may have the rows in this process. A query then reads
// them itself: encoding and decoding the answer took longer than finding it.
type Rows interface {
	// Read calls read with rows that cover at least the log at the time of the
	// call. It reports false if this process does not have them, or lost them
	// meanwhile: then the result of read is invalid.
	Read(ctx context.Context, read func(projections.Reader) error) (here bool, err error)
}

// Ask sends a query to a source.
func Ask[T any](ctx context.Context, from Source, q Query[T], p Params) (T, error) {
	var out T
	if rows, ok := from.(Rows); ok && q.answer != nil {
		here, err := rows.Read(ctx, func(r projections.Reader) (err error) {
			out, err = q.answered(r, p)
			return err
		})
		if here {
			return out, err
		}
	}
	data, err := from.Answer(ctx, q.Name, p)
	if err != nil {
		return out, err
	}
	if err := json.Unmarshal(data, &out); err != nil {
		return out, fmt.Errorf("decode the answer to %s: %w", q.Name, err)
	}
	return out, nil
}
