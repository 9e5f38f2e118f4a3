package main

import (
	"fmt"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/store"
)

const initHelp = `Make a new store in the directory --store, or on the NATS server that it
names. On a server, --data is the directory for checkpoints; it must be the
same on every node of every job. It is marked with the store's identity: where
it is not mounted, nothing is read or written.

The directory is yours alone. With --shared, the members of a group own it
together: directories have the mode 2770 and files 0660, whatever the umask, and
its members take over from each other. Every member of the group can change or
delete everything in the store.

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

// ownGroup stands for the group that the directory of a store has.
const ownGroup = "."

func (a *app) initCommand() *cobra.Command {
	var o store.URLOptions
	var group string
	c := &cobra.Command{
		Use: "init", Short: "Make a new store", Args: console.Args(cobra.NoArgs),
		Long: initHelp,
		Example: `  ckptstore init --store ckpts
  ckptstore init --store /mnt/team/ckpts --shared=research
  ckptstore init --store nats://127.0.0.1:4222 --data /mnt/shared/ckpts --replicas 3`,
		RunE: func(c *cobra.Command, _ []string) error {
			made := store.Made{Location: a.location, Replicas: 1}
			var err error
			if store.IsURL(a.location) && c.Flags().Changed("shared") {
				return console.Usagef("init %s: --shared goes with a directory: who may write to a server's log is for the server to say", jetlog.Redacted(a.location))
			}
			if store.IsURL(a.location) {
				made, err = store.InitURL(c.Context(), a.location, o)
			} else if c.Flags().Changed("replicas") {
				return console.Usagef("init %s: --replicas goes with a URL: the log of a directory is in that directory", a.location)
			} else {
				made.Store, err = store.InitWith(c.Context(), a.location, store.InitOptions{Data: o.Data, Shared: c.Flags().Changed("shared"), Group: strings.TrimPrefix(group, ownGroup)})
			}
			if err != nil {
				return err
			}
			return console.Emit(a.Console, made, []any{made}, func(w *tabwriter.Writer, _ bool) {
				fmt.Fprintf(w, "made store %s in %s", made.Store, made.Location)
				if store.IsURL(a.location) {
					fmt.Fprintf(w, ", copies of the log: %d", made.Replicas)
				}
				fmt.Fprintln(w)
			})
		},
	}
	c.Flags().StringVar(&o.Data, "data", "", "directory for checkpoints, with a URL")
	c.Flags().StringVar(&group, "shared", "", "share it with GROUP, by default the group that the directory has: all members may save, load and delete")
	c.Flags().Lookup("shared").NoOptDefVal = ownGroup
	c.Flags().IntVar(&o.Replicas, "replicas", 0, "servers that keep a copy of the log, with a URL: 1, 3 or 5 (default: as many as the cluster has, up to 3)")
	return c
}
