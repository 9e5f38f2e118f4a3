package api

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/answer"
	"github.com/ckptstore/ckptstore/internal/insight"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// Store describes the store and the server.
type Store struct {
	Store    string `json:"store"`
	Location string `json:"location"`
	Sequence uint64 `json:"sequence"` // of the newest event
	Version  string `json:"version"`  // of the program
	User     string `json:"user"`     // who asks
	Role     string `json:"role" enum:"reader,operator,admin,auditor"`
	ReadOnly bool   `json:"read_only"` // only receipts are read: there are no events, and no decisions
}

// RunSummary is a run in a list.
type RunSummary struct {
	Run        string       `json:"run"`
	State      string       `json:"state" enum:"running,stopping,ended,lost,none"` // of the newest job
	Jobs       int          `json:"jobs"`
	Job        *insight.Job `json:"job,omitempty"` // the newest
	Trials     int          `json:"trials"`
	Trial      string       `json:"trial,omitempty"` // that the run's name stands for; the members below are about it
	Status     string       `json:"status,omitempty"`
	Attempt    int          `json:"attempt"`
	WorldSize  int          `json:"world_size"`
	Iterations int          `json:"iterations"` // of the line
	Step       *int64       `json:"step,omitempty"`
	ReportedAt time.Time    `json:"reported_at,omitzero"`
	// Metrics are those of the last report.
	Metrics map[string]any `json:"metrics,omitempty"`
	// Safe is the newest committed checkpoint of the line.
	Safe *SafeAt `json:"safe,omitempty"`
	// KilledNow is what it would cost to kill the trial now; only while its job runs.
	KilledNow *insight.KilledNow `json:"killed_now,omitempty"`
	Risks     []insight.Risk     `json:"risks"`
	CreatedAt time.Time          `json:"created_at"`
	LaneSeq   uint64             `json:"lane_seq,omitempty"` // the trial's last decision, for If-Match
	Problem   string             `json:"problem,omitempty"`  // why the run cannot be read
}

// SafeAt is the checkpoint that a run would continue from.
type SafeAt struct {
	Checkpoint  string    `json:"checkpoint"`
	Step        int64     `json:"step"`
	Sequence    uint64    `json:"sequence"`
	CommittedAt time.Time `json:"committed_at"`
}

// RunList is a page of runs, by name.
type RunList struct {
	Runs []RunSummary `json:"runs"`
	Next string       `json:"next,omitempty"` // of the next page
}

// RunDetail is one run.
type RunDetail struct {
	RunSummary
	Config map[string]any `json:"config"` // of the trial that the run's name stands for
	Parent string         `json:"parent,omitempty"`
}

// Lists of rows, in pages.
type (
	// TrialList are the trials of a run, by name.
	TrialList struct {
		Trials []projections.Trial `json:"trials"`
		Next   string              `json:"next,omitempty"` // of the next page
	}
	// AttemptList are the attempts of a trial, the oldest first.
	AttemptList struct {
		Trial    string                `json:"trial"`
		Attempts []projections.Attempt `json:"attempts"`
		Next     string                `json:"next,omitempty"` // of the next page
	}
	// JobsListing are the jobs of a run, the newest first.
	JobsListing struct {
		answer.JobsListing
		Next string `json:"next,omitempty"` // of the next page
	}
	// WorkerList are the workers of an attempt, by rank.
	WorkerList struct {
		Trial   string               `json:"trial"`
		Attempt int                  `json:"attempt"`
		Workers []projections.Worker `json:"workers"`
		Next    string               `json:"next,omitempty"` // of the next page
	}
	// RestoreList are the loads of an attempt, in order.
	RestoreList struct {
		Trial    string                `json:"trial"`
		Attempt  int                   `json:"attempt"`
		Restores []projections.Restore `json:"restores"`
		Next     string                `json:"next,omitempty"` // of the next page
	}
	// RiskList is what may cost work soon.
	RiskList struct {
		AtRisk []insight.Risk `json:"at_risk"`
	}
)

