package main

import (
	"fmt"
	"os"
	"path/filepath"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/internal/bytesize"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/store"
)

func (a *app) recoverCommand() *cobra.Command {
	var from string
	var of []string
	c := &cobra.Command{
		Use: "recover", Short: "Make a store anew from receipts, when its log is lost", Args: console.Args(cobra.NoArgs),
		Long: `Make a new log for a store whose log is damaged or gone, from the receipts in
its data alone. Each checkpoint that its receipt, manifest and indexes prove is
committed again, under the same run, trial and ID; what is in doubt is listed
with the reason and becomes none. No tensor is read: run ` + "`ckptstore verify`" + ` after it.

Without --from the store in --store is recovered where it is: the old log is set
aside as log.damaged, and no file of a checkpoint changes. With --from DIR, DIR
stays as it is, and a new store is made in --store whose checkpoints are hard
links to the files in DIR/data; both must be on one filesystem.

The new store has an identity of its own, and its first event names the old one.
What only the old log knew is lost, and listed: metrics, attempts, lines, tags,
pins, configurations. The next attempt of each trial is numbered above all of
before. A store whose log opens is not recovered. A recovery that was cut is
finished by the same command; until then nobody can open the store.`,
		Example: `  ckptstore recover --store ckpts
  ckptstore recover --from /mnt/broken/ckpts --store /mnt/broken/recovered`,
		RunE: func(c *cobra.Command, _ []string) error {
			out, err := store.Recover(c.Context(), store.RecoverOptions{
				Location: a.location, From: from, Of: of, Command: os.Args, Logger: a.logger(),
			})
			if err != nil {
				for _, r := range out.Rejected {
					a.Warn("%s: %s: %s", r.Path, r.Kind, r.Reason)
				}
				return err
			}
			return a.printRecovered(out)
		},
	}
	c.Flags().StringVar(&from, "from", "", "directory of the lost store; without it, --store is recovered in place")
	c.Flags().StringSliceVar(&of, "of", nil, "identities whose receipts count, the newest first (default: as store.json says)")
	return c
}

func (a *app) printRecovered(out store.Recovered) error {
	return console.Emit(a.Console, out, out.Checkpoints, func(w *tabwriter.Writer, wide bool) {
		head := []any{"RUN", "CHECKPOINT", "STEP", "SIZE", "COMMITTED"}
		if wide {
			head = append(head, "MANIFEST", "FORMERLY", "WAS")
		}
		console.Row(w, head...)
		for _, c := range out.Checkpoints {
			cells := []any{c.Run, c.Checkpoint, c.Step, bytesize.Text(c.Bytes), console.When(c.CommittedAt)}
			if wide {
				cells = append(cells, console.Short(c.Manifest), c.Formerly, c.Was)
			}
			console.Row(w, cells...)
		}
		fmt.Fprintf(w, "\nstore %s in %s, formerly %s: %d checkpoints recovered, %d directories rejected\n",
			out.Store, out.Location, out.Formerly[0], len(out.Checkpoints), len(out.Rejected))
		for _, r := range out.Rejected {
			fmt.Fprintf(w, "rejected as %s: %s: %s\n", r.Kind, r.Path, r.Reason)
		}
		if out.Aside != "" {
			fmt.Fprintf(w, "the old log is in %s; remove it when it is no longer needed\n", filepath.Clean(out.Aside))
		}
		for _, u := range out.Unknown {
			fmt.Fprintf(w, "not known any more: %s\n", u)
		}
	})
}
