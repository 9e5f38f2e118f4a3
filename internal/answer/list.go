// Package answer holds the answers about a store that are the same on every way out: the
// objects that commands print with --json and that the HTTP API returns. A function reads
// rows, and files where an answer needs them, and applies the verdicts of package insight.
//
//	Past        the rows as of a moment of the log
//	List        the checkpoints of a run: `ls`
//	Show        one checkpoint: `show`
//	Compare     two runs or checkpoints: `diff`
//	Metrics     the metrics of a run: `metrics`
//	Lineage     the forks of a run, and what it was forked from
//	Jobs        the jobs of runs: `jobs`
//	Nodes       the nodes of a job: `nodes`
//	Lines       the last output of a job: `logs`
//	Marked …    what a decision did: `pin`, `tag`, `stop`, `fork`
//
// Errors tell the next step, and declare their kind for exit codes and HTTP statuses.
package answer

import (
	"context"
	"errors"
	"io/fs"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/insight"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store/collection"
	"github.com/ckptstore/ckptstore/projections"
)

// Warn reports, in the manner of [fmt.Printf], why a part of an answer is missing.
type Warn func(format string, values ...any)

// Listed is one checkpoint in a [Listing]. In a listing of receipts, members that receipts
// lack are omitted.
type Listed struct {
	Run         string    `json:"run"`
	Trial       string    `json:"trial"`
	ID          string    `json:"id"`
	Name        string    `json:"name"`
	Step        int64     `json:"step"`
	Attempt     int       `json:"attempt"`
	WorldSize   int       `json:"world_size"`
	State       string    `json:"state"`
	Bytes       int64     `json:"bytes"`
	Written     *int64    `json:"bytes_written,omitempty"`   // of Bytes: written by this save
	Reused      *int64    `json:"bytes_reused,omitempty"`    // of Bytes: stored before it
	Shared      *int64    `json:"bytes_shared,omitempty"`    // of its files: with links in other checkpoints
	Exclusive   *int64    `json:"bytes_exclusive,omitempty"` // of its files: without; deleting it frees them
	Manifest    string    `json:"manifest,omitempty"`
	Sequence    uint64    `json:"sequence,omitempty"` // of checkpoint.committed
	CommittedAt time.Time `json:"committed_at,omitzero"`
	BegunAt     time.Time `json:"begun_at,omitzero"`
	EndedAt     time.Time `json:"ended_at,omitzero"` // when it was committed or aborted
	Sealed      *int      `json:"sealed,omitempty"`  // ranks whose bytes are staged
	Superseded  *bool     `json:"superseded,omitempty"`
	Parent      string    `json:"parent,omitempty"`
	Reason      string    `json:"reason,omitempty"`
	Pinned      *bool     `json:"pinned,omitempty"`
	Tags        []string  `json:"tags,omitempty"`
}

// Ref returns the place of the checkpoint below the data directory.
func (c Listed) Ref() checkpoint.Ref { return checkpoint.RefOf(c.Run, c.Trial, c.ID) }

// Listing is the answer to `ls`.
type Listing struct {
	Store       string   `json:"store"`
	Offline     bool     `json:"offline"` // by receipts, without the log
	Checkpoints []Listed `json:"checkpoints"`
	// KilledNow is what it would cost to kill the trials of the run now; only with the name of a
	// run that has a live job.
	KilledNow []insight.KilledNow `json:"killed_now,omitempty"`
}

// ListedFrom returns the listed form of a row.
func ListedFrom(c projections.Checkpoint) Listed {
	out := Listed{
		Run: c.Run, Trial: c.Trial, ID: c.ID, Name: c.Name, Step: c.Step, Attempt: c.Attempt,
		WorldSize: c.WorldSize, State: string(c.State), Bytes: c.Bytes, Manifest: c.Manifest,
		Written: &c.BytesWritten, Reused: &c.BytesReused,
		Sequence: c.CommittedSeq, Superseded: &c.Superseded, Parent: c.Parent, Reason: c.Reason,
		Pinned: &c.Pinned, Tags: c.Tags, BegunAt: c.BegunAt, EndedAt: c.EndedAt, Sealed: &c.Sealed,
	}
	if c.CommittedSeq > 0 {
		out.CommittedAt = c.EndedAt
	}
	return out
}

