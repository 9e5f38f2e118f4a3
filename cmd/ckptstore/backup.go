package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/internal/bytesize"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/internal/store/copier"
)

const backupHelp = `Copy the store into the directory DIR, consistently, while jobs save to it.

The copy is the store as of one event, whose sequence is printed. It has every event up
to that one, and all files of the checkpoints that were committed by then and not
deleted. It includes everything that was acknowledged before the command started.
Jobs, gc and other commands can run meanwhile. The backup does not depend on the
process that owns the store: it continues if that process ends.

DIR must be absent or empty. An interrupted backup is not a store; run the same
command again, which copies only what is missing. ls, show, verify, export and cat can
read the finished backup with --store DIR. It is never written to: create a store from
it with "ckptstore restore DIR --store NEW".

If the filesystem supports it, files share their blocks with the originals; otherwise
every byte is copied. With --link, the files of checkpoints are hard-linked, which
takes no space. Such a backup protects against deletion and loss of the log, but not
against a failing disk, because the bytes are the same. While it exists, gc cannot free
the bytes of the checkpoints that it deletes.

A backup does not contain uncommitted saves, files that were imported in place (they
are listed), directories in data/ that are not in the log, or the leases of running
jobs.

Exit codes: 0 ok, 1 failed, 2 usage, 5 DIR is not empty, 6 backed up, but checkpoints
of the store lack files, 10 no store, 11 locked.`

const restoreHelp = `Create the store --store from the backup in the directory BACKUP.

--store must be absent or empty. Before the store comes into existence, restore checks
that the log opens and ends at the event recorded in the backup, that each
checkpoint's receipt matches its event, that its manifest and indexes are intact, and
that its files have the right sizes. With --verify it also reads every byte. An
interrupted restore leaves no store; run the same command again.

The new store has the identity of the original and continues where the backup ends.
Run jobs in only one of the two: if both continue, each has events and checkpoints
that the other lacks, and they cannot be merged.

Exit codes: 0 ok, 1 failed, 2 usage, 5 --store is not empty, 6 restored, but
checkpoints are incomplete or the backup is damaged, 10 no backup, 11 locked.`

func (a *app) backupCommand() *cobra.Command {
	var o store.BackupOptions
	c := &cobra.Command{
		Use: "backup DIR", Short: "Back up the store, while jobs save to it", Long: backupHelp, Args: console.Args(cobra.ExactArgs(1)),
		Example: `  ckptstore backup /mnt/backup/2026-01-31
  ckptstore backup /data/snapshots/before-upgrade --link`,
		RunE: func(c *cobra.Command, given []string) error {
			return a.with(c.Context(), func(s *store.Store) error {
				bar := a.Progress("backup", 0)
				defer bar.Done()
				if bar.Shown() {
					o.Progress = bar.SetOf
				}
				out, err := s.Backup(c.Context(), given[0], o)
				bar.Done()
				if err != nil {
					return err
				}
				a.warnOutside(out.Outside)
				err = console.Emit(a.Console, out, []store.Backed{out}, func(w *tabwriter.Writer, _ bool) {
					fmt.Fprintf(w, "%s: %d checkpoints up to event %d; %s in %d files copied, %d linked, %d already there\n",
						out.Path, out.Checkpoints, out.Sequence, bytesize.Text(out.Bytes), out.Files, out.Linked, out.Kept)
				})
				return errors.Join(err, a.incomplete(out.Incomplete))
			})
		},
	}
	c.Flags().BoolVar(&o.Link, "link", false, "hard-link the files of checkpoints instead of copying; DIR must be on the same filesystem")
	return c
}

func (a *app) restoreCommand() *cobra.Command {
	var deep bool
	c := &cobra.Command{
		Use: "restore BACKUP", Short: "Create a store from a backup", Long: restoreHelp, Args: console.Args(cobra.ExactArgs(1)),
		Example: "  ckptstore restore /mnt/backup/2026-01-31 --store ckpts",
		RunE: func(c *cobra.Command, given []string) error {
			bar := a.Progress("restore", 0)
			defer bar.Done()
			o := store.RestoreOptions{Backup: given[0], Location: a.location, Deep: deep, Logger: a.logger()}
			if bar.Shown() {
				o.Progress = bar.SetOf
			}
			out, err := store.Restore(c.Context(), o)
			bar.Done()
			if err != nil {
				return err
			}
			a.warnOutside(out.Outside)
			err = console.Emit(a.Console, out, []store.Restored{out}, func(w *tabwriter.Writer, _ bool) {
				checked := "sizes, indexes, manifests and receipts checked; `ckptstore verify` reads every byte"
				if out.Verified {
					checked = "every byte was read"
				}
				fmt.Fprintf(w, "%s: %d checkpoints up to event %d, as of %s; %s\n", out.Path, out.Checkpoints, out.Sequence, console.When(out.Made), checked)
			})
			return errors.Join(err, a.incomplete(out.Incomplete))
		},
	}
	c.Flags().BoolVar(&deep, "verify", false, "read every byte of the restored checkpoints")
	return c
}

// warnOutside lists the files that a copy of a store lacks.
func (a *app) warnOutside(list []copier.Outside) {
	for _, o := range list {
		a.Warn("%s was imported in place: its %d files, such as %s, are not in the copy; back them up separately", o.Checkpoint, len(o.Files), o.Files[0])
	}
}

// incomplete lists incomplete checkpoints, and returns errFindings if there are any.
func (a *app) incomplete(list []copier.Incomplete) error {
	for _, i := range list {
		a.Warn("%s is incomplete: %s; see `ckptstore verify %s`", i.Checkpoint, i.Problem, i.Checkpoint)
	}
	if len(list) > 0 {
		return errFindings
	}
	return nil
}

func (a *app) recoverCommand() *cobra.Command {
	var from string
	var of []string
	c := &cobra.Command{
		Use: "recover", Short: "Recover a store whose log is lost, from its receipts", Args: console.Args(cobra.NoArgs),
		Long: `Create a new log for a store whose log is damaged or gone, from the receipts in its
data directory. Each checkpoint that is proven by its receipt, manifest and indexes is
committed again, with the same run, trial and ID. Doubtful checkpoints are not
recovered, but listed with the reason. recover reads no tensor; run ` + "`ckptstore verify`" + `
afterwards.

Without --from, --store is recovered in place: the old log is renamed to log.damaged,
and no file of a checkpoint changes. With --from DIR, DIR stays unchanged, and recover
creates a store in --store whose checkpoints are hard links to the files in DIR/data;
both must be on the same filesystem.

The new store has its own identity, and its first event names the old one. Facts that
were only in the old log are lost, and listed: metrics, attempts, lines, tags, pins and
configurations. New attempts of a trial are numbered above the old ones. recover
refuses a store whose log opens. To finish an interrupted recovery, run the same command
again; until then no process can open the store.`,
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
	c.Flags().StringVar(&from, "from", "", "directory of the lost store (default: recover --store in place)")
	c.Flags().StringSliceVar(&of, "of", nil, "store identities whose receipts to accept, newest first (default: those in store.json)")
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
		if out.Evidence != "" {
			fmt.Fprintf(w, "the tamper evidence of the old log is in %s, and the new log has none: `ckptstore audit keygen FILE` begins it; witnesses need the new key\n", filepath.Clean(out.Evidence))
		}
		for _, u := range out.Unknown {
			fmt.Fprintf(w, "lost with the log: %s\n", u)
		}
	})
}
