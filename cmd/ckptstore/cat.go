package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/internal/bytesize"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/elements"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/tensor"
)

// Formats of cat.
const (
	formatRaw  = "raw"
	formatNPY  = "npy"
	formatText = "text"
)

const catHelp = `Write a tensor or value of a checkpoint to stdout, or to a file with -o. Without FQN, list
the tensors and values; -o is then the format of the list.

Formats:

  raw   the elements of a tensor, row-major and little-endian; for a value, the bytes
        that were saved (for PyTorch, those of torch.save)
  npy   a .npy file of version 1.0, for numpy.load. numpy has no bfloat16 and no
        float8: convert them with --dtype float32
  text  one line per row of the last dimension, for numpy.loadtxt

--slice accepts numpy's basic slicing: for each dimension START:STOP, an index or a
colon, and "..." for the dimensions in between. Negative numbers count from the end, an
index drops its dimension, and a step other than 1 is an error. Only the blocks of 64 KiB
that overlap the slice are read, and each is verified by its checksum first.

-o FILE is written completely or not at all; with --json, cat prints what it read. Binary
data is not written to a terminal without --force.

` + offlineHelp + `

` + pathHelp + `

Exit codes: 0 ok, 1 failed, 2 usage, 4 no such checkpoint, tensor or value,
6 bytes are damaged.`

// catOptions are the flags of cat.
type catOptions struct {
	rank   int    // rank of the value; -1: the lowest
	slice  string // empty: the whole tensor
	format string
	dtype  string // empty: as stored
	file   string // empty: stdout
	force  bool
}

func (a *app) catCommand() *cobra.Command {
	var o catOptions
	var offline bool
	var to string
	c := &cobra.Command{
		Use: "cat REF [FQN]", Short: "Write a tensor, a slice of it, or a value to stdout or a file", Long: catHelp, Args: console.Args(cobra.RangeArgs(1, 2)),
		Example: `  ckptstore cat bert@step-2000
  ckptstore cat bert model.embed.weight > embed.bin
  ckptstore cat bert model.embed.weight --slice 0:10,: --format npy -o embed.npy
  ckptstore cat bert optim.step --format text --offline
  ckptstore cat out/checkpoint-2000 model.embed.weight | sha256sum`,
		RunE: func(c *cobra.Command, given []string) error {
			named := c.Flags().Changed("output")
			if len(given) == 1 {
				if named {
					a.Format = to
				}
				for _, name := range []string{"slice", "format", "dtype", "rank"} {
					if c.Flags().Changed(name) {
						return console.Usagef("--%s needs the FQN of a tensor or value", name)
					}
				}
				if err := a.checkFlags(); err != nil {
					return err
				}
				return a.withSource(c.Context(), given[0], all, offline, a.list)
			}
			if named {
				o.file = to
			}
			if err := o.check(a); err != nil {
				return err
			}
			return a.withSource(c.Context(), given[0], given[1], offline, func(s source) error { return a.cat(c.Context(), s, given[1], o) })
		},
	}
	f := c.Flags()
	// Replaces the flag --output that all commands have.
	f.StringVarP(&to, "output", "o", "", "with FQN: the file to write; without: table, wide, json or jsonl")
	f.StringVar(&o.slice, "slice", "", "write only this part of the tensor, such as 0:10,:,5")
	f.StringVar(&o.format, "format", formatRaw, "format: raw, npy or text")
	f.StringVar(&o.dtype, "dtype", "", "convert the elements to this type, such as float32 (default: as saved)")
	f.BoolVar(&o.force, "force", false, "write binary data to a terminal")
	f.IntVar(&o.rank, "rank", -1, "for per-rank values: the rank (default: the lowest that has the value)")
	f.BoolVar(&offline, "offline", false, "read only receipts: no lock, no log")
	return c
}

