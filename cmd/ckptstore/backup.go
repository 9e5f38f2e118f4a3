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
)

const backupHelp = `Copy the store in --store into the directory DIR, while jobs save to it.

The copy is the store as of one event, which is printed: it lists each
checkpoint that was committed up to then and not deleted, with all of its files,
and has every event up to then. All that was acknowledged before the command
began is in it. Jobs, gc and other commands go on meanwhile; the command works
beside the process that owns the store, and survives its end.

DIR must be absent or empty. A backup that was cut leaves no store: run the same
command again, which copies only what is missing. In the end DIR is read like a
store: ls, show, verify, export and cat take it with --store DIR. It is not
written to: "ckptstore restore DIR --store NEW" makes a store of it.

Where the filesystem can, files share their blocks with the originals; otherwise
every byte is copied. With --link, files of checkpoints are hard-linked, which
takes no room: such a backup protects the log, and against deletion. It does not
protect against a disk that fails, because the bytes are the same. gc does not
free the bytes of what it deletes while a backup has links to them.

Not contained: saves that were not committed, files of other programs that were
imported in place (they are listed), directories in data/ that the log does not
know, and the leases of running jobs.

Exit codes: 0 made, 1 failed, 2 usage, 5 DIR is not empty, 6 made, but
checkpoints lack files in the store already, 10 no store, 11 locked.`

const restoreHelp = `Make a store in the directory of --store from the backup in the directory BACKUP.

--store must be absent or empty. Before the store exists, this is checked: the
log opens and ends where the backup says, the receipt of each checkpoint is that
of its event, its manifest and indexes are whole, and its files have their sizes.
With --verify, every byte is read too. A restore that was cut leaves no store:
run the same command again.

The new store has the identity of the one that was backed up, and goes on where
the backup ends: what came later is unknown to it. Run jobs in one of the two
only. Where both go on, each has events and checkpoints that the other lacks, and
they cannot be joined.

Exit codes: 0 restored, 1 failed, 2 usage, 5 --store is not empty, 6 restored,
but checkpoints are not whole, or the backup is damaged, 10 no backup, 11 locked.`

func (a *app) backupCommand() *cobra.Command {
	var o store.BackupOptions
	c := &cobra.Command{
		Use: "backup DIR", Short: "Copy the store, consistently, while jobs save to it", Long: backupHelp, Args: console.Args(cobra.ExactArgs(1)),
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
					fmt.Fprintf(w, "%s: %d checkpoints up to event %d; %s in %d files copied, %d linked, %d there before\n",
						out.Path, out.Checkpoints, out.Sequence, bytesize.Text(out.Bytes), out.Files, out.Linked, out.Kept)
				})
				return errors.Join(err, a.incomplete(out.Incomplete))
			})
		},
	}
	c.Flags().BoolVar(&o.Link, "link", false, "hard-link the files of checkpoints; DIR must be on the same filesystem")
	return c
}

func (a *app) restoreCommand() *cobra.Command {
	var deep bool
	c := &cobra.Command{
		Use: "restore BACKUP", Short: "Make a store of a backup", Long: restoreHelp, Args: console.Args(cobra.ExactArgs(1)),
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

// warnOutside says what a copy of a store does not have.
func (a *app) warnOutside(list []store.OutsideFiles) {
	for _, o := range list {
		a.Warn("%s was imported in place: its %d files, such as %s, are not in the copy: back them up by themselves", o.Checkpoint, len(o.Files), o.Files[0])
	}
}

// incomplete says which checkpoints are not whole.
func (a *app) incomplete(list []store.Incomplete) error {
	for _, i := range list {
		a.Warn("%s is not whole: %s; `ckptstore verify %s` says more", i.Checkpoint, i.Problem, i.Checkpoint)
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
