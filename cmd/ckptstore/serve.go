package main

import (
	"fmt"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/store"
)

func (a *app) initCommand() *cobra.Command {
	var data string
	c := &cobra.Command{
		Use: "init", Short: "Make a new store", Args: args(cobra.NoArgs),
		Long: `Make a new store in the directory --store, or on the NATS server that it
names. On a server, --data is the directory for checkpoints; it must be the
same on every node of every job.`,
		Example: `  ckptstore init --store ckpts
  ckptstore init --store nats://127.0.0.1:4222 --data /mnt/shared/ckpts`,
		RunE: func(c *cobra.Command, _ []string) error {
			id, err := store.Init(c.Context(), a.location, data)
			if err != nil {
				return err
			}
			where := a.location
			if store.IsURL(where) {
				where = jetlog.Redacted(where)
			}
			made := struct {
				Store    string `json:"store"`
				Location string `json:"location"`
			}{id, where}
			return emit(a, made, []any{made}, func(w *tabwriter.Writer, _ bool) {
				fmt.Fprintf(w, "made store %s in %s\n", id, where)
			})
		},
	}
	c.Flags().StringVar(&data, "data", "", "directory for checkpoints, with a URL")
	return c
}

func (a *app) serveCommand() *cobra.Command {
	return &cobra.Command{
		Use: "serve", Short: "Own a store until stopped, so that others connect to it", Args: args(cobra.NoArgs),
		Long: `Own the store until SIGINT or SIGTERM. Trainers and other commands on this
machine connect to its owner; without one, each owns the store while it runs.
When another process owns the store, stand by and own it when that one ends.`,
		RunE: func(c *cobra.Command, _ []string) error {
			if store.IsURL(a.location) {
				return usageError{fmt.Errorf("serve %s: a store on a server has no owner, there is nothing to serve: start a NATS server there (`nats-server -js`), or name a directory with --store",
					jetlog.Redacted(a.location))}
			}
			return a.with(c.Context(), func(s *store.Store) error {
				state := "serving"
				if !s.Owns() {
					state = "another process owns this store; standing by for"
				}
				fmt.Fprintf(a.err, "%s store %s in %s; stop with Ctrl-C\n", state, s.ID, s.Location)
				<-c.Context().Done()
				return nil
			})
		},
	}
}
