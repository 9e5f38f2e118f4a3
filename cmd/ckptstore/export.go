package main

import (
	"context"
	"errors"
	"fmt"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/internal/bytesize"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/foreign"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/planner"
)

const exportHelp = `Write a checkpoint into the directory DIR, in a format of other programs.

  dcp          a PyTorch Distributed Checkpoint for dcp.load: a file for each rank,
               and .metadata; values as they were saved
  safetensors  model.safetensors with whole tensors
  hf           a Hugging Face directory: files of at most --max-shard-size, and
               model.safetensors.index.json

Safetensors files cannot hold values: the values left out are listed on stderr, and in
JSON as left_out. The export is written and synced next to DIR and renamed at the end,
so DIR is either complete or absent. A DIR with files is refused; --force replaces it
if it contains only an export, and no file from which a checkpoint is read (this one,
or one imported in place).

With --self-contained, DIR becomes a store of this checkpoint alone, without a log:
data/RUN/TRIAL/ID as in the store, and ORIGIN.json, which names the original store,
event and manifest. Unlike the directory in the store, it has no hard link to files of
other checkpoints and does not depend on files imported in place, so cp, rsync and tar
copy all of it. Read it in place with --store DIR --offline, or create a log for it with
"ckptstore recover --store DIR". Receipt, manifest and indexes prove it as in the store. The manifest is
that of the log, unless chunks had to be moved out of shared or adopted files.

` + offlineHelp + `

` + pathHelp + `

Exit codes: 0 exported, 1 failed, 2 usage, 4 no such checkpoint,
5 DIR is not empty, 6 bytes of the checkpoint are damaged.`

// exported is the output of `export --json`.
type exported struct {
	Checkpoint string `json:"checkpoint"`
	foreign.Exported
	Place  string        `json:"place,omitempty"`  // self-contained: place of the checkpoint in path
	Origin *store.Origin `json:"origin,omitempty"` // self-contained only
}

// ownFormat is the format of a self-contained export.
const ownFormat data.Format = "ckptstore"

func (a *app) exportCommand() *cobra.Command {
	var o foreign.ExportOptions
	var format, shard string
	var offline, whole bool
	c := &cobra.Command{
		Use: "export REF DIR --format dcp|safetensors|hf|--self-contained", Short: "Export a checkpoint to PyTorch DCP, safetensors or Hugging Face, or as a store of its own", Long: exportHelp,
		Args: console.Args(cobra.ExactArgs(2)),
		Example: `  ckptstore export bert@step-2000 out/dcp --format dcp
  ckptstore export bert out/hf --format hf --max-shard-size 2GB
  ckptstore export bert@step-2000 bert-2000 --self-contained && rsync -a bert-2000 host:`,
		RunE: func(c *cobra.Command, given []string) (err error) {
			if whole {
				for _, name := range []string{"format", "max-shard-size", "force"} {
					if c.Flags().Changed(name) {
						return console.Usagef("--%s does not go with --self-contained: omit one of them", name)
					}
				}
				return a.withSource(c.Context(), given[0], all, offline, func(s source) error { return a.exportWhole(c.Context(), s, given[1]) })
			}
			switch o.Format = data.Format(format); o.Format {
			case data.DCP, data.SafeTensors, data.HuggingFace:
			default:
				return console.Usagef("--format %q: want dcp, safetensors or hf", format)
			}
			if o.MaxShard, err = console.ParseSize(shard); err != nil {
				return console.Usagef("--max-shard-size: %w", err)
			}
			return a.withSource(c.Context(), given[0], all, offline, func(s source) error { return a.export(c.Context(), s, given[1], o) })
		},
	}
	f := c.Flags()
	f.StringVar(&format, "format", "", "format: dcp, safetensors or hf")
	f.StringVar(&shard, "max-shard-size", "5GB", "with --format hf: start another file above this size, such as 500MB or 2GiB")
	f.BoolVar(&whole, "self-contained", false, "make DIR a store of this checkpoint alone, without a log")
	f.BoolVar(&offline, "offline", false, "read only receipts: no lock, no log")
	f.BoolVar(&o.Replace, "force", false, "replace an export in DIR")
	return c
}

