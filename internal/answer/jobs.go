package answer

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/internal/insight"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// From is where an answer about jobs is read.
type From struct {
	Store *store.Store
	Views query.Source
	// Now is the time until which running jobs have taken.
	Now time.Time
	// Past is set for views as of a moment. No lease is asked then: the newest job of a run
	// that has not ended counts as running.
	Past bool
}

// Live returns where answers about a store as it is now are read.
func Live(s *store.Store) From { return From{Store: s, Views: s.Views(), Now: time.Now()} }

// JobsListing is the answer to `jobs`.
type JobsListing struct {
	Store string        `json:"store"`
	Jobs  []insight.Job `json:"jobs"`
}

// Jobs returns the jobs of a run, or of all runs if run is empty, the newest first, and the
// rows that they follow from.
func Jobs(ctx context.Context, from From, run string) (JobsListing, []insight.RunJobs, error) {
	l := JobsListing{Store: from.Store.ID, Jobs: []insight.Job{}}
	if run != "" {
		if err := KnownRun(ctx, from.Views, run); err != nil {
			return l, nil, err
		}
	}
	runs, err := readRuns(ctx, from, run, query.Launches)
	if err != nil {
		return l, nil, err
	}
	for _, r := range runs {
		l.Jobs = append(l.Jobs, r.List(from.Now)...)
	}
	slices.SortStableFunc(l.Jobs, func(x, y insight.Job) int { return y.StartedAt.Compare(x.StartedAt) })
	return l, runs, nil
}

// ReadRun reads the jobs of a run.
func ReadRun(ctx context.Context, from From, run string) (insight.RunJobs, error) {
	return one(run)(readRuns(ctx, from, run, query.Launches))
}

// ReadNewest reads the newest job of a run.
func ReadNewest(ctx context.Context, from From, run string) (insight.RunJobs, error) {
	return one(run)(readRuns(ctx, from, run, query.NewestLaunches))
}

// ReadAllNewest reads the newest job of each run.
func ReadAllNewest(ctx context.Context, from From) ([]insight.RunJobs, error) {
	return readRuns(ctx, from, "", query.NewestLaunches)
}

// one returns the rows of a run; without jobs if it has none.
func one(run string) func([]insight.RunJobs, error) (insight.RunJobs, error) {
	return func(runs []insight.RunJobs, err error) (insight.RunJobs, error) {
		if err != nil || len(runs) == 0 {
			return insight.RunJobs{Run: run}, err
		}
		return runs[0], nil
	}
}

// readRuns reads the jobs of a run, or of all runs, with one query. For a run with
// a job that has not ended, it checks the live job and then reads the jobs again: a
// job that has still not ended was live at the check, or is lost.
func readRuns(ctx context.Context, from From, run string, launches query.Query[[]projections.Launches]) ([]insight.RunJobs, error) {
	rows, err := query.Ask(ctx, from.Views, launches, query.Params{Run: run})
	if err != nil {
		return nil, err
	}
	runs := make([]insight.RunJobs, len(rows))
	for i, row := range rows {
		r := &runs[i]
		r.Take(row)
		if open := slices.ContainsFunc(r.Jobs, func(j projections.Job) bool { return !j.Ended }); !open {
			continue
		}
		if from.Past {
			if newest := r.Jobs[0]; !newest.Ended {
				r.Live = newest.ID
			}
			continue
		}
		if err := checkLive(ctx, from, r, launches); err != nil {
			return nil, err
		}
	}
	return runs, nil
}

// mostChecks is how often the live job of a run is checked while new jobs start.
const mostChecks = 3

// checkLive checks the live job of a run, and reads its jobs again. Jobs that started after the
// check, which would count as lost, are dropped. If none is left, it checks again.
func checkLive(ctx context.Context, from From, r *insight.RunJobs, launches query.Query[[]projections.Launches]) error {
	for check := 1; ; check++ {
		before := r.Jobs
		live, err := from.Store.LiveJob(ctx, r.Run)
		if err != nil {
			return err
		}
		r.Live = ""
		if live != nil {
			r.Live = live.Job
		}
		again, err := query.Ask(ctx, from.Views, launches, query.Params{Run: r.Run})
		if err != nil {
			return err
		}
		if len(again) > 0 {
			r.Take(again[0])
		}
		kept := slices.DeleteFunc(slices.Clone(r.Jobs), func(j projections.Job) bool {
			return !slices.ContainsFunc(before, func(b projections.Job) bool { return b.ID == j.ID })
		})
		if len(kept) > 0 || check == mostChecks {
			r.Jobs = kept
			return nil
		}
	}
}

// Standing is how the time of a run was used, and what it would cost to kill it now.
type Standing struct {
	Run     string            `json:"run"`
	State   string            `json:"state"` // of its newest job; empty without one
	Usage   projections.Usage `json:"usage"`
	Goodput *float64          `json:"goodput,omitempty"` // the part of the time that led to the present
	// KilledNow has one verdict for each trial of the live job; none if no job is live.
	KilledNow []insight.KilledNow `json:"killed_now,omitempty"`
	// LastEnd is the last end of an attempt of the newest job; nil: none has ended.
	LastEnd *insight.AttemptEnd `json:"last_end,omitempty"`
}

