package main

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/internal/answer"
	"github.com/ckptstore/ckptstore/internal/bytesize"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/insight"
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/planner"
)

// showOptions are the flags of `show`.
type showOptions struct {
	reshard int // ranks; 0: none
	prices  object.Prices
}

func (a *app) showCommand() *cobra.Command {
	o := showOptions{prices: object.Standard()}
	var asOf *string
	c := &cobra.Command{
		Use: "show REF", Short: "Show the contents of a checkpoint", Args: console.Args(cobra.ExactArgs(1)),
		Long: `Show the contents of a checkpoint: its tensors, values and ranks; how many bytes the
save wrote and reused; how many bytes of its files other checkpoints share, and how
many bytes deleting it would free.

With the name of a run, also show its goodput: the part of the time of its attempts that
led to the present state, without training that a resume has gone behind, loads, what
saves held up, and starts. For a run with a live job, show what it would cost to kill it
now: the checkpoint that the next attempt would resume from, what becomes of the saves in
flight, and the training that is lost.

With --reshard N, show how much N ranks would read, and from which files, if each loaded
its rows of every tensor (Shard(0)), every tensor without dimensions, every shared value
and its own per-rank values.

Of a checkpoint in a bucket, show the requests of its save and of a load, and what they
and a month cost by --prices. The default is the list price of S3 Standard in us-east-1,
without data that leaves the region.

With --as-of, resolve REF and show the checkpoint as of that moment; its files are read
as they are now.

` + pathHelp,
		Example: "  ckptstore show bert\n  ckptstore show bert@step-2000 --json\n  ckptstore show bert --reshard 64\n  ckptstore show out/checkpoint-2000",
		RunE: func(c *cobra.Command, refs []string) error {
			if c.Flags().Changed("reshard") && (o.reshard < 1 || o.reshard > planner.MaxPreview) {
				return console.Usagef("--reshard %d: want a number of ranks from 1 to %d", o.reshard, planner.MaxPreview)
			}
			then, err := parseMoment("as-of", *asOf)
			if err != nil {
				return err
			}
			if then.IsEnd() && !spelledPath(refs[0]) && a.byReceipts() {
				return a.withOffline(c.Context(), refs[0], all, func(s source) error { return a.showSource(c.Context(), s, o) })
			}
			path, err := a.isPath(c.Context(), refs[0])
			if err != nil {
				return err
			}
			if path && !then.IsEnd() {
				return console.Usagef("--as-of: %s is a path, which has no history", refs[0])
			}
			if path {
				return a.showPath(c.Context(), refs[0], o.reshard)
			}
			return a.read(c.Context(), func(s *store.Store) error { return a.show(c.Context(), s, refs[0], o, then) })
		},
	}
	asOf = asOfFlag(c)
	c.Flags().Var(&o.prices, "prices", pricesHelp)
	c.Flags().IntVar(&o.reshard, "reshard", 0, "show how much this many ranks would read, and from which files")
	return c
}

func (a *app) show(ctx context.Context, s *store.Store, ref string, o showOptions, then answer.Moment) error {
	views, err := answer.Past(ctx, s, then)
	if err != nil {
		return err
	}
	out, err := answer.Show(ctx, s, views, ref, a.showing(o))
	if err != nil && !then.IsEnd() {
		return fmt.Errorf("as of %s: %w", then, err)
	}
	if err != nil {
		return err
	}
	if then.IsEnd() && ref == out.Checkpoint.Run {
		if out.Run, err = answer.StandingOf(ctx, answer.Live(s), ref); err != nil {
			return err
		}
	}
	return a.printShown(out)
}

// showSource shows a source from withOffline, a checkpoint of a store or of another
// program.
func (a *app) showSource(ctx context.Context, s source, o showOptions) error {
	r, ours := s.reader.(*data.FileReader)
	if !ours {
		return a.showPath(ctx, s.name, o.reshard)
	}
	s.checkpoint.WorldSize, s.checkpoint.Bytes = s.manifest.WorldSize, s.manifest.Layout.Bytes()
	return a.showStored(ctx, r.Root(), s, o)
}