// Inputs of the reads.
type (
	// OfStore is the input of a GET without parameters of its own.
	OfStore struct{ Moment }
	// OfNow is OfStore for an answer that is of now whatever as_of is.
	OfNow struct{ Moment }
	// OfRuns is the input of the list of runs.
	OfRuns struct{ Paged }
	// OfRun names a run.
	OfRun struct {
		Moment
		Run string `path:"run"`
	}
	// OfPaged names a run whose rows come in pages.
	OfPaged struct {
		Paged
		Run string `path:"run"`
	}
	// OfTrial names a trial of a run.
	OfTrial struct {
		Paged
		Run   string `path:"run"`
		Trial string `query:"trial" doc:"Of the run, if it has several"`
	}
	// OfAttempt names an attempt.
	OfAttempt struct {
		Paged
		Run     string `path:"run"`
		Trial   string `query:"trial" doc:"Of the run, if it has several"`
		Attempt int    `query:"attempt" minimum:"1" doc:"Default: the newest"`
	}
	// OfJob names a job of a run.
	OfJob struct {
		Moment
		Run string `path:"run"`
		Job string `query:"job" doc:"ID of a job, or the beginning or end of one; default: the newest"`
	}
	// OfLineage names a trial whose relatives are listed.
	OfLineage struct {
		Moment
		Run   string `path:"run"`
		Trial string `query:"trial" doc:"Of the run, if it has several"`
	}
	// OfLogs selects lines of the output of a job.
	OfLogs struct {
		Moment
		Run      string `path:"run"`
		Job      string `query:"job" doc:"ID of a job, or the beginning or end of one; default: the newest"`
		Trial    string `query:"trial" doc:"Of a search: the output of each of its trials is apart"`
		Attempt  int    `query:"attempt" minimum:"1" doc:"Default: all attempts of the job"`
		Rank     int    `query:"rank" minimum:"-1" default:"-1" doc:"-1: all ranks"`
		Stream   string `query:"stream" enum:"out,err" doc:"Default: both"`
		Contains string `query:"contains" maxLength:"1000" doc:"Only lines with this text"`
		Lines    int    `query:"lines" minimum:"1" maximum:"1000" default:"200" doc:"Most lines, the last ones of the selection"`
	}
)

// readStore adds the reads about the whole store.
func (h *Handler) readStore() {
	get(h, "/store", "get-store", "store", "Describe the store and the server", "", func(ctx context.Context, from *at, _ *OfStore) (Store, error) {
		u := userOf(ctx)
		from.files = true // of now: the user and the program
		return Store{
			Store: h.store.ID, Location: h.store.Location, Sequence: from.Sequence, Version: h.o.Version,
			User: u.Name, Role: u.Role.String(), ReadOnly: h.store.Log == nil,
		}, nil
	})
	get(h, "/at-risk", "get-at-risk", "store", "List what may cost work soon",
		"Runs that train without a commit for three of their usual intervals, and a disk that is nearly full.",
		func(ctx context.Context, from *at, _ *OfStore) (RiskList, error) {
			from.files = true // of now: the disk
			return h.risks(ctx, from)
		})
}

