package main

import (
	"fmt"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/internal/answer"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/internal/tune"
)

func (a *app) trialsCommand() *cobra.Command {
	return &cobra.Command{
		Use: "trials RUN", Short: "List the trials of a search, and check its decisions", Args: console.Args(cobra.ExactArgs(1)),
		Long: `List the trials of a run that trainer tune trains: their states, how far they are trained,
and the metric on the highest rung that they have reached, with the best one marked. AT has the
steps of that rung.

A trial is running; due, if it has steps to train and no slot; paused, if it waits on its rung and
may be trained further; done, on the last rung; completed, if its workers ended before that;
errored; or new.

The command folds the log from the beginning of the search, and computes each decision again. If a
decision in the log does not follow from the events before it, the command prints it and exits with
code 6.`,
		Example: "  ckptstore trials mnist\n  ckptstore trials mnist --json",
		RunE: func(c *cobra.Command, runs []string) error {
			return a.read(c.Context(), func(s *store.Store) error {
				board, err := answer.SearchOf(c.Context(), s, runs[0])
				if err != nil {
					return err
				}
				return a.printSearch(board)
			})
		},
	}
}

func (a *app) printSearch(board tune.Board) error {
	err := console.Emit(a.Console, board, board.Trials, func(w *tabwriter.Writer, _ bool) {
		for _, cells := range board.Table() {
			console.Row(w, cells...)
		}
		for _, d := range board.Differ {
			fmt.Fprintf(w, "event %d assigns rung %d to trial %s, but %s\n", d.Sequence, d.Rung, d.Trial, d.Problem)
		}
	})
	switch {
	case err != nil || a.Quiet:
	case board.Over:
		fmt.Fprintf(a.Err, "%d decisions; nothing is left to train\n", board.Decisions)
	default:
		fmt.Fprintf(a.Err, "%d decisions; trials are left to train, and the same `trainer tune` continues the search\n", board.Decisions)
	}
	if err == nil && len(board.Differ) > 0 {
		err = errFindings
	}
	return err
}