// showStored shows a checkpoint of a store by its row and its manifest.
func (a *app) showStored(ctx context.Context, root *data.Root, s source, o showOptions) error {
	out, err := answer.ShowStored(ctx, root, s.store, s.checkpoint, s.manifest, a.showing(o))
	if err != nil {
		return err
	}
	return a.printShown(out)
}

// showing returns the options of an answer.
func (a *app) showing(o showOptions) answer.ShowOptions {
	return answer.ShowOptions{Reshard: o.reshard, Prices: o.prices, Warn: a.Warn}
}

func (a *app) printShown(out answer.Shown) error {
	if out.Reshard != nil {
		return console.Emit(a.Console, out, out.Reshard.Ranks, func(w *tabwriter.Writer, wide bool) {
			printShownHead(w, out)
			printReshard(w, wide, out.Reshard)
		})
	}
	return console.Emit(a.Console, out, out.Tensors, func(w *tabwriter.Writer, wide bool) {
		printShownHead(w, out)
		printLayout(w, wide, out.Tensors, out.Values)
	})
}

// pricesHelp is the text of --prices.
const pricesHelp = "US dollars of 1000 PUT and LIST requests, of 1000 GET and HEAD requests, and of a GiB kept a month"

// dollars prints a price with two digits that count.
func dollars(usd float64) string {
	if usd == 0 {
		return "$0"
	}
	if usd >= 1 {
		return fmt.Sprintf("$%.2f", usd)
	}
	return "$" + strconv.FormatFloat(usd, 'f', max(2, 1-int(math.Floor(math.Log10(max(usd, 1e-9))))), 64)
}

func printShownHead(w *tabwriter.Writer, s answer.Shown) {
	c := s.Checkpoint
	console.Row(w, "checkpoint", refOf(c.Run, c.Trial, c.ID))
	console.Row(w, "step", c.Step)
	console.Row(w, "saved by", fmt.Sprintf("%d ranks, attempt %d", c.WorldSize, c.Attempt))
	console.Row(w, "committed", fmt.Sprintf("%s, sequence %d", console.When(c.EndedAt), c.CommittedSeq))
	console.Row(w, "continues", c.Parent)
	if s.Fork != nil {
		printFork(w, *s.Fork)
	}
	console.Row(w, "size", fmt.Sprintf("%s: %s written, %s reused", bytesize.Text(c.Bytes), bytesize.Text(c.BytesWritten), bytesize.Text(c.BytesReused)))
	console.Row(w, "files", fmt.Sprintf("%s shared with other checkpoints, %s exclusive", orDash(console.MaybeSize(s.Shared)), orDash(console.MaybeSize(s.Exclusive))))
	if x := s.Cost; x != nil {
		console.Row(w, "cost", fmt.Sprintf("%s saved (%d requests), %s a load (%d requests), %s a month (%s)",
			dollars(x.Save), x.SaveRequests, dollars(x.Load), x.LoadRequests, dollars(x.Month), bytesize.Text(x.Bytes)))
	}
	console.Row(w, "manifest", c.Manifest)
	console.Row(w, "path", s.Path)
	printStanding(w, s.Run)
}

// printFork prints where a trial was forked from, and what differs in its configuration.
func printFork(w *tabwriter.Writer, f answer.Fork) {
	from := f.Parent
	if f.Step != nil {
		from += fmt.Sprintf(", step %d", *f.Step)
	}
	console.Row(w, "forked from", from)
	for _, c := range f.Changes {
		console.Row(w, "changed", fmt.Sprintf("%s: %s → %s", c.Name, configText(c, insight.Added, c.A), configText(c, insight.Removed, c.B)))
	}
}

// orDash returns text, or "-" if it is empty.
func orDash(text string) string {
	if text == "" {
		return "-"
	}
	return text
}