// readRuns adds the reads about runs.
func (h *Handler) readRuns() {
	get(h, "/runs", "list-runs", "runs", "List the runs, by name", "", h.runs)
	get(h, "/runs/{run}", "get-run", "runs", "Describe a run", "", func(ctx context.Context, from *at, in *OfRun) (RunDetail, error) {
		return h.run(ctx, from, in.Run)
	})
	get(h, "/runs/{run}/trials", "list-trials", "runs", "List the trials of a run, by name", "", func(ctx context.Context, from *at, in *OfPaged) (out TrialList, err error) {
		if err := answer.KnownRun(ctx, from.Views, in.Run); err != nil {
			return out, err
		}
		out.Trials, out.Next, err = listPage(ctx, from, in.Paged, query.Trials, query.Params{Run: in.Run}, func(t projections.Trial) string { return t.Name })
		return out, err
	})
	get(h, "/runs/{run}/attempts", "list-attempts", "runs", "List the attempts of a trial, the oldest first", "", func(ctx context.Context, from *at, in *OfTrial) (out AttemptList, err error) {
		if out.Trial, err = answer.TrialOf(ctx, from.Views, in.Run, in.Trial); err != nil {
			return out, err
		}
		out.Attempts, out.Next, err = listPage(ctx, from, in.Paged, query.Attempts, query.Params{Run: in.Run, Trial: out.Trial},
			func(a projections.Attempt) string { return strconv.Itoa(a.Attempt) })
		return out, err
	})
	get(h, "/runs/{run}/jobs", "list-jobs", "runs", "List the jobs of a run, the newest first",
		"As `ckptstore jobs RUN --json`, in pages. As of a sequence, the newest job without an end counts as running: leases are not in the log.", h.jobs)
	get(h, "/runs/{run}/nodes", "list-nodes", "runs", "List the nodes of a job", "As `ckptstore nodes RUN --json`.",
		func(ctx context.Context, from *at, in *OfJob) (answer.NodesListing, error) {
			return answer.Nodes(ctx, from.From, in.Run, in.Job)
		})
	get(h, "/runs/{run}/workers", "list-workers", "runs", "List the workers of an attempt", "", func(ctx context.Context, from *at, in *OfAttempt) (out WorkerList, err error) { //nolint:dupl // two lists of one shape
		out.Trial, out.Attempt, out.Workers, out.Next, err = listOfAttempt(ctx, from, in, query.Workers, func(w projections.Worker) string { return strconv.Itoa(w.Rank) })
		return out, err
	})
	get(h, "/runs/{run}/restores", "list-restores", "runs", "List the loads of an attempt", "", func(ctx context.Context, from *at, in *OfAttempt) (out RestoreList, err error) { //nolint:dupl // two lists of one shape
		out.Trial, out.Attempt, out.Restores, out.Next, err = listOfAttempt(ctx, from, in, query.Restores, func(l projections.Restore) string { return strconv.Itoa(l.Load) })
		return out, err
	})
	get(h, "/runs/{run}/lineage", "get-lineage", "runs", "List the runs that forks connect with a run", "A tree: the root first, each fork after its parent, at most 150 trials.", h.lineage)
	get(h, "/runs/{run}/logs", "get-logs", "runs", "Read the last output of the workers of a job",
		"As `ckptstore logs RUN --tail N --json`, with at most 1 MiB of text. Output is in files, not in the log: as_of only chooses the job.",
		h.logs)
	get(h, "/runs/{run}/metrics", "get-metrics", "runs", "Read metrics in columns", metricsText, h.metrics)
}

func (h *Handler) lineage(ctx context.Context, from *at, in *OfLineage) (insight.Lineage, error) {
	done, err := h.reading(ctx) // the trials of all runs
	if err != nil {
		return insight.Lineage{}, err
	}
	defer done()
	return answer.Lineage(ctx, from.From, in.Run, in.Trial)
}

func (h *Handler) logs(ctx context.Context, from *at, in *OfLogs) (answer.LastLines, error) {
	done, err := take(ctx, h.output)
	if err != nil {
		return answer.LastLines{}, err
	}
	defer done()
	from.files = true
	return answer.Lines(ctx, from.From, answer.LinesQuery{
		Run: in.Run, Job: in.Job, Trial: in.Trial, Attempt: in.Attempt, Rank: in.Rank, Stream: in.Stream, Contains: in.Contains, Most: in.Lines, Below: h.o.Logs,
	})
}

// listOf makes an empty list of none.
func listOf[T any](rows []T) []T {
	if rows == nil {
		return []T{}
	}
	return rows
}

// listPage returns a page of a list, and the token of the next one. key is what [query.Params] want
// of the row before a page.
func listPage[T any](ctx context.Context, from *at, in Paged, rowsOf query.Query[[]T], p query.Params, key func(T) string) (rows []T, next string, err error) {
	begin, err := in.place()
	if err != nil {
		return listOf(rows), "", err
	}
	p.After, p.Limit = begin.Key, in.Limit+1
	rows, err = query.Ask(ctx, from.Views, rowsOf, p)
	if err != nil && in.Page != "" && (errors.Is(err, projections.ErrReference) || errors.Is(err, projections.ErrNotFound)) {
		err = fmt.Errorf("%w: %w", badPage(), err)
	}
	rows, next = cut(rows, in, from, key)
	return rows, next, err
}

