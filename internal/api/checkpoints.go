package api

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/answer"
	"github.com/ckptstore/ckptstore/internal/insight"
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/projections"
)

// CheckpointPage is a page of checkpoints, the newest first.
type CheckpointPage struct {
	answer.Listing
	Next string `json:"next,omitempty"` // of the next page
}

// CheckpointDetail is a checkpoint in any state. The members about files are those of a
// committed one.
type CheckpointDetail struct {
	Store      string                 `json:"store"`
	Checkpoint projections.Checkpoint `json:"checkpoint"`
	Path       string                 `json:"path"`
	Shared     *int64                 `json:"bytes_shared,omitempty"`    // of its files: with links in other checkpoints
	Exclusive  *int64                 `json:"bytes_exclusive,omitempty"` // of its files: without; deleting it frees them
	Ranks      []answer.Rank          `json:"ranks"`
	Tensors    int                    `json:"tensor_count"`
	Values     int                    `json:"value_count"`
	Cost       *answer.Cost           `json:"cost,omitempty"` // in a bucket
	Problem    string                 `json:"problem,omitempty"`
}

// Contents are the tensors and values of a committed checkpoint.
type Contents struct {
	Tensors []answer.Tensor `json:"tensors"`
	Values  []answer.Value  `json:"values"`
}

// Save is how a checkpoint was saved: what each rank wrote.
type Save struct {
	Checkpoint projections.Checkpoint `json:"checkpoint"`
	Writes     []WriteRow             `json:"writes"` // by rank
}

// WriteRow is what one rank wrote.
type WriteRow struct{ projections.SaveWrite }

// Resharded is what a group of another size would read.
type Resharded struct {
	Reshard planner.Preview `json:"reshard"`
	Missing []RanksOf       `json:"missing"` // per-rank values that were not saved for some ranks
	Unread  []RanksOf       `json:"unread"`  // per-rank values that no rank reads
}

// RanksOf names ranks of a value.
type RanksOf struct {
	FQN   string `json:"fqn"`
	Ranks []int  `json:"ranks"`
}

// SavedFiles are the files of a checkpoint.
type SavedFiles struct {
	Path  string      `json:"path"` // of its directory
	Files []SavedFile `json:"files"`
}

// SavedFile is a file that a rank wrote, or that its index names.
type SavedFile struct {
	Rank int `json:"rank"`
	events.File
}

// Resolved is what a reference means.
type Resolved struct {
	Ref        string                 `json:"ref"`
	Checkpoint projections.Checkpoint `json:"checkpoint"`
}

// Inputs of the reads.
type (
	// OfCheckpoints selects checkpoints of a run.
	OfCheckpoints struct {
		Paged
		Run   string `path:"run"`
		All   bool   `query:"all" doc:"Also superseded, open, aborted and deleted ones"`
		Brief bool   `query:"brief" doc:"Leave out what a row is not shown by: manifest, sequence, parent, and committed_at, which is ended_at"`
		Files bool   `query:"files" doc:"Fill in bytes_shared and bytes_exclusive from the files as they are now"`
	}
	// Named names a checkpoint.
	Named struct {
		Run   string `path:"run"`
		ID    string `path:"id" doc:"ID, the beginning of one, name, tag, latest, or best:METRIC:min"`
		Trial string `query:"trial" doc:"Of the run, if it has several"`
	}
	// OfCheckpoint is the input of a GET about a checkpoint.
	OfCheckpoint struct {
		Moment
		Named
	}
	// OfReshard asks for a preview.
	OfReshard struct {
		OfCheckpoint
		Ranks int `query:"ranks" required:"true" minimum:"1" maximum:"65536" doc:"That would load the checkpoint"`
	}
	// OfReference is a reference.
	OfReference struct {
		Moment
		Ref string `query:"ref" required:"true" minLength:"1" doc:"RUN, RUN@latest, RUN@NAME, RUN@ID, RUN@TAG or RUN@best:METRIC:min"`
	}
	// OfDiff names two sides.
	OfDiff struct {
		Moment
		A      string   `query:"a" required:"true" minLength:"1" doc:"RUN or RUN/TRIAL, or a reference to a checkpoint"`
		B      string   `query:"b" required:"true" minLength:"1" doc:"The same"`
		Metric []string `query:"metric,explode" doc:"Of runs: only this metric; repeatable"`
	}
)

