package answer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/internal/insight"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/projections"
)

// Named returns the run that RUN or RUN/TRIAL names, and the trial: "" for RUN. The whole name is
// tried as a run first, because names of runs may contain "/".
func Named(ctx context.Context, views query.Source, name string) (run, trial string, err error) {
	unknown := KnownRun(ctx, views, name)
	if !errors.Is(unknown, projections.ErrNotFound) {
		return name, "", unknown
	}
	for end := strings.LastIndexByte(name, '/'); end > 0; end = strings.LastIndexByte(name[:end], '/') {
		run, trial := name[:end], name[end+1:]
		switch _, err := query.Ask(ctx, views, query.Trial, query.Params{Run: run, Trial: trial}); {
		case err == nil:
			return run, trial, nil
		case !errors.Is(err, projections.ErrNotFound):
			return "", "", err
		case KnownRun(ctx, views, run) == nil: // the text names its trials
			return "", "", err
		}
	}
	return "", "", unknown
}

// TrialOf returns the name of the trial that a run's name stands for if trial is empty: its
// default trial, or its only one.
func TrialOf(ctx context.Context, views query.Source, run, trial string) (string, error) {
	if trial != "" {
		return trial, nil
	}
	if err := KnownRun(ctx, views, run); err != nil {
		return "", err
	}
	trials, err := query.Ask(ctx, views, query.Trials, query.Params{Run: run})
	if err != nil {
		return "", err
	}
	var names []string
	for _, t := range trials {
		names = append(names, t.Name)
	}
	switch t, chosen := insight.ChooseTrial(trials); {
	case chosen:
		return t.Name, nil
	case len(names) == 0:
		return "", &projections.NotFoundError{What: "trial of run", Ref: run, Hint: "there is none yet"}
	}
	return "", problem.Errorf(problem.Invalid, "run %q has several trials: name one, such as %q, of %q", run, run+"/"+names[0], names)
}

// Lineage returns the trials that forks connect with a trial of a run.
func Lineage(ctx context.Context, from From, run, trial string) (insight.Lineage, error) {
	trial, err := TrialOf(ctx, from.Views, run, trial)
	if err != nil {
		return insight.Lineage{}, err
	}
	if _, err := query.Ask(ctx, from.Views, query.Trial, query.Params{Run: run, Trial: trial}); err != nil {
		return insight.Lineage{}, err
	}
	runs, err := query.Ask(ctx, from.Views, query.Runs, query.Params{})
	if err != nil {
		return insight.Lineage{}, err
	}
	var all []projections.Trial
	for _, r := range runs {
		trials, err := query.Ask(ctx, from.Views, query.Trials, query.Params{Run: r.Name})
		if err != nil {
			return insight.Lineage{}, err
		}
		all = append(all, trials...)
	}
	return insight.LineageOf(all, run, trial), nil
}

// Metrics finds the trial and queries its metrics. A metric that was not reported in the range
// is an error, which lists the metrics that were.
func Metrics(ctx context.Context, views query.Source, p query.Params) (projections.MetricsTable, error) {
	var err error
	if p.Trial, err = TrialOf(ctx, views, p.Run, p.Trial); err != nil {
		return projections.MetricsTable{}, err
	}
	table, err := query.Ask(ctx, views, query.Metrics, p)
	if err != nil {
		return table, err
	}
	for _, name := range p.Metrics {
		if !slices.Contains(table.Names, name) {
			return table, &projections.NotFoundError{
				What: "metric", Ref: name,
				Hint: fmt.Sprintf("metrics of these iterations: %q", table.Names),
			}
		}
	}
	return table, nil
}
