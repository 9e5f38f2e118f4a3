package reading

import (
	"context"
	"time"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/tensor"
)

// Listing asks for the checkpoints of a run, or of all runs. All includes those
// that are not committed or not in the line.
type Listing struct {
	Run string `json:"run,omitempty"`
	All bool   `json:"all,omitempty"`
}

// Listed is the answer to a Listing: the checkpoints of each run, newest first.
type Listed struct {
	Checkpoints []Row `json:"checkpoints"`
}

// Row is one checkpoint.
type Row struct {
	Checkpoint string            `json:"checkpoint"` // ID
	Run        string            `json:"run"`
	Trial      string            `json:"trial"`
	Step       int64             `json:"step"`
	Name       string            `json:"name"`
	State      projections.State `json:"state"`
	Superseded bool              `json:"superseded,omitempty"`
	WorldSize  int               `json:"world_size"`
	Bytes      int64             `json:"bytes"`
	Tags       []string          `json:"tags,omitempty"`
	BegunAt    time.Time         `json:"begun_at"`
	EndedAt    time.Time         `json:"ended_at,omitzero"` // committed or aborted
	Reason     string            `json:"reason,omitempty"`
}

func (s *Server) onList(ctx context.Context, q Listing) (Listed, error) {
	out := Listed{Checkpoints: []Row{}}
	rows, err := s.catalog.List(ctx, q.Run, q.All)
	if err != nil {
		return out, err
	}
	for _, c := range rows {
		out.Checkpoints = append(out.Checkpoints, Row{
			Checkpoint: c.ID, Run: c.Run, Trial: c.Trial, Step: c.Step, Name: c.Name, State: c.State, Superseded: c.Superseded,
			WorldSize: c.WorldSize, Bytes: c.Bytes, Tags: c.Tags, BegunAt: c.BegunAt, EndedAt: c.EndedAt, Reason: c.Reason,
		})
	}
	return out, nil
}

// Asked is the body of describe.
type Asked struct {
	Ref string `json:"ref"`
}

// Description describes the contents of a checkpoint.
type Description struct {
	Checkpoint  string                   `json:"checkpoint"` // ID, or the path of a checkpoint outside the store
	Run         string                   `json:"run"`
	Trial       string                   `json:"trial"`
	Step        int64                    `json:"step"` // -1 if unknown
	Name        string                   `json:"name"`
	WorldSize   int                      `json:"world_size"`
	Tensors     map[string]Tensor        `json:"tensors"`
	Values      map[string]Value         `json:"values"`
	Attachments []projections.Attachment `json:"attachments"`
}

// Tensor is a tensor of a checkpoint.
type Tensor struct {
	DType  tensor.DType `json:"dtype"`
	Shape  tensor.Shape `json:"shape"`
	Chunks []tensor.Box `json:"chunks"`
	Path   Path         `json:"path,omitempty"`
}

// Value is a value of a checkpoint. Bytes is its size, or the largest size if
// each rank has its own.
type Value struct {
	Bytes   int64 `json:"bytes"`
	PerRank bool  `json:"per_rank,omitempty"`
	Ranks   []int `json:"ranks,omitempty"` // that have their own, ascending
	Path    Path  `json:"path,omitempty"`
}

// Path is the place of an item in the state dict: keys, which are strings, a
// [Literal] for any other key, and indexes of lists, which are integers. It is
// nil if the place is just the FQN.
type Path []any

// Literal is a key other than a string, in Python's notation: 3, True, None, (0,
// 1).
type Literal struct {
	Literal string `json:"literal"`
}

func pathOf(p checkpoint.Path, fqn string) Path {
	if p.Plain(fqn) {
		return nil
	}
	out := make(Path, len(p))
	for i, e := range p {
		switch {
		case e.List:
			out[i] = e.Index
		case e.Literal:
			out[i] = Literal{e.Key}
		default:
			out[i] = e.Key
		}
	}
	return out
}

func (s *Server) onDescribe(ctx context.Context, q Asked) (Description, error) {
	src, err := s.source(ctx, q.Ref)
	if err != nil {
		return Description{}, err
	}
	return src.describe(), nil
}

func (s *source) describe() Description {
	l := s.manifest.Layout
	d := Description{
		Checkpoint: s.row.ID, Run: s.row.Run, Trial: s.row.Trial, Step: s.row.Step, Name: s.row.Name, WorldSize: s.manifest.WorldSize,
		Tensors: make(map[string]Tensor, len(l.Tensors)), Values: map[string]Value{}, Attachments: append([]projections.Attachment{}, s.row.Attachments...),
	}
	for _, t := range l.Tensors {
		chunks := make([]tensor.Box, len(t.Chunks))
		for i, c := range t.Chunks {
			chunks[i] = tensor.Box{Offsets: append([]int64{}, c.Box.Offsets...), Sizes: append([]int64{}, c.Box.Sizes...)}
		}
		d.Tensors[t.FQN] = Tensor{DType: t.DType, Shape: append(tensor.Shape{}, t.Shape...), Chunks: chunks, Path: pathOf(t.Path, t.FQN)}
	}
	for _, v := range l.Values {
		have := d.Values[v.FQN]
		have.Path, have.Bytes, have.PerRank = pathOf(v.Path, v.FQN), max(have.Bytes, v.Bytes), v.PerRank
		if v.PerRank {
			have.Ranks = append(have.Ranks, v.Rank)
		}
		d.Values[v.FQN] = have
	}
	return d
}

// logged is the catalog of an open store: the checkpoints in its log.
type logged struct{ *store.Store }

var _ Catalog = logged{}

func (l logged) List(ctx context.Context, run string, all bool) ([]projections.Checkpoint, error) {
	runs := []string{run}
	if run != "" {
		if _, err := query.Ask(ctx, l.Views(), query.Run, query.Params{Run: run}); err != nil {
			return nil, err
		}
	} else {
		rows, err := query.Ask(ctx, l.Views(), query.Runs, query.Params{})
		if err != nil {
			return nil, err
		}
		runs = nil
		for _, r := range rows {
			runs = append(runs, r.Name)
		}
	}
	var out []projections.Checkpoint
	for _, run := range runs {
		rows, err := query.Ask(ctx, l.Views(), query.Checkpoints, query.Params{Run: run, All: all})
		if err != nil {
			return nil, err
		}
		out = append(out, rows...)
	}
	return out, nil
}

func (l logged) Committed(ctx context.Context, ref string) (projections.Checkpoint, error) {
	return store.Committed(ctx, l.Views(), ref)
}
