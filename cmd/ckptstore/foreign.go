package main

import (
	"context"
	"fmt"
	"text/tabwriter"

	"github.com/ckptstore/ckptstore/internal/bytesize"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/tensor"
)

// shownForeign is `show PATH --json`.
type shownForeign struct {
	Path    string        `json:"path"`
	Format  data.Format   `json:"format"`
	Ranks   int           `json:"ranks"` // that hold something
	Bytes   int64         `json:"bytes"`
	Tensors []shownTensor `json:"tensors"`
	Values  []shownValue  `json:"values"`

	Reshard *planner.Preview `json:"reshard,omitempty"`
}

// showPath shows a checkpoint of another program.
func (a *app) showPath(ctx context.Context, path string, reshard int) error {
	s, err := openPath(ctx, path)
	if err != nil {
		return err
	}
	tensors, values := shownLayout(s.manifest.Layout)
	out := shownForeign{
		Path: s.foreign.Path(), Format: s.foreign.Format(), Ranks: len(s.manifest.Ranks), Bytes: s.manifest.Layout.Bytes(),
		Tensors: tensors, Values: values,
	}
	if out.Reshard, err = preview(s.manifest.Layout, reshard); err != nil {
		return err
	}
	if out.Reshard != nil {
		return console.Emit(a.Console, out, out.Reshard.Ranks, func(w *tabwriter.Writer, wide bool) {
			out.printHead(w)
			printReshard(w, wide, out.Reshard)
		})
	}
	return console.Emit(a.Console, out, out.Tensors, func(w *tabwriter.Writer, wide bool) {
		out.printHead(w)
		printLayout(w, wide, tensors, values)
	})
}

func (s shownForeign) printHead(w *tabwriter.Writer) {
	console.Row(w, "path", s.Path)
	console.Row(w, "format", s.Format)
	console.Row(w, "saved by", fmt.Sprintf("%d ranks", s.Ranks))
	console.Row(w, "size", bytesize.Text(s.Bytes))
}

// shownLayout is what show prints of a layout.
func shownLayout(l checkpoint.Layout) (tensors []shownTensor, values []shownValue) {
	tensors, values = []shownTensor{}, []shownValue{}
	for _, t := range l.Tensors {
		st := shownTensor{
			FQN: t.FQN, DType: t.DType, Shape: append(tensor.Shape{}, t.Shape...),
			Bytes: t.Shape.Volume() * int64(t.DType.Size()), Chunks: []shownChunk{},
		}
		for _, ch := range t.Chunks {
			st.Chunks = append(st.Chunks, shownChunk{ch.Rank, ch.Box})
		}
		tensors = append(tensors, st)
	}
	for _, v := range l.Values {
		values = append(values, shownValue{FQN: v.FQN, Rank: v.Rank, Bytes: v.Bytes, PerRank: v.PerRank})
	}
	return tensors, values
}

// printLayout prints tensors and values as tables.
func printLayout(w *tabwriter.Writer, wide bool, tensors []shownTensor, values []shownValue) {
	fmt.Fprintln(w)
	head := []any{"TENSOR", "DTYPE", "SHAPE", "SIZE", "CHUNKS"}
	if wide {
		head = append(head, "RANK:BOX")
	}
	console.Row(w, head...)
	for _, t := range tensors {
		cells := []any{t.FQN, t.DType, fmt.Sprint([]int64(t.Shape)), bytesize.Text(t.Bytes), len(t.Chunks)}
		if wide {
			boxes := ""
			for _, ch := range t.Chunks {
				boxes += fmt.Sprintf("%d:%v ", ch.Rank, ch.Box)
			}
			cells = append(cells, boxes)
		}
		console.Row(w, cells...)
	}
	if len(values) > 0 {
		fmt.Fprintln(w)
		console.Row(w, "VALUE", "RANK", "SIZE", "PER RANK")
		for _, v := range values {
			console.Row(w, v.FQN, v.Rank, bytesize.Text(v.Bytes), v.PerRank)
		}
	}
}

// verifiedPath is `verify PATH --json`.
type verifiedPath struct {
	Path     string         `json:"path"`
	Format   data.Format    `json:"format"`
	Files    int            `json:"files"`
	Chunks   int            `json:"chunks"`
	Bytes    int64          `json:"bytes"`
	Unknown  int            `json:"unknown"` // chunks that the files have no checksum of
	Findings []data.Finding `json:"findings"`
}

// verifyPath reads every byte of a checkpoint of another program.
func (a *app) verifyPath(ctx context.Context, path string) error {
	s, err := openPath(ctx, path)
	if err != nil {
		return err
	}
	bar := a.Progress("verify", s.manifest.Layout.Bytes())
	defer bar.Done()
	report, err := store.VerifyForeign(ctx, s.foreign, bar.Set)
	if err != nil {
		return err
	}
	bar.Done()
	out := verifiedPath{
		Path: s.foreign.Path(), Format: s.foreign.Format(), Files: report.Files, Chunks: report.Chunks, Bytes: report.Bytes,
		Unknown: report.Unknown, Findings: append([]data.Finding{}, report.Findings...),
	}
	err = console.Emit(a.Console, out, out.Findings, func(w *tabwriter.Writer, _ bool) {
		for _, f := range out.Findings {
			fmt.Fprintln(w, f)
		}
		fmt.Fprintf(w, "%d files, %d chunks, %s: %d findings\n", out.Files, out.Chunks, bytesize.Text(out.Bytes), len(out.Findings))
		if out.Unknown > 0 {
			fmt.Fprintf(w, "%d chunks were read, but the files have no checksum of them\n", out.Unknown)
		}
	})
	if err == nil && len(out.Findings) > 0 {
		return errFindings
	}
	return err
}
