package answer

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/attest"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/projections"
)

// Attested returns the name of a checkpoint in attestations of a store.
func Attested(storeID string, c projections.Checkpoint) attest.Checkpoint {
	return attest.Checkpoint{
		Store: storeID, Run: c.Run, Trial: c.Trial, ID: c.ID, Step: c.Step, Sequence: c.CommittedSeq, Manifest: c.Manifest, Committed: c.EndedAt,
	}
}

// Training returns the job that made a committed checkpoint, and its parents.
func Training(ctx context.Context, storeID string, views query.Source, c projections.Checkpoint) (t attest.Training, err error) {
	t = attest.Training{Checkpoint: Attested(storeID, c), Attempt: c.Attempt, WorldSize: c.WorldSize}
	trial, err := query.Ask(ctx, views, query.Trial, query.Params{Run: c.Run, Trial: c.Trial})
	if err != nil {
		return t, err
	}
	t.Config = trial.Config
	attempts, err := query.Ask(ctx, views, query.Attempts, query.Params{Run: c.Run, Trial: c.Trial})
	if err != nil {
		return t, err
	}
	for _, a := range attempts {
		if a.Attempt == c.Attempt {
			t.Job = a.Job
		}
	}
	jobs, err := query.Ask(ctx, views, query.Jobs, query.Params{Run: c.Run})
	if err != nil {
		return t, err
	}
	for _, j := range jobs {
		if j.ID == t.Job {
			t.Host, t.Command, t.Flags, t.Resume, t.NProc, t.NNodes, t.Started = j.Host, j.Command, j.Flags, j.Resume, j.NProc, j.NNodes, j.StartedAt
		}
	}
	t.Parents, err = parentsOf(ctx, storeID, views, trial, c)
	return t, err
}

// ResolveRef returns the row of a checkpoint of any run.
func ResolveRef(ctx context.Context, views query.Source, ref events.CheckpointRef) (projections.Checkpoint, error) {
	return query.Ask(ctx, views, query.Resolve, query.Params{Ref: ref.String()})
}

// parentsOf returns the checkpoints that c follows from: its predecessor in the line, and
// those of other trials that its attempt had loaded when the save began.
func parentsOf(ctx context.Context, storeID string, views query.Source, trial projections.Trial, c projections.Checkpoint) ([]attest.Checkpoint, error) {
	var refs []string
	switch p := trial.Parent; {
	case c.Parent == "":
	case c.ParentSeq > 0:
		refs = append(refs, events.CheckpointRef{Run: c.Run, Trial: c.Trial, Checkpoint: c.Parent}.String())
	case p != nil && projections.ParentRef(*p) == c.Parent:
		refs = append(refs, events.CheckpointRef(*p).String())
	default:
		refs = append(refs, c.Parent) // with its run
	}
	loads, err := query.Ask(ctx, views, query.Restores, query.Params{Run: c.Run, Trial: c.Trial, Attempt: c.Attempt})
	if err != nil {
		return nil, err
	}
	for _, l := range loads {
		ref, other := LoadedFrom(c.Run, c.Trial, l)
		if other && l.BegunSeq < c.BegunSeq && l.Error == "" && !slices.Contains(refs, ref.String()) {
			refs = append(refs, ref.String())
		}
	}
	var out []attest.Checkpoint
	for _, ref := range refs {
		p, err := query.Ask(ctx, views, query.Resolve, query.Params{Ref: ref})
		switch {
		case errors.Is(err, projections.ErrNotFound) || errors.Is(err, projections.ErrReference):
			out = append(out, attest.Checkpoint{Store: storeID, ID: ref, Unresolved: err.Error()})
		case err != nil:
			return nil, err
		default:
			out = append(out, Attested(storeID, p))
		}
	}
	return out, nil
}

// LoadedFrom returns the checkpoint that a load of a trial has read, and whether it belongs
// to another trial.
func LoadedFrom(run, trial string, l projections.Restore) (ref events.CheckpointRef, other bool) {
	ref = events.CheckpointRef{Run: run, Trial: trial, Checkpoint: l.Checkpoint}
	if l.From == "" {
		return ref, false
	}
	ref.Run, ref.Trial = l.From, projections.DefaultTrial
	if at := strings.LastIndexByte(l.From, '/'); at >= 0 {
		ref.Run, ref.Trial = l.From[:at], l.From[at+1:]
	}
	return ref, true
}