// printReshard prints what each rank of a group of another size would read. OVER-READ
// is bytes read from disk per requested byte: reads cover whole checksum blocks.
func printReshard(w *tabwriter.Writer, wide bool, p *planner.Preview) {
	fmt.Fprintln(w)
	console.Row(w, "RANK", "SIZE", "OVER-READ", "READS", "MISSING", "FROM RANKS")
	for _, r := range p.Ranks {
		console.Row(w, r.Rank, bytesize.Text(r.Bytes), factor(r.Read, r.Bytes), r.Reads, bytesize.Text(r.Missing), from(r, wide))
	}
	console.Row(w, "all", bytesize.Text(p.Bytes), factor(p.Read, p.Bytes))
	for _, gap := range insight.Lacking(p) {
		fmt.Fprintf(w, "\n%s has one value per rank, and none was saved for %s.\n", gap.FQN, named(gap.Ranks))
	}
	for _, gap := range insight.Unread(p) {
		fmt.Fprintf(w, "\nNo rank reads %s of %s.\n", gap.FQN, named(gap.Ranks))
	}
}

// factor returns the bytes read per requested byte.
func factor(read, bytes int64) string {
	if bytes == 0 {
		return "-"
	}
	return fmt.Sprintf("%.2f", float64(read)/float64(bytes))
}

// from lists the ranks whose files a rank reads; in a wide table, with the sizes.
func from(r planner.RankPreview, wide bool) string {
	var ranks []int
	var sizes []string
	for _, f := range r.Files {
		ranks = append(ranks, f.Rank)
		sizes = append(sizes, fmt.Sprintf("%d: %s", f.Rank, bytesize.Text(f.Bytes)))
	}
	if wide {
		return strings.Join(sizes, ", ")
	}
	return ranges(ranks)
}

// ranges abbreviates ascending numbers: 0-3,7.
func ranges(ranks []int) string {
	var out []string
	for i := 0; i < len(ranks); i++ {
		first := ranks[i]
		for i+1 < len(ranks) && ranks[i+1] == ranks[i]+1 {
			i++
		}
		text := fmt.Sprint(first)
		if ranks[i] > first {
			text += fmt.Sprintf("-%d", ranks[i])
		}
		out = append(out, text)
	}
	return strings.Join(out, ",")
}

func named(ranks []int) string {
	if len(ranks) == 1 {
		return fmt.Sprintf("rank %d", ranks[0])
	}
	return "ranks " + ranges(ranks)
}

// shownForeign is the output of `show PATH --json`.
type shownForeign struct {
	Path    string          `json:"path"`
	Format  data.Format     `json:"format"`
	Ranks   int             `json:"ranks"` // that hold data
	Bytes   int64           `json:"bytes"`
	Tensors []answer.Tensor `json:"tensors"`
	Values  []answer.Value  `json:"values"`

	Reshard *planner.Preview `json:"reshard,omitempty"`
}

// showPath shows a checkpoint of another program.
func (a *app) showPath(ctx context.Context, path string, reshard int) error {
	s, err := openPath(ctx, path)
	if err != nil {
		return err
	}
	tensors, values := answer.Layout(s.manifest.Layout)
	out := shownForeign{
		Path: s.foreign.Path(), Format: s.foreign.Format(), Ranks: len(s.manifest.Ranks), Bytes: s.manifest.Layout.Bytes(),
		Tensors: tensors, Values: values,
	}
	if out.Reshard, err = answer.Preview(s.manifest.Layout, reshard); err != nil {
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

// printLayout prints tensors and values as tables.
func printLayout(w *tabwriter.Writer, wide bool, tensors []answer.Tensor, values []answer.Value) {
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

// verifiedPath is the output of `verify PATH --json`.
type verifiedPath struct {
	Path     string         `json:"path"`
	Format   data.Format    `json:"format"`
	Files    int            `json:"files"`
	Chunks   int            `json:"chunks"`
	Bytes    int64          `json:"bytes"`
	Unknown  int            `json:"unknown"` // chunks without a checksum in the files
	Findings []data.Finding `json:"findings"`
}