// check refuses conflicting flags.
func (o catOptions) check(a *app) error {
	switch o.format {
	case formatRaw, formatNPY, formatText:
	default:
		return console.Usagef("--format %q: want raw, npy or text", o.format)
	}
	switch o.file {
	case "table", "wide", "json", "jsonl":
		return console.Usagef("-o %s: with FQN, -o is the file to write; use ./%s for a file of that name, or omit FQN to list the contents", o.file, o.file)
	case "":
		if a.JSON {
			return console.Usagef("--json: stdout takes the bytes; give a file with -o, or omit FQN to list the contents")
		}
	}
	return nil
}

// held is one row of `cat REF`.
type held struct {
	FQN   string       `json:"fqn"`
	Kind  string       `json:"kind"` // tensor or value
	DType string       `json:"dtype,omitempty"`
	Shape tensor.Shape `json:"shape,omitempty"`
	Rank  int          `json:"rank"` // rank of a value; 0 for a tensor
	Bytes int64        `json:"bytes"`
}

func (a *app) list(s source) error {
	out := struct {
		Checkpoint string `json:"checkpoint"`
		Items      []held `json:"items"`
	}{s.name, []held{}}
	for _, t := range s.manifest.Layout.Tensors {
		out.Items = append(out.Items, held{
			FQN: t.FQN, Kind: "tensor", DType: t.DType.String(), Shape: t.Shape, Bytes: t.Shape.Volume() * int64(t.DType.Size()),
		})
	}
	for _, v := range s.manifest.Layout.Values {
		out.Items = append(out.Items, held{FQN: v.FQN, Kind: "value", Rank: v.Rank, Bytes: v.Bytes})
	}
	return console.Emit(a.Console, out, out.Items, func(w *tabwriter.Writer, _ bool) {
		console.Row(w, "FQN", "KIND", "DTYPE", "SHAPE", "SIZE")
		for _, h := range out.Items {
			shape := ""
			if h.Kind == "tensor" {
				shape = fmt.Sprint([]int64(h.Shape))
			}
			console.Row(w, h.FQN, h.Kind, h.DType, shape, bytesize.Text(h.Bytes))
		}
	})
}

// catWindow is the number of bytes of a tensor in memory at a time.
const catWindow = 64 << 20

// windows splits a box into boxes of at most limit elements, in row-major order. It
// yields none for an empty box.
func windows(box tensor.Box, limit int64) iter.Seq[tensor.Box] {
	return func(yield func(tensor.Box) bool) { cut(box, 0, limit, yield) }
}

// cut splits a box from dimension dim on; the sizes of earlier dimensions are 1.
func cut(box tensor.Box, dim int, limit int64, yield func(tensor.Box) bool) bool {
	if box.Empty() {
		return true
	}
	row := int64(1) // elements per index of dim, counted up to the limit
	for d := len(box.Sizes) - 1; d > dim; d-- {
		if row > limit/box.Sizes[d] {
			row = limit + 1
			break
		}
		row *= box.Sizes[d]
	}
	if dim >= len(box.Sizes) || box.Sizes[dim] <= limit/row {
		return yield(box)
	}
	step := max(limit/row, 1)
	for at := int64(0); at < box.Sizes[dim]; at += step {
		part := tensor.Box{Offsets: slices.Clone(box.Offsets), Sizes: slices.Clone(box.Sizes)}
		part.Offsets[dim] += at
		part.Sizes[dim] = min(step, box.Sizes[dim]-at)
		if row > limit && !cut(part, dim+1, limit, yield) || row <= limit && !yield(part) {
			return false
		}
	}
	return true
}

