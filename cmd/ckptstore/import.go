package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/bytesize"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/launch/process"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

const importHelp = `Import a PyTorch DCP checkpoint, a .safetensors file or a Hugging Face directory into a
run. The store is created if there is none. Ranks, boxes, dtypes, values and the paths
in the state dict are kept. The log records the import as a job of the run with its own
attempt, which continues the run's line; the next trainer resumes from it.

By default all bytes are copied and digested, and verified from then on. With --in-place
nothing is copied: the store records where each tensor is in the files, and reads it
there. The files must stay in place unchanged: a file whose size or modification time
changes is refused. The store never removes them. Their digests are learned later, by
` + "`ckptstore verify --learn`" + ` or by the owner of the store in the background. Until then,
damage to them is not detected.

Exit codes: 0 ok, 1 failed, 2 usage, 4 no such path, 5 a job of the run is alive,
6 the files are damaged.`

// imported is the output of `import --json`.
type imported struct {
	Store      string      `json:"store"`
	Run        string      `json:"run"`
	Checkpoint string      `json:"checkpoint"`
	Step       int64       `json:"step"`
	Attempt    int         `json:"attempt"`
	From       string      `json:"from"`
	Format     data.Format `json:"format"`
	InPlace    bool        `json:"in_place"`
	Ranks      int         `json:"ranks"`
	Tensors    int         `json:"tensors"`
	Values     int         `json:"values"`
	Bytes      int64       `json:"bytes"`
	Copied     int64       `json:"copied"` // of Bytes
}

type importOptions struct {
	run     string
	step    int64
	inPlace bool
}

func (a *app) importCommand() *cobra.Command {
	var o importOptions
	c := &cobra.Command{
		Use: "import DIR|FILE --run NAME --step N", Short: "Import a checkpoint of another program into a run", Long: importHelp,
		Args: console.Args(cobra.ExactArgs(1)),
		Example: `  ckptstore import out/checkpoint-2000 --run bert --step 2000
  ckptstore import model.safetensors --run llama --step 0 --in-place --json`,
		RunE: func(c *cobra.Command, paths []string) error {
			if o.run == "" || !c.Flags().Changed("step") {
				return console.Usagef("--run and --step are required; see `ckptstore import --help`")
			}
			if o.step < 0 {
				return console.Usagef("--step %d: want 0 or more", o.step)
			}
			if err := store.ValidRun(o.run); err != nil {
				return console.Usagef("--run %q: %w; choose another name", o.run, err)
			}
			return a.importPath(c.Context(), paths[0], o)
		},
	}
	f := c.Flags()
	f.StringVar(&o.run, "run", "", "name of the run, created if necessary")
	f.Int64Var(&o.step, "step", 0, "training step of the checkpoint, which is named step-N")
	f.BoolVar(&o.inPlace, "in-place", false, "read the files where they are instead of copying them")
	return c
}

func (a *app) importPath(ctx context.Context, path string, o importOptions) error {
	from, err := openPath(ctx, path)
	if err != nil {
		return err
	}
	if err := store.Ensure(ctx, a.location, a.wait, a.logger()); err != nil {
		return err
	}
	return a.with(ctx, func(s *store.Store) (err error) {
		job := store.NewID()
		ctx, release, err := s.HoldRun(ctx, o.run, job)
		if running := (*store.RunningError)(nil); errors.As(err, &running) {
			return fmt.Errorf("%w, or choose another --run", err)
		}
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, release()) }()
		out := imported{
			Store: s.ID, Run: o.run, Step: o.step, From: from.foreign.Path(), Format: from.foreign.Format(), InPlace: o.inPlace,
			Tensors: len(from.manifest.Layout.Tensors), Values: len(from.manifest.Layout.Values),
		}
		bar := a.Progress("import", from.manifest.Layout.Bytes())
		defer bar.Done()
		read := int64(0)
		got, err := session.Import(ctx, session.ImportConfig{
			Run: o.run, Trial: projections.DefaultTrial, Job: job, Step: o.step, From: from.foreign, InPlace: o.inPlace,
			Command: os.Args, Reap: process.ReapEarlier, Read: func(n int64) { read += n; bar.Set(read) },
			Logger: a.logger(), NewID: store.NewID,
			ExitCode: func(err error) int { return exitCode(err, ctx.Err() != nil) },
		}, session.Store{
			ID: s.ID, Log: s.Log, Views: store.Queries{From: s.Views()}, Blobs: s.Blobs, Data: s.Data,
			Conflict: func(err error) bool { return errors.Is(err, jetlog.ErrConflict) }, Unserved: store.Unserved,
		})
		if err != nil {
			return err
		}
		bar.Done()
		out.Checkpoint, out.Attempt, out.Ranks, out.Bytes, out.Copied = got.Checkpoint, got.Attempt, got.Ranks, got.Bytes, got.Written
		return console.Emit(a.Console, out, []imported{out}, func(w *tabwriter.Writer, _ bool) {
			how := "copied"
			if out.InPlace {
				how = "adopted in place; run `ckptstore verify " + out.Run + "@" + out.Checkpoint + " --learn` to learn its digests"
			}
			fmt.Fprintf(w, "%s@%s: %d tensors, %d values, %s of %d ranks, %s\n",
				out.Run, out.Checkpoint, out.Tensors, out.Values, bytesize.Text(out.Bytes), out.Ranks, how)
		})
	})
}
