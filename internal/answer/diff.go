package answer

import (
	"context"
	"errors"
	"fmt"

	"github.com/ckptstore/ckptstore/internal/insight"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// Compare compares two trials, each named by RUN or RUN/TRIAL, or two checkpoints, each named
// by any other reference. metrics restricts a comparison of trials to some metrics.
func Compare(ctx context.Context, s *store.Store, views query.Source, refs [2]string, metrics []string) (d insight.Diff, err error) {
	var sides [2]subject
	for i, ref := range refs {
		if sides[i], err = subjectOf(ctx, views, ref); err != nil {
			return d, err
		}
	}
	x, y := sides[0], sides[1]
	switch {
	case (x.trial == nil) != (y.trial == nil):
		return d, problem.Errorf(problem.Invalid, "%s is %s and %s is %s; compare two runs or two checkpoints (RUN@latest is the newest checkpoint of a run)", refs[0], x, refs[1], y)
	case x.trial == nil && len(metrics) > 0:
		return d, problem.Errorf(problem.Invalid, "--metric is for trials, and %s is a checkpoint", refs[0])
	case x.trial != nil:
		d, err = compareTrials(ctx, views, x, y, metrics)
	default:
		d, err = compareCheckpoints(ctx, s, x.checkpoint, y.checkpoint)
	}
	d.Store = s.ID
	if err == nil {
		d.CommonAncestor, err = commonAncestor(ctx, views, x.checkpoint, y.checkpoint)
	}
	return d, err
}

func compareTrials(ctx context.Context, views query.Source, x, y subject, metrics []string) (insight.Diff, error) {
	rows := [2]insight.TrialRows{{Trial: *x.trial, Head: x.checkpoint}, {Trial: *y.trial, Head: y.checkpoint}}
	for i := range rows {
		var err error
		t := rows[i].Trial
		if rows[i].Reports, err = query.Ask(ctx, views, query.Reports, query.Params{Run: t.Run, Trial: t.Name}); err != nil {
			return insight.Diff{}, err
		}
	}
	return insight.CompareTrials(rows[0], rows[1], metrics)
}

// compareCheckpoints compares two checkpoints by their manifests and indexes.
func compareCheckpoints(ctx context.Context, s *store.Store, x, y projections.Checkpoint) (insight.Diff, error) {
	inX, err := storedIn(ctx, s, x)
	if err != nil {
		return insight.Diff{}, err
	}
	inY, err := storedIn(ctx, s, y)
	if err != nil {
		return insight.Diff{}, err
	}
	return insight.CompareCheckpoints(x, y, inX, inY), nil
}

// storedIn returns the contents of a checkpoint with their digests. It reads no data.
func storedIn(ctx context.Context, s *store.Store, c projections.Checkpoint) ([]insight.Content, error) {
	r, err := s.ReaderOf(c)
	if err != nil {
		return nil, err
	}
	m, err := r.ReadMetadata(ctx)
	if err == nil {
		err = r.SetUp(ctx, m, true)
	}
	if err != nil {
		return nil, err
	}
	contents, err := r.Contents(ctx)
	if err != nil {
		return nil, err
	}
	out := make([]insight.Content, len(contents))
	for i, c := range contents {
		out[i] = insight.Content{Rank: c.Rank, Item: c.Item, Digest: c.Digest}
	}
	return out, nil
}

// subject is an argument of diff: a trial with the head of its line, if there is one,
// or a checkpoint.
type subject struct {
	trial      *projections.Trial // nil for a checkpoint
	checkpoint projections.Checkpoint
}

// String returns the kind of a subject.
func (s subject) String() string {
	if s.trial != nil {
		return "a run"
	}
	return "a checkpoint"
}

// subjectOf resolves RUN, RUN/TRIAL, or the reference of a checkpoint, in this order.
func subjectOf(ctx context.Context, views query.Source, ref string) (subject, error) {
	run, trial, err := Named(ctx, views, ref)
	if err == nil {
		if trial, err = TrialOf(ctx, views, run, trial); err != nil {
			return subject{}, err
		}
		t, err := query.Ask(ctx, views, query.Trial, query.Params{Run: run, Trial: trial})
		if err != nil {
			return subject{}, err
		}
		return trialSubject(ctx, views, t)
	}
	if !errors.Is(err, projections.ErrNotFound) {
		return subject{}, err
	}
	c, err := query.Ask(ctx, views, query.Resolve, query.Params{Ref: ref})
	if err == nil && c.State != projections.Committed {
		err = fmt.Errorf("%w: checkpoint %s@%s is %s and cannot be compared", projections.ErrNotFound, c.Run, c.ID, c.State)
	}
	return subject{checkpoint: c}, err
}

func trialSubject(ctx context.Context, views query.Source, t projections.Trial) (subject, error) {
	s := subject{trial: &t}
	if t.Head == "" || t.HeadSeq == 0 { // none of its own
		return s, nil
	}
	var err error
	s.checkpoint, err = query.Ask(ctx, views, query.Resolve, query.Params{Ref: t.Run + "/" + t.Name + "@" + t.Head})
	return s, err
}

// commonAncestor returns the newest checkpoint from which both descend, or "".
func commonAncestor(ctx context.Context, views query.Source, x, y projections.Checkpoint) (string, error) {
	if x.ID == "" || y.ID == "" {
		return "", nil
	}
	var known []projections.Checkpoint
	var trials []projections.Trial
	asked := map[string]bool{}
	for wanted := []string{x.Run, y.Run}; len(wanted) > 0; wanted = wanted[1:] {
		if asked[wanted[0]] {
			continue
		}
		asked[wanted[0]] = true
		rows, err := query.Ask(ctx, views, query.Checkpoints, query.Params{Run: wanted[0], All: true})
		if err != nil {
			return "", err
		}
		of, err := query.Ask(ctx, views, query.Trials, query.Params{Run: wanted[0]})
		if err != nil {
			return "", err
		}
		for _, t := range of {
			if t.Parent != nil {
				wanted = append(wanted, t.Parent.Run)
			}
		}
		known, trials = append(known, rows...), append(trials, of...)
	}
	if c, found := projections.CommonAncestor(x, y, known, trials); found {
		return c.Run + "/" + c.Trial + "@" + c.ID, nil
	}
	return "", nil
}