// want returns the request for the whole tensor or value of a name.
func (s source) want(fqn string, rank int) (checkpoint.Want, error) {
	for _, t := range s.manifest.Layout.Tensors {
		if t.FQN == fqn {
			return checkpoint.Want{Shard: tensor.Shard{FQN: fqn, DType: t.DType, Global: t.Shape, Box: t.Shape.Full()}}, nil
		}
	}
	for _, v := range s.manifest.Layout.Values {
		if v.FQN == fqn && (rank < 0 || rank == v.Rank || !v.PerRank) {
			return checkpoint.Want{Value: true, Shard: tensor.Shard{FQN: fqn}, Rank: v.Rank}, nil
		}
	}
	who := ""
	if rank >= 0 {
		who = fmt.Sprintf(" of rank %d", rank)
	}
	return checkpoint.Want{}, fmt.Errorf("%w: %s has no tensor or value %q%s; list them with `ckptstore cat %s`", projections.ErrNotFound, s.name, fqn, who, s.name)
}

// single is the destination of one want.
type single []byte

// Want implements storage.Destination.
func (b single) Want(int) []byte { return b }

// written is the output of `cat REF FQN -o FILE --json`.
type written struct {
	Checkpoint string       `json:"checkpoint"`
	FQN        string       `json:"fqn"`
	Kind       string       `json:"kind"` // tensor or value
	DType      string       `json:"dtype,omitempty"`
	Shape      tensor.Shape `json:"shape,omitzero"` // of what was written
	Box        *tensor.Box  `json:"box,omitempty"`  // in the tensor
	Format     string       `json:"format"`
	File       string       `json:"file"`
	Bytes      int64        `json:"bytes"`      // of the file
	BytesRead  int64        `json:"bytes_read"` // of the checkpoint, without its indexes
}

// cutting writes one tensor or value.
type cutting struct {
	source source
	loader *planner.Loader
	want   checkpoint.Want
	head   []byte
	text   *elements.Text
	out    io.Writer
	report written
}

// cat writes one tensor or value.
func (a *app) cat(ctx context.Context, s source, fqn string, o catOptions) error {
	c, err := s.cut(fqn, o)
	if err != nil {
		return err
	}
	if o.file == "" {
		if f, ok := a.Raw.(*os.File); ok && !o.force && c.text == nil {
			if info, err := f.Stat(); err == nil && info.Mode()&os.ModeCharDevice != 0 && info.Mode()&os.ModeDevice != 0 && f.Name() != os.DevNull {
				return console.Usagef("stdout is a terminal; write to a file with -o, redirect stdout, or give --force")
			}
		}
		return c.write(ctx, a.Raw)
	}
	if err := wholeFile(o.file, func(w io.Writer) error { return c.write(ctx, w) }); err != nil {
		return err
	}
	c.report.File = o.file
	if !a.JSON {
		return nil
	}
	return console.Emit(a.Console, c.report, []written{c.report}, func(*tabwriter.Writer, bool) {})
}

// cut prepares the output of a tensor or value. It returns an error, before any data is
// read or written, if the options do not fit.
func (s source) cut(fqn string, o catOptions) (*cutting, error) {
	want, err := s.want(fqn, o.rank)
	if err != nil {
		return nil, err
	}
	c := &cutting{source: s, loader: planner.NewLoader(s.manifest.Layout), want: want}
	c.report = written{Checkpoint: s.name, FQN: fqn, Kind: "value", Format: o.format}
	if want.Value {
		if o.slice != "" || o.dtype != "" || o.format != formatRaw {
			return nil, console.Usagef("%q is a value, not a tensor; omit --slice and --dtype, and use --format raw", fqn)
		}
		return c, nil
	}
	shard := &c.want.Shard
	part := elements.Slice{Box: shard.Box, Shape: append(tensor.Shape{}, shard.Global...)}
	if o.slice != "" {
		if part, err = elements.ParseSlice(o.slice, shard.Global); err != nil {
			return nil, console.Usagef("--slice %s of %q: %w", o.slice, fqn, err)
		}
	}
	shard.Box = part.Box
	if o.dtype != "" {
		to, err := tensor.ParseDType(o.dtype)
		if err == nil {
			err = tensor.Convertible(shard.DType, to)
		}
		if err != nil {
			return nil, console.Usagef("--dtype: %w", err)
		}
		shard.DType = to
	}
	switch o.format {
	case formatNPY:
		if c.head, err = elements.NPYHeader(shard.DType, part.Shape); err != nil {
			return nil, console.Usagef("%q: %w", fqn, err)
		}
	case formatText:
		if !elements.HasText(shard.DType) {
			shard.DType = elements.Wider(shard.DType) // lossless
		}
		if c.text, err = elements.NewText(nil, shard.DType, part.Shape); err != nil {
			return nil, console.Usagef("%q: %w", fqn, err)
		}
	}
	c.report.Kind, c.report.DType, c.report.Shape, c.report.Box = "tensor", shard.DType.String(), part.Shape, &part.Box
	// Find missing chunks before the first window is written.
	_, err = c.loader.Load([]checkpoint.Want{c.want})
	return c, err
}