// ref returns the reference to the checkpoint.
func (in Named) ref() string {
	if in.Trial == "" {
		return in.Run + "@" + in.ID
	}
	return in.Run + "/" + in.Trial + "@" + in.ID
}

// readCheckpoints adds the reads about checkpoints.
func (h *Handler) readCheckpoints() {
	get(h, "/runs/{run}/checkpoints", "list-checkpoints", "checkpoints", "List the checkpoints of a run, the newest first",
		"As `ckptstore ls RUN --json`, in pages.", h.checkpoints)
	get(h, "/runs/{run}/checkpoints/{id}", "get-checkpoint", "checkpoints", "Describe a checkpoint",
		"As `ckptstore show REF --json`, without tensors and values. Files are read as they are now.", h.checkpoint)
	get(h, "/runs/{run}/checkpoints/{id}/tensors", "list-tensors", "checkpoints", "List the tensors and values of a checkpoint", "", h.tensors)
	get(h, "/runs/{run}/checkpoints/{id}/save", "get-save", "checkpoints", "Describe how a checkpoint was saved", "", h.save)
	get(h, "/runs/{run}/checkpoints/{id}/reshard", "preview-reshard", "checkpoints", "Preview a load by another number of ranks",
		"As `ckptstore show REF --reshard N --json`.", h.reshard)
	get(h, "/runs/{run}/checkpoints/{id}/files", "list-files", "checkpoints", "List the files of a checkpoint", "As the ranks recorded them.", h.files)
	get(h, "/resolve", "resolve", "checkpoints", "Find the checkpoint that a reference means", "", func(ctx context.Context, from *at, in *OfReference) (Resolved, error) {
		c, err := query.Ask(ctx, from.Views, query.Resolve, query.Params{Ref: in.Ref})
		return Resolved{in.Ref, c}, err
	})
	get(h, "/diff", "diff", "checkpoints", "Compare two runs or two checkpoints", "As `ckptstore diff A B --json`.", func(ctx context.Context, from *at, in *OfDiff) (insight.Diff, error) {
		done, err := h.reading(ctx)
		if err != nil {
			return insight.Diff{}, err
		}
		defer done()
		return answer.Compare(ctx, h.store, from.Views, [2]string{in.A, in.B}, in.Metric)
	})
}

func (h *Handler) checkpoints(ctx context.Context, from *at, in *OfCheckpoints) (CheckpointPage, error) {
	out := CheckpointPage{Listing: answer.Listing{Store: h.store.ID, Offline: h.store.Log == nil, Checkpoints: []answer.Listed{}}}
	if err := answer.KnownRun(ctx, from.Views, in.Run); err != nil {
		return out, err
	}
	rows, next, err := listPage(ctx, from, in.Paged, query.Checkpoints, query.Params{Run: in.Run, All: in.All},
		func(c projections.Checkpoint) string { return strconv.FormatUint(c.BegunSeq, 10) })
	if err != nil {
		return out, err
	}
	out.Next = next
	for _, c := range rows {
		row := answer.ListedFrom(c)
		if in.Brief {
			row.Manifest, row.Sequence, row.Parent, row.CommittedAt = "", 0, "", time.Time{}
		}
		out.Checkpoints = append(out.Checkpoints, row)
	}
	if in.Files {
		from.files = true
		err = answer.Measure(ctx, out.Checkpoints, h.store.Data, h.warn)
	}
	return out, err
}

// warn logs why a part of an answer is missing.
func (h *Handler) warn(format string, values ...any) {
	h.o.Logger.Warn("part of an answer is missing", "error", fmt.Sprintf(format, values...))
}

// resolve returns the checkpoint of an input, in any state.
func (h *Handler) resolve(ctx context.Context, from *at, in OfCheckpoint) (projections.Checkpoint, error) {
	c, err := query.Ask(ctx, from.Views, query.Resolve, query.Params{Ref: in.ref()})
	if err != nil {
		return c, err
	}
	c.Participants = c.Saving()
	t, err := query.Ask(ctx, from.Views, query.Trial, query.Params{Run: c.Run, Trial: c.Trial})
	from.lane = t.LaneSeq
	return c, err
}

