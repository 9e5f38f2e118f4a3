package main

import (
	"fmt"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/logpeers"
	"github.com/ckptstore/ckptstore/internal/store"
)

// logCopies is the output of `log-copies --json`.
type logCopies struct {
	Store  string               `json:"store"`
	Copies []logpeers.CopyState `json:"copies"`
}

func (a *app) logCopiesCommand() *cobra.Command {
	replace := -1
	c := &cobra.Command{
		Use: "log-copies", Short: "List the copies of a log, and make a lost one anew", Args: console.Args(cobra.NoArgs),
		Long: `List the copies of the log of a store that was made by a job with --log-replicas 3.

A copy is here (in the store's directory), filling (made anew, and not known to have all that the
others have) or away (on the disk of its node, or gone).

--replace K makes copy K, whose files are gone for good, anew in the store's directory, from the two
others. It runs between two jobs: while a process serves a copy, the exit code is 11. It waits until
the two others agree on every entry of the log, so no acknowledged event is lost. Both must be in the
store's directory. The old copy is refused from then on, wherever it comes back: the next job's node
K runs without --log-replica-dir.`,
		Example: "  ckptstore log-copies --store /shared/runs\n  ckptstore log-copies --store /shared/runs --replace 2",
		RunE: func(c *cobra.Command, _ []string) error {
			if store.IsURL(a.location) || !logpeers.Replicated(a.location) {
				return console.Usagef("log-copies %s: its log has no copies on nodes of a job: a log on a NATS cluster is replaced there, and any other log has one copy", a.location)
			}
			if c.Flags().Changed("replace") {
				if err := logpeers.Replace(c.Context(), a.location, replace, a.wait, a.logger()); err != nil {
					return err
				}
			}
			return a.logCopies()
		},
	}
	c.Flags().IntVar(&replace, "replace", -1, "copy to make anew: 0, 1 or 2")
	return c
}

func (a *app) logCopies() error {
	all, err := logpeers.States(a.location)
	if err != nil {
		return err
	}
	return console.Emit(a.Console, logCopies{a.location, all}, all, func(w *tabwriter.Writer, _ bool) {
		console.Row(w, "COPY", "STATE", "REPLACED", "DIRECTORY")
		for _, c := range all {
			console.Row(w, c.Copy, c.State, c.Replaced, c.Dir)
		}
	})
}

// missingCopies describes the copies of the store's log that are not in its directory; "" if none is
// missing.
func (a *app) missingCopies() (string, error) {
	if store.IsURL(a.location) || !logpeers.Replicated(a.location) {
		return "", nil
	}
	all, err := logpeers.States(a.location)
	var missing []string
	for _, c := range all {
		if c.State != logpeers.CopyHere {
			missing = append(missing, fmt.Sprintf("copy %d of the log is %s", c.Copy, c.State))
		}
	}
	return strings.Join(missing, ", "), err
}