// List returns the checkpoints of a run, or of every run if run is empty, the newest first.
// Unless all is set, it returns committed checkpoints of the current line only. Runs that
// only a newer version can read are left out of a listing of every run: unknown is why.
func List(ctx context.Context, views query.Source, id, run string, all bool) (l Listing, unknown, err error) {
	l = Listing{Store: id, Checkpoints: []Listed{}}
	runs := []string{run}
	if run != "" {
		if err := KnownRun(ctx, views, run); err != nil {
			return l, nil, err
		}
	} else {
		rows, err := query.Ask(ctx, views, query.Runs, query.Params{})
		if err != nil {
			return l, nil, err
		}
		runs = nil
		for _, r := range rows {
			runs = append(runs, r.Name)
		}
	}
	for _, name := range runs {
		rows, err := query.Ask(ctx, views, query.Checkpoints, query.Params{Run: name, All: all})
		if run == "" && errors.Is(err, events.ErrNewer) {
			unknown = errors.Join(unknown, err)
			continue
		}
		if err != nil {
			return l, nil, err
		}
		for _, c := range rows {
			l.Checkpoints = append(l.Checkpoints, ListedFrom(c))
		}
	}
	return l, unknown, nil
}

// Measure fills in Shared and Exclusive, which takes a request for each file's metadata. The
// members stay nil for checkpoints without files.
func Measure(ctx context.Context, list []Listed, root *data.Root, warn Warn) error {
	feet, problems := make([]collection.Footprint, len(list)), make([]error, len(list))
	var g errgroup.Group
	g.SetLimit(root.Width())
	for i, c := range list {
		g.Go(func() error {
			feet[i], problems[i] = collection.MeasureFiles(ctx, root, c.Ref())
			return nil
		})
	}
	_ = g.Wait() // never fails
	for i := range list {
		var err error
		if list[i].Shared, list[i].Exclusive, err = known(ctx, feet[i], problems[i], warn); err != nil {
			return err
		}
	}
	return nil
}

// footprint returns the shared and exclusive bytes of a checkpoint's files, or nil if they are
// unknown.
func footprint(ctx context.Context, root *data.Root, ref checkpoint.Ref, warn Warn) (shared, exclusive *int64, err error) {
	f, err := collection.MeasureFiles(ctx, root, ref)
	return known(ctx, f, err, warn)
}

// known returns the bytes of a footprint, or nil if err is why they are unknown.
func known(ctx context.Context, f collection.Footprint, err error, warn Warn) (shared, exclusive *int64, _ error) {
	switch {
	case ctx.Err() != nil:
		return nil, nil, ctx.Err()
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil, nil
	case err != nil:
		warn("shared and exclusive bytes are unknown: %v", err)
		return nil, nil, nil
	}
	return &f.Shared, &f.Exclusive, nil
}

// KnownRun returns [projections.ErrNotFound], with similar names, if there is no such run.
func KnownRun(ctx context.Context, views query.Source, run string) error {
	_, err := query.Ask(ctx, views, query.Run, query.Params{Run: run})
	return err
}

// Marked is the answer to `pin`, `unpin` and `tag`: the marks of a checkpoint after them.
type Marked struct {
	Run       string   `json:"run"`
	Trial     string   `json:"trial"`
	ID        string   `json:"id"`
	Pinned    bool     `json:"pinned"`
	PinReason string   `json:"pin_reason,omitempty"`
	Tags      []string `json:"tags"`
	From      string   `json:"from,omitempty"` // the checkpoint that had the tag before
}

// MarkedFrom returns the marks of a row. from is the checkpoint that had the tag before, or
// empty.
func MarkedFrom(c projections.Checkpoint, from string) Marked {
	return Marked{Run: c.Run, Trial: c.Trial, ID: c.ID, Pinned: c.Pinned, PinReason: c.PinReason, Tags: append([]string{}, c.Tags...), From: from}
}
