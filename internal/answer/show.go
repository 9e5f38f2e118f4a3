package answer

import (
	"context"
	"errors"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/insight"
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/tensor"
)

// Shown is the answer to `show`.
type Shown struct {
	Store      string                 `json:"store"`
	Checkpoint projections.Checkpoint `json:"checkpoint"`
	Path       string                 `json:"path"`
	Shared     *int64                 `json:"bytes_shared,omitempty"`    // of its files: with links in other checkpoints
	Exclusive  *int64                 `json:"bytes_exclusive,omitempty"` // of its files: without; deleting it frees them
	Tensors    []Tensor               `json:"tensors"`
	Values     []Value                `json:"values"`
	Ranks      []Rank                 `json:"ranks"`
	Cost       *Cost                  `json:"cost,omitempty"` // in a bucket
	Reshard    *planner.Preview       `json:"reshard,omitempty"`
	Run        *Standing              `json:"run,omitempty"` // with the name of a run only
	Fork       *Fork                  `json:"fork,omitempty"`
}

// Fork is the origin of a trial that was forked.
type Fork struct {
	Parent string `json:"parent"` // the reference to the checkpoint that it began with
	Step   *int64 `json:"step"`   // of that checkpoint; null: the store does not know it
	// How its configuration differs from that of the parent's trial; empty if that is unknown.
	Changes []insight.Difference `json:"changes"`
}

// forkOf returns the origin of a trial, or nil.
func forkOf(ctx context.Context, views query.Source, run, trial string) (*Fork, error) {
	t, err := query.Ask(ctx, views, query.Trial, query.Params{Run: run, Trial: trial})
	if err != nil || t.Parent == nil {
		return nil, err
	}
	out := &Fork{Parent: events.CheckpointRef(*t.Parent).String(), Changes: []insight.Difference{}}
	c, err := query.Ask(ctx, views, query.Resolve, query.Params{Ref: out.Parent})
	switch {
	case err == nil && c.ID == t.Parent.Checkpoint:
		out.Step = &c.Step
	case err != nil && !errors.Is(err, projections.ErrNotFound):
		return nil, err
	}
	from, err := query.Ask(ctx, views, query.Trial, query.Params{Run: t.Parent.Run, Trial: t.Parent.Trial})
	if errors.Is(err, projections.ErrNotFound) {
		return out, nil
	}
	out.Changes = insight.ConfigChanges(from.Config, t.Config)
	return out, err
}

// Tensor is a tensor of a checkpoint with the chunks that the ranks saved.
type Tensor struct {
	FQN    string       `json:"fqn"`
	DType  tensor.DType `json:"dtype"`
	Shape  tensor.Shape `json:"shape"`
	Bytes  int64        `json:"bytes"`
	Chunks []Chunk      `json:"chunks"`
}

// Chunk is the part of a tensor that one rank saved.
type Chunk struct {
	Rank int `json:"rank"`
	tensor.Box
}

// Value is a value of a checkpoint that is not a tensor.
type Value struct {
	FQN     string `json:"fqn"`
	Rank    int    `json:"rank"` // that saved it
	Bytes   int64  `json:"bytes"`
	PerRank bool   `json:"per_rank"` // each rank saved its own
}

// Rank names the index of a rank's file by its digest.
type Rank struct {
	Rank  int               `json:"rank"`
	Index checkpoint.Digest `json:"index"`
}

// Cost is what a checkpoint in a bucket costs, in US dollars, without repeated requests.
type Cost struct {
	SaveRequests int     `json:"save_requests"`
	Save         float64 `json:"save_usd"`
	LoadRequests int     `json:"load_requests"` // by as many ranks
	Load         float64 `json:"load_usd"`
	Bytes        int64   `json:"bytes"`     // of its own files
	Month        float64 `json:"month_usd"` // for those
}

// ShowOptions are the options of [Show].
type ShowOptions struct {
	Reshard int // preview a load by this many ranks; 0: none
	Prices  object.Prices
	Warn    Warn
}

