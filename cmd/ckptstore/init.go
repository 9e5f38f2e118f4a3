package main

import (
	"fmt"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/store"
)

const initHelp = `Make a new store in the directory --store, or on the NATS server that it
names. On a server, --data is the directory for checkpoints; it must be the
same on every node of every job. It is marked with the store's identity: where
it is not mounted, nothing is read or written.

The server keeps --replicas copies of the log: 3 on a cluster of at least three
servers, else 1, unless it is given. One copy is as safe as that server's
sync_interval (set it to "always"); three survive the loss of a server.
` + accessHelp

// accessHelp says how clients of a server get in.
const accessHelp = `
Clients of a server (--store nats://HOST:PORT, or tls://HOST:PORT to insist on
TLS) take their credentials from the environment:
  CKPTSTORE_STORE_TOKEN       the token, or
  CKPTSTORE_STORE_TOKEN_FILE  a file of it that only its user can read
  CKPTSTORE_TLS_CA            CA by which the server is checked; insists on TLS
  CKPTSTORE_TLS_CERT, _KEY    this client's own certificate and key`

func (a *app) initCommand() *cobra.Command {
	var o store.URLOptions
	c := &cobra.Command{
		Use: "init", Short: "Make a new store", Args: args(cobra.NoArgs),
		Long: initHelp,
		Example: `  ckptstore init --store ckpts
  ckptstore init --store nats://127.0.0.1:4222 --data /mnt/shared/ckpts --replicas 3`,
		RunE: func(c *cobra.Command, _ []string) error {
			made := store.Made{Location: a.location, Replicas: 1}
			var err error
			if store.IsURL(a.location) {
				made, err = store.InitURL(c.Context(), a.location, o)
			} else if c.Flags().Changed("replicas") {
				return usageError{fmt.Errorf("init %s: --replicas goes with a URL: the log of a directory is in that directory", a.location)}
			} else {
				made.Store, err = store.Init(c.Context(), a.location, o.Data)
			}
			if err != nil {
				return err
			}
			return emit(a, made, []any{made}, func(w *tabwriter.Writer, _ bool) {
				fmt.Fprintf(w, "made store %s in %s", made.Store, made.Location)
				if store.IsURL(a.location) {
					fmt.Fprintf(w, ", copies of the log: %d", made.Replicas)
				}
				fmt.Fprintln(w)
			})
		},
	}
	c.Flags().StringVar(&o.Data, "data", "", "directory for checkpoints, with a URL")
	c.Flags().IntVar(&o.Replicas, "replicas", 0, "servers that keep a copy of the log, with a URL: 1, 3 or 5 (default: as many as the cluster has, up to 3)")
	return c
}
