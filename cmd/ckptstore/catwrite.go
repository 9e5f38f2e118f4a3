package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"text/tabwriter"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/tensor"
)

// written is `cat REF FQN -o FILE --json`.
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

// cutting is one tensor or value on its way out.
type cutting struct {
	source source
	loader *planner.Loader
	want   checkpoint.Want
	head   []byte
	text   *texter
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
				return console.Usagef("stdout is a terminal: give a file with -o, send the bytes elsewhere, or give --force")
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

// cut finds what is asked for, and whether it can be had in that form: nothing
// is read, and nothing written, of what cannot.
func (s source) cut(fqn string, o catOptions) (*cutting, error) {
	want, err := s.want(fqn, o.rank)
	if err != nil {
		return nil, err
	}
	c := &cutting{source: s, loader: planner.NewLoader(s.manifest.Layout), want: want}
	c.report = written{Checkpoint: s.name, FQN: fqn, Kind: "value", Format: o.format}
	if want.Value {
		if o.slice != "" || o.dtype != "" || o.format != formatRaw {
			return nil, console.Usagef("%q is a value, not a tensor: leave out --slice and --dtype, and give no --format but raw", fqn)
		}
		return c, nil
	}
	shard := &c.want.Shard
	part := slice{shard.Box, append(tensor.Shape{}, shard.Global...)}
	if o.slice != "" {
		if part, err = parseSlice(o.slice, shard.Global); err != nil {
			return nil, console.Usagef("--slice %s of %q: %w", o.slice, fqn, err)
		}
	}
	shard.Box = part.box
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
		if c.head, err = npyHeader(shard.DType, part.shape); err != nil {
			return nil, console.Usagef("%q: %w", fqn, err)
		}
	case formatText:
		if npyTypes[shard.DType] == "" || shard.DType == tensor.Float16 {
			shard.DType = wider(shard.DType) // which loses nothing
		}
		if c.text, err = newTexter(nil, shard.DType, part.shape); err != nil {
			return nil, console.Usagef("%q: %w", fqn, err)
		}
	}
	c.report.Kind, c.report.DType, c.report.Shape, c.report.Box = "tensor", shard.DType.String(), part.shape, &part.box
	// A window might lie before what is missing.
	_, err = c.loader.Load([]checkpoint.Want{c.want})
	return c, err
}

// write reads it, a window at a time.
func (c *cutting) write(ctx context.Context, w io.Writer) error {
	out := &counter{w: w}
	defer func() { c.report.Bytes = out.n }()
	c.out = out
	if c.want.Value {
		return c.part(ctx, c.want, make(single, c.loader.Size(c.want)))
	}
	if c.text != nil {
		c.text.w.Reset(out)
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
		return c.text.end()
	}
	return nil
}

// part reads what fits into buf and writes it.
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

// counter counts what is written.
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

// wholeFile writes a file under another name beside it, and gives it its own at
// the end: what is at the path is whole, or as it was. A pipe or a device is
// written as it is.
func wholeFile(path string, write func(io.Writer) error) (err error) {
	info, err := os.Stat(path)
	switch {
	case err == nil && info.IsDir():
		return console.Usagef("-o %s: it is a directory: name a file", path)
	case err == nil && !info.Mode().IsRegular():
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			return fmt.Errorf("write into %s: %w", path, err)
		}
		return errors.Join(write(f), f.Close())
	case err == nil:
		// What a link leads to is replaced, not the link.
		if path, err = filepath.EvalSymlinks(path); err != nil {
			return fmt.Errorf("write %s: %w", path, err)
		}
	case !errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("write %s: %w", path, err)
	}
	mode := fs.FileMode(0o666) // less what the user's mask takes away
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
			_ = os.Remove(temp) // what led here is the error to report
		}
	}()
	if err = errors.Join(write(f), f.Close()); err != nil {
		return err
	}
	return os.Rename(temp, path)
}