// Show returns the committed checkpoint that a reference means in the views. It reads the
// checkpoint's manifest and the metadata of its files as they are now.
func Show(ctx context.Context, s *store.Store, views query.Source, ref string, o ShowOptions) (Shown, error) {
	c, err := store.Committed(ctx, views, ref)
	if err != nil {
		return Shown{}, err
	}
	m, err := ManifestOf(ctx, s, c)
	if err != nil {
		return Shown{}, err
	}
	c.Participants = c.Saving()
	out, err := ShowStored(ctx, s.Data, s.ID, c, m, o)
	if err == nil {
		out.Fork, err = forkOf(ctx, views, c.Run, c.Trial)
	}
	return out, err
}

// ManifestOf reads the manifest that the log names for a committed checkpoint.
func ManifestOf(ctx context.Context, s *store.Store, c projections.Checkpoint) (checkpoint.Manifest, error) {
	r, err := s.ReaderOf(c)
	if err != nil {
		return checkpoint.Manifest{}, err
	}
	return r.ReadMetadata(ctx)
}

// ShowStored is [Show] for a checkpoint of a store that is known by its row and its manifest.
func ShowStored(ctx context.Context, root *data.Root, id string, c projections.Checkpoint, m checkpoint.Manifest, o ShowOptions) (out Shown, err error) {
	out = Shown{Store: id, Checkpoint: c, Path: root.Path(store.RefOf(c)), Ranks: []Rank{}}
	if out.Shared, out.Exclusive, err = footprint(ctx, root, store.RefOf(c), o.Warn); err != nil {
		return out, err
	}
	out.Tensors, out.Values = Layout(m.Layout)
	for _, r := range m.Ranks {
		out.Ranks = append(out.Ranks, Rank(r))
	}
	if out.Cost, err = costOf(ctx, root, store.RefOf(c), m, o.Prices); err != nil {
		o.Warn("the cost is unknown: %v", err)
	}
	out.Reshard, err = Preview(m.Layout, o.Reshard)
	return out, err
}

// costOf returns what a checkpoint costs; nil where requests have no price.
func costOf(ctx context.Context, root *data.Root, ref checkpoint.Ref, m checkpoint.Manifest, prices object.Prices) (*Cost, error) {
	n, priced, err := root.Requests(ctx, ref, m)
	if err != nil || !priced {
		return nil, err
	}
	return &Cost{
		SaveRequests: n.Writes, Save: prices.Puts(n.Writes),
		LoadRequests: n.Reads + n.Lists, Load: prices.Gets(n.Reads) + prices.Puts(n.Lists),
		Bytes: n.Bytes, Month: prices.Kept(n.Bytes),
	}, nil
}

// Preview returns what this many ranks would read of a layout; nil for 0 ranks.
func Preview(l checkpoint.Layout, ranks int) (*planner.Preview, error) {
	if ranks == 0 {
		return nil, nil
	}
	p, err := planner.NewPreview(l, ranks, checkpoint.BlockSize)
	return &p, err
}

// Layout converts a layout to the tensors and values of a [Shown].
func Layout(l checkpoint.Layout) (tensors []Tensor, values []Value) {
	tensors, values = []Tensor{}, []Value{}
	for _, t := range l.Tensors {
		st := Tensor{
			FQN: t.FQN, DType: t.DType, Shape: append(tensor.Shape{}, t.Shape...),
			Bytes: t.Shape.Volume() * int64(t.DType.Size()), Chunks: []Chunk{},
		}
		for _, ch := range t.Chunks {
			st.Chunks = append(st.Chunks, Chunk{ch.Rank, ch.Box})
		}
		tensors = append(tensors, st)
	}
	for _, v := range l.Values {
		values = append(values, Value{FQN: v.FQN, Rank: v.Rank, Bytes: v.Bytes, PerRank: v.PerRank})
	}
	return tensors, values
}