// cut returns the rows of a page, at most its limit, and the token of the next page.
func cut[T any](rows []T, in Paged, from *at, key func(T) string) ([]T, string) {
	if len(rows) <= in.Limit {
		return listOf(rows), ""
	}
	rows = rows[:in.Limit]
	return rows, place{from.Sequence, key(rows[in.Limit-1])}.token()
}

// attemptOf returns the trial and the number of the attempt that an input names.
func attemptOf(ctx context.Context, from *at, in *OfAttempt) (trial string, attempt int, err error) {
	if trial, err = answer.TrialOf(ctx, from.Views, in.Run, in.Trial); err != nil || in.Attempt > 0 {
		return trial, in.Attempt, err
	}
	t, err := query.Ask(ctx, from.Views, query.Trial, query.Params{Run: in.Run, Trial: trial})
	return trial, t.Attempt, err
}

// jobs returns a page of the jobs of a run.
func (h *Handler) jobs(ctx context.Context, from *at, in *OfPaged) (out JobsListing, err error) {
	begin, err := in.place()
	if err != nil {
		return out, err
	}
	if out.JobsListing, _, err = answer.Jobs(ctx, from.From, in.Run); err != nil {
		return out, err
	}
	rows := out.Jobs
	if in.Page != "" {
		last := slices.IndexFunc(rows, func(j insight.Job) bool { return j.Job == begin.Key })
		if last < 0 {
			return out, badPage()
		}
		rows = rows[last+1:]
	}
	out.Jobs, out.Next = cut(rows, in.Paged, from, func(j insight.Job) string { return j.Job })
	return out, nil
}

func (h *Handler) runs(ctx context.Context, from *at, in *OfRuns) (RunList, error) {
	out := RunList{Runs: []RunSummary{}}
	rows, next, err := listPage(ctx, from, in.Paged, query.Runs, query.Params{}, func(r projections.Run) string { return r.Name })
	if err != nil {
		return out, err
	}
	out.Next = next
	for _, row := range rows {
		one, err := h.summary(ctx, from, row)
		if errors.Is(err, events.ErrNewer) {
			one, err = RunSummary{Run: row.Name, State: noJob, Jobs: row.Jobs, CreatedAt: row.CreatedAt, Risks: []insight.Risk{}, Problem: err.Error()}, nil
		}
		if err != nil {
			return out, err
		}
		out.Runs = append(out.Runs, one)
	}
	return out, nil
}

// noJob is the state of a run without a job.
const noJob = "none"

// summary reads the rows of a run. Their number does not grow with its jobs, checkpoints and
// reports.
func (h *Handler) summary(ctx context.Context, from *at, row projections.Run) (RunSummary, error) {
	out := RunSummary{Run: row.Name, State: noJob, Jobs: row.Jobs, CreatedAt: row.CreatedAt, Risks: []insight.Risk{}}
	r, err := answer.ReadNewest(ctx, from.From, row.Name)
	if err != nil {
		return out, err
	}
	if jobs := r.List(from.Now); len(jobs) > 0 {
		out.Job, out.State = &jobs[0], jobs[0].State
	}
	out.Trials = len(r.Trials())
	t, chosen := insight.ChooseTrial(r.Trials())
	if !chosen {
		return out, nil
	}
	if t, err = query.Ask(ctx, from.Views, query.Trial, query.Params{Run: row.Name, Trial: t.Name}); err != nil {
		return out, err
	}
	out.Trial, out.Status, out.Attempt, out.WorldSize = t.Name, string(t.Status), t.Attempt, t.WorldSize
	out.Iterations, out.Metrics, out.LaneSeq = t.Iterations, t.LastMetrics, t.LaneSeq
	p := query.Params{Run: row.Name, Trial: t.Name}
	last, err := query.Ask(ctx, from.Views, query.LastReport, p)
	if err != nil {
		return out, err
	}
	if last.Reports > 0 {
		out.Step, out.ReportedAt = &last.Step, last.Time
	}
	if t.HeadSeq > 0 {
		c, err := query.Ask(ctx, from.Views, query.Resolve, query.Params{Ref: row.Name + "/" + t.Name + "@" + t.Head})
		if err != nil {
			return out, err
		}
		out.Safe = &SafeAt{c.ID, c.Step, c.CommittedSeq, c.EndedAt}
	}
	if r.Live == "" {
		return out, nil
	}
	now, err := query.Ask(ctx, from.Views, query.Standing, query.Params{Run: row.Name})
	if err != nil {
		return out, err
	}
	for _, of := range now.Trials {
		if of.Trial.Name == t.Name && of.Trial.Job == r.Live {
			verdict := insight.IfKilled(of)
			out.KilledNow = &verdict
		}
	}
	if out.State != insight.Running {
		return out, nil
	}
	if risk, late := insight.NoCommit(now.Tally, out.Job.StartedAt, from.Now); late {
		out.Risks = append(out.Risks, risk)
	}
	return out, nil
}