func (h *Handler) checkpoint(ctx context.Context, from *at, in *OfCheckpoint) (CheckpointDetail, error) {
	c, err := h.resolve(ctx, from, *in)
	if err != nil {
		return CheckpointDetail{}, err
	}
	from.files = true
	out := CheckpointDetail{Store: h.store.ID, Checkpoint: c, Path: h.store.Data.Path(store.RefOf(c)), Ranks: []answer.Rank{}}
	if c.State != projections.Committed {
		return out, nil
	}
	m, err := answer.ManifestOf(ctx, h.store, c)
	var shown answer.Shown
	if err == nil {
		shown, err = answer.ShowStored(ctx, h.store.Data, h.store.ID, c, m, answer.ShowOptions{Prices: object.Standard(), Warn: h.warn})
	}
	if ctx.Err() != nil {
		return out, err
	}
	if err != nil { // the row is known: deleted or damaged files do not hide it
		out.Problem = err.Error()
		return out, nil
	}
	out.Shared, out.Exclusive, out.Ranks, out.Cost = shown.Shared, shown.Exclusive, shown.Ranks, shown.Cost
	out.Tensors, out.Values = len(shown.Tensors), len(shown.Values)
	return out, nil
}

// committed returns the committed checkpoint of an input.
func (h *Handler) committed(ctx context.Context, from *at, in OfCheckpoint) (projections.Checkpoint, error) {
	c, err := h.resolve(ctx, from, in)
	if err == nil && c.State != projections.Committed {
		err = &store.StateError{Checkpoint: c}
	}
	return c, err
}

func (h *Handler) tensors(ctx context.Context, from *at, in *OfCheckpoint) (Contents, error) {
	c, err := h.committed(ctx, from, *in)
	if err != nil {
		return Contents{}, err
	}
	m, err := answer.ManifestOf(ctx, h.store, c)
	if err != nil {
		return Contents{}, err
	}
	tensors, values := answer.Layout(m.Layout)
	return Contents{tensors, values}, nil
}

func (h *Handler) save(ctx context.Context, from *at, in *OfCheckpoint) (Save, error) {
	c, err := h.resolve(ctx, from, *in)
	if err != nil {
		return Save{}, err
	}
	save, err := query.Ask(ctx, from.Views, query.Save, query.Params{Ref: c.Run + "/" + c.Trial + "@" + c.ID})
	out := Save{c, []WriteRow{}}
	for _, w := range save.Writes {
		out.Writes = append(out.Writes, WriteRow{w})
	}
	return out, err
}

func (h *Handler) reshard(ctx context.Context, from *at, in *OfReshard) (Resharded, error) {
	c, err := h.committed(ctx, from, in.OfCheckpoint)
	if err != nil {
		return Resharded{}, err
	}
	done, err := h.reading(ctx)
	if err != nil {
		return Resharded{}, err
	}
	defer done()
	m, err := answer.ManifestOf(ctx, h.store, c)
	if err != nil {
		return Resharded{}, err
	}
	p, err := answer.Preview(m.Layout, in.Ranks)
	if err != nil {
		return Resharded{}, err
	}
	out := Resharded{Reshard: *p, Missing: []RanksOf{}, Unread: []RanksOf{}}
	for _, gap := range insight.Lacking(p) {
		out.Missing = append(out.Missing, RanksOf(gap))
	}
	for _, gap := range insight.Unread(p) {
		out.Unread = append(out.Unread, RanksOf(gap))
	}
	return out, nil
}

func (h *Handler) files(ctx context.Context, from *at, in *OfCheckpoint) (SavedFiles, error) {
	c, err := h.resolve(ctx, from, *in)
	if err != nil {
		return SavedFiles{}, err
	}
	rows, err := query.Ask(ctx, from.Views, query.Writes, query.Params{Run: c.Run, Trial: c.Trial, Ref: c.ID})
	out := SavedFiles{Path: h.store.Data.Path(store.RefOf(c)), Files: []SavedFile{}}
	for _, w := range rows {
		for _, f := range w.Files {
			out.Files = append(out.Files, SavedFile{w.Rank, f})
		}
	}
	return out, err
}
