package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/internal/answer"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/insight"
	"github.com/ckptstore/ckptstore/internal/logpeers"
	"github.com/ckptstore/ckptstore/internal/store"
)

func (a *app) nodesCommand() *cobra.Command {
	id := ""
	c := &cobra.Command{
		Use: "nodes [RUN]", Short: "List the nodes of a run's job", Args: console.Args(cobra.MaximumNArgs(1)),
		Long: `List the nodes of the newest job of RUN, or of the newest job of the store, by index.

A node is ready (joined, while no group runs), active (part of the running group), spare
(joined, and not part of the running group), left (its trainer ended in order), lost (it
was silent for --node-timeout, its trainer started again, or the whole job is lost) or
excluded (its ranks failed again and again while no others did, or the preflight found it bad: see
--max-node-failures and --preflight of trainer run). RANKS
are its ranks in the job's newest group. A node that replaces a lost one takes its index:
JOINS in -o wide counts the nodes that had the index. MB/S is the rate of the node's network in
the preflight, and CLOCK the seconds by which its clock was ahead of the coordinating node's, at least.

An active node is slow, with the times in WHY, if its ranks were busy at least 1.3 times as long as those of
the other nodes in 20 of its last 30 iterations, by the metric busy_this_iter_s of the workers, or took so much
longer to copy a GB in 20 of the last 30 saves. It is not excluded for that.

In a job with --replicas, another node, ON, has a copy of the node's slots in memory. REPLICA is the
newest save whose copy is whole, and LAG the time from the first seal to the whole copy.

Below the nodes, on the standard error, is the last attempt of the job that has ended, and why: a failure, a
request, the end of the training, or growth, when nodes have joined a job of --nnodes MIN:MAX.

A copy of the log (--log-replicas) that is not in the store's directory is named below the list.

The states are those in the log. How long a node has been silent is known to the job's
coordinating trainer only, whose output names a node that misses beats.`,
		Example: "  ckptstore nodes bert\n  ckptstore nodes bert --job 3f2a91c0 -o wide\n  ckptstore nodes bert --json | jq -r '.nodes[] | select(.state == \"lost\") | .host'",
		RunE: func(c *cobra.Command, names []string) error {
			run := ""
			switch {
			case len(names) == 1:
				run = names[0]
			case id != "":
				return console.Usagef("--job %s: name its RUN too", id)
			}
			return a.read(c.Context(), func(s *store.Store) error { return a.nodes(c.Context(), s, run, id) })
		},
	}
	c.Flags().StringVar(&id, "job", "", "job ID, or the beginning or end of one (default: the newest job)")
	return c
}

func (a *app) nodes(ctx context.Context, s *store.Store, run, id string) error {
	named := run != ""
	from := answer.Live(s)
	if !named {
		var err error
		if run, err = answer.NewestRun(ctx, from); err != nil {
			return err
		}
	}
	l, err := answer.Nodes(ctx, from, run, id)
	if err != nil {
		return err
	}
	err = console.Emit(a.Console, l, l.Nodes, func(w *tabwriter.Writer, wide bool) { printNodes(w, wide, l.Nodes) })
	if a.Quiet {
		return err
	}
	if !named {
		fmt.Fprintf(a.Err, "job %s of run %s\n", l.Job, run)
	}
	if l.LastEnd != nil {
		fmt.Fprintf(a.Err, "the last attempt that ended is %v\n", *l.LastEnd)
	}
	if len(l.Nodes) == 0 {
		fmt.Fprintf(a.Err, "job %s has recorded no nodes\n", l.Job)
	}
	missing, merr := a.missingCopies()
	if missing != "" {
		fmt.Fprintf(a.Err, "%s; see `ckptstore log-copies`\n", missing)
	}
	return errors.Join(err, merr)
}

func printNodes(w *tabwriter.Writer, wide bool, nodes []insight.Node) {
	head := []any{"NODE", "HOST", "STATE", "RANKS", "SINCE", "WHY"}
	copied := slices.ContainsFunc(nodes, func(n insight.Node) bool { return n.Replica != nil })
	if copied {
		head = slices.Insert(head, 5, any("REPLICA"), any("ON"), any("LAG"))
	}
	if wide {
		head = append(head, "JOINS", "MB/S", "CLOCK")
	}
	console.Row(w, head...)
	for _, n := range nodes {
		why := n.Why
		if n.Slow != nil {
			why = n.Slow.String()
		}
		cells := []any{n.Node, n.Host, n.State, ranges(n.Ranks), console.When(n.Since), why}
		switch of := n.Replica; {
		case of != nil:
			cells = slices.Insert(cells, 5, any(of.Checkpoint), any(of.Node), any(time.Duration(of.Lag*float64(time.Second)).Round(time.Millisecond)))
		case copied:
			cells = slices.Insert(cells, 5, any(""), any(""), any(""))
		}
		if wide {
			rate := ""
			if n.BytesPerSecond != nil {
				rate = fmt.Sprintf("%.1f", float64(*n.BytesPerSecond)/1e6)
			}
			clock := ""
			if n.ClockSeconds != nil {
				clock = fmt.Sprintf("%+.3f", *n.ClockSeconds)
			}
			cells = append(cells, n.Joins, rate, clock)
		}
		console.Row(w, cells...)
	}
}

// logCopies is the output of `log-copies --json`.
type logCopies struct {
	Store  string               `json:"store"`
	Copies []logpeers.CopyState `json:"copies"`
}

func (a *app) logCopiesCommand() *cobra.Command {
	replace := -1
	c := &cobra.Command{
		Use: "log-copies", Short: "List the copies of a log, and make a lost one again", Args: console.Args(cobra.NoArgs),
		Long: `List the copies of the log of a store that was made by a job with --log-replicas 3.

A copy is here (in the store's directory), filling (made again, and not known to have all that the
others have) or away (on the disk of its node, or gone).

--replace K makes copy K, whose files are gone for good, again in the store's directory, from the two
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
	c.Flags().IntVar(&replace, "replace", -1, "copy to make again: 0, 1 or 2")
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
