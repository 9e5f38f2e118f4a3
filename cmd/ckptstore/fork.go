package main

import (
	"encoding/json"
	"fmt"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/internal/answer"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/store"
)

func (a *app) forkCommand() *cobra.Command {
	var set []string
	c := &cobra.Command{
		Use: "fork REF NEWRUN", Short: "Start a new run from a checkpoint of another run", Args: console.Args(cobra.ExactArgs(2)),
		Long: `Create the run NEWRUN, whose first job resumes from the checkpoint REF. Its
configuration is that of the original run, changed by --set. Nothing is copied; the
checkpoint is pinned, so that no policy deletes it.

Exit codes: 4 REF is not a committed checkpoint, 5 NEWRUN exists.`,
		Example: "  ckptstore fork bert@step-2000 bert-lr3\n  ckptstore fork bert@best:loss:min bert-lr3 --set lr=3e-4 --set warmup=500\n  trainer run --name bert-lr3 -- python3 train.py",
		RunE: func(c *cobra.Command, given []string) error {
			config, err := parseSet(set)
			if err != nil {
				return err
			}
			return a.with(c.Context(), func(s *store.Store) error {
				t, err := s.Fork(c.Context(), given[0], given[1], config)
				if err != nil {
					return err
				}
				out := answer.ForkedFrom(t)
				return console.Emit(a.Console, out, []answer.Forked{out}, func(w *tabwriter.Writer, _ bool) {
					fmt.Fprintf(w, "forked %s to run %s; resume from it with `trainer run --name %s -- COMMAND`\n", out.Parent, out.Run, quoted([]string{out.Run}))
				})
			})
		},
	}
	c.Flags().StringArrayVar(&set, "set", nil, "set KEY=VALUE in the configuration; VALUE is JSON or plain text (repeatable)")
	return c
}

// parseSet reads KEY=VALUE pairs as the trainer does.
func parseSet(pairs []string) (map[string]any, error) {
	config := map[string]any{}
	for _, pair := range pairs {
		key, text, ok := strings.Cut(pair, "=")
		if !ok || key == "" {
			return nil, console.Usagef("--set %q: want KEY=VALUE", pair)
		}
		var value any
		if json.Unmarshal([]byte(text), &value) != nil {
			value = text
		}
		config[key] = value
	}
	return config, nil
}
