package main

import (
	"context"
	"fmt"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/internal/bytesize"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/tensor"
)

// shown is `show --json`.
type shown struct {
	Store      string                 `json:"store"`
	Checkpoint projections.Checkpoint `json:"checkpoint"`
	Path       string                 `json:"path"`
	Shared     *int64                 `json:"bytes_shared,omitempty"`    // of its files, those that have links elsewhere
	Exclusive  *int64                 `json:"bytes_exclusive,omitempty"` // and those that have none: what deleting it frees
	Tensors    []shownTensor          `json:"tensors"`
	Values     []shownValue           `json:"values"`
	Ranks      []shownRank            `json:"ranks"`
	Reshard    *planner.Preview       `json:"reshard,omitempty"`
}

type shownTensor struct {
	FQN    string       `json:"fqn"`
	DType  tensor.DType `json:"dtype"`
	Shape  tensor.Shape `json:"shape"`
	Bytes  int64        `json:"bytes"`
	Chunks []shownChunk `json:"chunks"`
}

type shownChunk struct {
	Rank int `json:"rank"`
	tensor.Box
}

type shownValue struct {
	FQN     string `json:"fqn"`
	Rank    int    `json:"rank"`
	Bytes   int64  `json:"bytes"`
	PerRank bool   `json:"per_rank"`
}

type shownRank struct {
	Rank  int               `json:"rank"`
	Index checkpoint.Digest `json:"index"`
}

func (a *app) showCommand() *cobra.Command {
	reshard := 0
	var asOf *string
	c := &cobra.Command{
		Use: "show REF", Short: "Show what is in a checkpoint", Args: console.Args(cobra.ExactArgs(1)),
		Long: `Show what is in a checkpoint: its tensors, values and ranks; how many bytes its
save wrote and reused; and how many bytes of its files other checkpoints have
too, and how many deleting it would free.

With --reshard N, show what N ranks would read of it, and from which files, if
each wanted its rows of every tensor (Shard(0)), all of every tensor without
dimensions, every shared value and its own per-rank values.

With --as-of, REF stands for what it stood for then, and the checkpoint is as it
was; its files are read as they are now.

` + pathHelp,
		Example: "  ckptstore show bert\n  ckptstore show bert@step-2000 --json\n  ckptstore show bert --reshard 64\n  ckptstore show out/checkpoint-2000",
		RunE: func(c *cobra.Command, refs []string) error {
			if c.Flags().Changed("reshard") && (reshard < 1 || reshard > planner.MaxPreview) {
				return console.Usagef("--reshard %d: want a number of ranks from 1 to %d", reshard, planner.MaxPreview)
			}
			then, err := parseMoment("as-of", *asOf)
			if err != nil {
				return err
			}
			if then.isEnd() && !spelledPath(refs[0]) && a.byReceipts() {
				return a.withOffline(c.Context(), refs[0], all, func(s source) error { return a.showSource(c.Context(), s, reshard) })
			}
			path, err := a.isPath(c.Context(), refs[0])
			if err != nil {
				return err
			}
			if path && !then.isEnd() {
				return console.Usagef("--as-of: %s is a path, which has no history", refs[0])
			}
			if path {
				return a.showPath(c.Context(), refs[0], reshard)
			}
			return a.read(c.Context(), func(s *store.Store) error { return a.show(c.Context(), s, refs[0], reshard, then) })
		},
	}
	asOf = asOfFlag(c)
	c.Flags().IntVar(&reshard, "reshard", 0, "show what so many ranks would read, from which files")
	return c
}

func (a *app) show(ctx context.Context, s *store.Store, ref string, reshard int, then moment) error {
	views, err := past(ctx, s, then)
	if err != nil {
		return err
	}
	c, err := store.Committed(ctx, views, ref)
	if err != nil && !then.isEnd() {
		return fmt.Errorf("as of %s: %w", then, err)
	}
	if err != nil {
		return err
	}
	digest, err := checkpoint.ParseDigest(c.Manifest)
	if err != nil {
		return err
	}
	m, err := s.Data.Reader(store.RefOf(c)).WithManifest(digest).ReadMetadata(ctx)
	if err != nil {
		return err
	}
	return a.showStored(ctx, s.DataDir, source{store: s.ID, checkpoint: c, manifest: m}, reshard)
}

// showSource shows what withOffline has found: one of a store, or of another program.
func (a *app) showSource(ctx context.Context, s source, reshard int) error {
	r, ours := s.reader.(*data.FileReader)
	if !ours {
		return a.showPath(ctx, s.name, reshard)
	}
	s.checkpoint.WorldSize, s.checkpoint.Bytes = s.manifest.WorldSize, s.manifest.Layout.Bytes()
	return a.showStored(ctx, r.Root().Dir(), s, reshard)
}

// showStored shows a checkpoint of a store by its row and its manifest.
func (a *app) showStored(ctx context.Context, dataDir string, s source, reshard int) (err error) {
	c, m := s.checkpoint, s.manifest
	out := shown{
		Store: s.store, Checkpoint: c, Path: dataDir + "/" + store.RefOf(c).String(),
		Ranks: []shownRank{},
	}
	if out.Shared, out.Exclusive, err = a.footprint(ctx, dataDir, store.RefOf(c)); err != nil {
		return err
	}
	out.Tensors, out.Values = shownLayout(m.Layout)
	for _, r := range m.Ranks {
		out.Ranks = append(out.Ranks, shownRank(r))
	}
	if out.Reshard, err = preview(m.Layout, reshard); err != nil {
		return err
	}
	if out.Reshard != nil {
		return console.Emit(a.Console, out, out.Reshard.Ranks, func(w *tabwriter.Writer, wide bool) {
			out.printHead(w)
			printReshard(w, wide, out.Reshard)
		})
	}
	return console.Emit(a.Console, out, out.Tensors, func(w *tabwriter.Writer, wide bool) { out.print(w, wide) })
}

func (s shown) print(w *tabwriter.Writer, wide bool) {
	s.printHead(w)
	printLayout(w, wide, s.Tensors, s.Values)
}

func (s shown) printHead(w *tabwriter.Writer) {
	c := s.Checkpoint
	console.Row(w, "checkpoint", c.Run+"@"+c.ID)
	console.Row(w, "step", c.Step)
	console.Row(w, "saved by", fmt.Sprintf("%d ranks, attempt %d", c.WorldSize, c.Attempt))
	console.Row(w, "committed", fmt.Sprintf("%s, sequence %d", console.When(c.EndedAt), c.CommittedSeq))
	console.Row(w, "continues", c.Parent)
	console.Row(w, "size", fmt.Sprintf("%s: %s written, %s reused", bytesize.Text(c.Bytes), bytesize.Text(c.BytesWritten), bytesize.Text(c.BytesReused)))
	console.Row(w, "files", fmt.Sprintf("%s shared with other checkpoints, %s exclusive", orDash(console.MaybeSize(s.Shared)), orDash(console.MaybeSize(s.Exclusive))))
	console.Row(w, "manifest", c.Manifest)
	console.Row(w, "path", s.Path)
}

// orDash is a text, or what stands for none.
func orDash(text string) string {
	if text == "" {
		return "-"
	}
	return text
}