// StandingOf reads the standing of a run.
func StandingOf(ctx context.Context, from From, run string) (*Standing, error) {
	r, err := ReadNewest(ctx, from, run)
	if err != nil {
		return nil, err
	}
	out := &Standing{Run: run, Usage: r.Usage}
	if part, ok := insight.Goodput(r.Usage); ok {
		out.Goodput = &part
	}
	jobs := r.List(from.Now)
	if len(jobs) == 0 {
		return out, nil
	}
	out.LastEnd = jobs[0].LastEnd
	if out.State = jobs[0].State; jobs[0].Over() {
		return out, nil
	}
	now, err := query.Ask(ctx, from.Views, query.Standing, query.Params{Run: run})
	if err != nil {
		return nil, err
	}
	for _, t := range now.Trials {
		if t.Trial.Job == r.Live {
			out.KilledNow = append(out.KilledNow, insight.IfKilled(t))
		}
	}
	return out, nil
}

// FindJob returns the job with an ID, given in full or by its beginning or end. For ""
// it returns the newest job.
func FindJob(r insight.RunJobs, run, id string) (projections.Job, error) {
	var found []projections.Job
	for _, j := range r.Jobs {
		switch {
		case id == "" || j.ID == id:
			return j, nil
		case strings.HasPrefix(j.ID, id) || strings.HasSuffix(j.ID, id):
			found = append(found, j)
		}
	}
	switch {
	case len(found) == 1:
		return found[0], nil
	case len(found) > 1:
		return projections.Job{}, problem.Errorf(problem.Invalid, "--job %q: run %q has %d such jobs; give more of the ID, see `ckptstore jobs %s -o wide`", id, run, len(found), run)
	case id == "":
		return projections.Job{}, &projections.NotFoundError{What: "job of run", Ref: run, Hint: fmt.Sprintf("it has none yet; `trainer run --name %s` starts one", run)}
	}
	return projections.Job{}, &projections.NotFoundError{What: "job of run " + run, Ref: id, Hint: fmt.Sprintf("`ckptstore jobs %s -o wide` lists them", run)}
}

// JobOver returns a job, and whether it has ended or is lost.
func JobOver(ctx context.Context, from From, run, id string) (insight.Job, bool, error) {
	r, err := ReadRun(ctx, from, run)
	if err != nil {
		return insight.Job{}, false, err
	}
	for _, j := range r.List(from.Now) {
		if j.Job == id {
			return j, j.Over(), nil
		}
	}
	return insight.Job{}, false, &projections.NotFoundError{What: "job of run " + run, Ref: id, Hint: "it was there a moment ago; the log has changed"}
}

// NodesListing is the answer to `nodes`.
type NodesListing struct {
	Store string         `json:"store"`
	Run   string         `json:"run"`
	Job   string         `json:"job"`
	Nodes []insight.Node `json:"nodes"`
	// LastEnd is the last end of an attempt of the job; nil: none has ended.
	LastEnd *insight.AttemptEnd `json:"last_end,omitempty"`
}

// Nodes returns the nodes of a job of a run: of the newest one, if id is empty.
func Nodes(ctx context.Context, from From, run, id string) (NodesListing, error) {
	l := NodesListing{Store: from.Store.ID, Run: run, Nodes: []insight.Node{}}
	if err := KnownRun(ctx, from.Views, run); err != nil {
		return l, err
	}
	r, err := ReadRun(ctx, from, run)
	if err != nil {
		return l, err
	}
	job, err := FindJob(r, run, id)
	if err != nil {
		return l, err
	}
	var workers []projections.Worker
	if group, found := r.NewestAttempt(job.ID); found {
		p := query.Params{Run: run, Trial: group.Trial, Attempt: group.Attempt}
		if workers, err = query.Ask(ctx, from.Views, query.Workers, p); err != nil {
			return l, err
		}
	}
	replicas, err := query.Ask(ctx, from.Views, query.Replicas, query.Params{Run: run})
	if err != nil {
		return l, err
	}
	l.Job, l.Nodes = job.ID, r.Nodes(job, workers)
	r.Copied(job, l.Nodes, replicas)
	for _, j := range r.List(from.Now) {
		if j.Job == job.ID {
			l.LastEnd = j.LastEnd
		}
	}
	return l, nil
}

// NewestRun returns the run of the job that started last.
func NewestRun(ctx context.Context, from From) (string, error) {
	runs, err := query.Ask(ctx, from.Views, query.Runs, query.Params{})
	if err != nil {
		return "", err
	}
	var newest projections.Run
	for _, r := range runs {
		if r.StartedSeq > newest.StartedSeq {
			newest = r
		}
	}
	if newest.Name == "" {
		return "", &projections.NotFoundError{What: "job in store", Ref: from.Store.ID, Hint: "`trainer run` starts one"}
	}
	return newest.Name, nil
}

// Stopped is the answer to `stop` and `preempt`.
type Stopped struct {
	Run     string       `json:"run"`
	Job     string       `json:"job"`
	Host    string       `json:"host"`
	PID     int          `json:"pid"`
	Preempt bool         `json:"preempt"` // the job saves first
	Reason  string       `json:"reason"`
	Ended   *insight.Job `json:"ended,omitempty"` // how the job ended, if the caller waited for it
}

// Forked is the answer to `fork`.
type Forked struct {
	Run    string         `json:"run"`
	Trial  string         `json:"trial"`
	Parent string         `json:"parent"` // the reference to the checkpoint
	Config map[string]any `json:"config"`
}

// ForkedFrom returns the answer for the trial of a new run.
func ForkedFrom(t projections.Trial) Forked {
	out := Forked{Run: t.Run, Trial: t.Name, Config: t.Config}
	if t.Parent != nil {
		out.Parent = projections.ParentRef(*t.Parent)
	}
	if out.Config == nil {
		out.Config = map[string]any{}
	}
	return out
}