func (a *app) export(ctx context.Context, s source, dir string, o foreign.ExportOptions) error {
	bar := a.Progress("export", s.manifest.Layout.Bytes())
	defer bar.Done()
	o.Progress = bar.Set
	o.Stale = func(dir string, replaced bool) {
		if replaced {
			a.Warn("%s is the old content of a directory, left by an interrupted export; move it back, or remove it", dir)
			return
		}
		a.Warn("%s was left by an interrupted export; remove it if no export is running", dir)
	}
	if s.foreign != nil {
		var err error
		if o.Keep, err = a.adopting(); err != nil {
			return err
		}
	}
	done, err := store.ExportTo(ctx, s.reader, dir, o)
	if err != nil {
		return err
	}
	bar.Done()
	for _, hole := range planner.Holes(s.manifest.Layout) {
		a.Warn("exported as it is: %v", hole)
	}
	for _, v := range done.LeftOut {
		a.Warn("left out: value %q of rank %d (%s): %s", v.FQN, v.Rank, bytesize.Text(v.Bytes), v.Reason)
	}
	out := exported{Checkpoint: s.name, Exported: done}
	return console.Emit(a.Console, out, []exported{out}, func(w *tabwriter.Writer, _ bool) {
		fmt.Fprintf(w, "%s: %d tensors, %d values, %s in %d files of %s\n", out.Checkpoint, out.Tensors, out.Values, bytesize.Text(out.Bytes), out.Files, out.Path)
	})
}

// exportWhole writes a directory that is a store of one checkpoint.
func (a *app) exportWhole(ctx context.Context, s source, dir string) error {
	r, ok := s.reader.(*data.FileReader)
	if !ok {
		return console.Usagef("--self-contained: %s is a checkpoint of another program: import it, then export the imported one", s.name)
	}
	digest, err := checkpoint.ParseDigest(s.checkpoint.Manifest)
	if err != nil {
		return err
	}
	bar := a.Progress("export", s.manifest.Layout.Bytes())
	defer bar.Done()
	stale := func(path string) {
		a.Warn("%s was left by an interrupted export; remove it if no export is running", path)
	}
	done, err := store.ExportWhole(ctx, r.Root(), store.RefOf(s.checkpoint), digest, dir, stale, bar.Set)
	if err != nil {
		return err
	}
	bar.Done()
	out := exported{
		Checkpoint: s.name, Place: done.Place, Origin: &done.Origin,
		Exported: foreign.Exported{
			Path: done.Path, Format: ownFormat, Files: done.Files, Tensors: done.Tensors, Values: done.Values, Bytes: done.Bytes, LeftOut: []foreign.LeftOut{},
		},
	}
	return console.Emit(a.Console, out, []exported{out}, func(w *tabwriter.Writer, _ bool) {
		fmt.Fprintf(w, "%s: %d tensors, %d values, %s in %d files of %s, as %s\n", out.Checkpoint, out.Tensors, out.Values, bytesize.Text(out.Bytes), out.Files, out.Path, out.Place)
		if done.Origin.Rewritten {
			fmt.Fprintf(w, "its manifest differs from that of event %d of store %s: chunks were moved out of shared or adopted files\n", done.Origin.Sequence, done.Origin.Store)
		}
	})
}

// adopting returns the data directory of the store, whose adopted files an export of a
// path must not replace; nil if there is no store.
func (a *app) adopting() (*data.Root, error) {
	if store.IsURL(a.location) {
		return nil, nil
	}
	data, err := a.data()
	if errors.Is(err, store.ErrNoStore) {
		return nil, nil
	}
	return data, err
}