// write reads and writes the tensor or value, one window at a time.
func (c *cutting) write(ctx context.Context, w io.Writer) error {
	out := &counter{w: w}
	defer func() { c.report.Bytes = out.n }()
	c.out = out
	if c.want.Value {
		return c.part(ctx, c.want, make(single, c.loader.Size(c.want)))
	}
	if c.text != nil {
		c.text.Reset(out)
		c.out = c.text
	}
	if len(c.head) > 0 {
		if _, err := out.Write(c.head); err != nil {
			return err
		}
	}
	var buf single
	for box := range windows(c.want.Shard.Box, catWindow/int64(c.want.Shard.DType.Size())) {
		part := c.want
		part.Shard.Box = box
		n := c.loader.Size(part)
		if buf == nil {
			buf = make(single, n) // the first is the largest
		}
		if err := c.part(ctx, part, buf[:n]); err != nil {
			return err
		}
	}
	if c.text != nil {
		return c.text.End()
	}
	return nil
}

// part reads one window into buf and writes it.
func (c *cutting) part(ctx context.Context, want checkpoint.Want, buf single) error {
	wants := []checkpoint.Want{want}
	reads, err := c.loader.Load(wants)
	if err != nil {
		return err
	}
	n, err := c.source.reader.ReadData(ctx, wants, reads, buf)
	c.report.BytesRead += n
	if err != nil {
		return err
	}
	_, err = c.out.Write(buf)
	return err
}

// counter counts the bytes written.
type counter struct {
	w io.Writer
	n int64
}

// Write implements io.Writer.
func (c *counter) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	c.n += int64(n)
	return n, err
}

// wholeFile writes a temporary file in the same directory and renames it at the end, so
// the file at path is either complete or unchanged. It writes to a pipe or device
// directly.
func wholeFile(path string, write func(io.Writer) error) (err error) {
	info, err := os.Stat(path)
	switch {
	case err == nil && info.IsDir():
		return console.Usagef("-o %s is a directory; name a file", path)
	case err == nil && !info.Mode().IsRegular():
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			return fmt.Errorf("write into %s: %w", path, err)
		}
		return errors.Join(write(f), f.Close())
	case err == nil:
		// Replace the target of a link, not the link.
		if path, err = filepath.EvalSymlinks(path); err != nil {
			return fmt.Errorf("write %s: %w", path, err)
		}
	case !errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("write %s: %w", path, err)
	}
	mode := fs.FileMode(0o666) // before the umask
	if info != nil {
		mode = info.Mode().Perm()
	}
	temp := filepath.Join(filepath.Dir(path), fmt.Sprintf(".%s.tmp-%016x", filepath.Base(path), rand.Uint64()))
	f, err := os.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	defer func() {
		if err != nil {
			_ = os.Remove(temp) // err already has the cause
		}
	}()
	if err = errors.Join(write(f), f.Close()); err != nil {
		return err
	}
	return os.Rename(temp, path)
}