func (h *Handler) run(ctx context.Context, from *at, name string) (out RunDetail, err error) {
	row, err := query.Ask(ctx, from.Views, query.Run, query.Params{Run: name})
	if err != nil {
		return out, err
	}
	if out.RunSummary, err = h.summary(ctx, from, row); err != nil {
		return out, err
	}
	out.Config, from.lane = map[string]any{}, out.LaneSeq
	if out.Trial == "" {
		return out, nil
	}
	t, err := query.Ask(ctx, from.Views, query.Trial, query.Params{Run: name, Trial: out.Trial})
	if t.Config != nil {
		out.Config = t.Config
	}
	if t.Parent != nil {
		out.Parent = projections.ParentRef(*t.Parent)
	}
	return out, err
}

// diskLimit bounds the look at a disk.
const diskLimit = 5 * time.Second

func (h *Handler) risks(ctx context.Context, from *at) (RiskList, error) {
	out := RiskList{AtRisk: []insight.Risk{}}
	runs, err := answer.ReadAllNewest(ctx, from.From)
	if err != nil {
		return out, err
	}
	largest := int64(0)
	for _, r := range runs {
		jobs := r.List(from.Now)
		if len(jobs) == 0 || jobs[0].State != insight.Running {
			continue
		}
		row, err := query.Ask(ctx, from.Views, query.Run, query.Params{Run: r.Run})
		if err != nil {
			return out, err
		}
		one, err := h.summary(ctx, from, row)
		if err != nil {
			return out, err
		}
		out.AtRisk = append(out.AtRisk, one.Risks...)
		if one.Safe != nil {
			c, err := store.Committed(ctx, from.Views, r.Run+"/"+one.Trial+"@"+one.Safe.Checkpoint)
			if err != nil {
				return out, err
			}
			largest = max(largest, c.Bytes)
		}
	}
	if from.Past {
		return out, nil // the disk of then is unknown
	}
	ctx, cancel := context.WithTimeout(ctx, diskLimit)
	defer cancel()
	use, err := h.store.Data.Usage(ctx)
	if errors.Is(err, errors.ErrUnsupported) {
		return out, nil // a bucket
	}
	if err != nil {
		return out, err
	}
	if risk, tight := insight.TightDisk(use.Free, use.Size, uint64(max(largest, 0))); tight {
		out.AtRisk = append(out.AtRisk, risk)
	}
	return out, nil
}

// listOfAttempt returns the attempt that a request names, or the newest one, and a page of its rows.
func listOfAttempt[Row any](ctx context.Context, from *at, in *OfAttempt, q query.Query[[]Row], key func(Row) string) (trial string, attempt int, rows []Row, next string, err error) {
	if trial, attempt, err = attemptOf(ctx, from, in); err != nil {
		return "", 0, nil, "", err
	}
	rows, next, err = listPage(ctx, from, in.Paged, q, query.Params{Run: in.Run, Trial: trial, Attempt: attempt}, key)
	return trial, attempt, rows, next, err
}
