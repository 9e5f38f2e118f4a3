package main

import (
	"errors"
	"fmt"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/store"
)

const initHelp = `Create a store in the directory --store, or on the NATS server of that URL.

On a server, the log is on the server and the checkpoints are in --data, a
directory that must have the same path on every node of every job. The directory
is marked with the store's identity; on nodes where it is not mounted, nothing is
read or written.

With --data s3://BUCKET/PREFIX the checkpoints are in a bucket, of a store in a
directory too; the log stays where it is. The prefix must be empty. The bucket is
tried out first: without conditional writes, it is refused. The URL may have the
parameters endpoint, region, path-style, profile, kms, payer and class, and never
a secret: credentials come from the environment, the shared files of AWS, or the
machine's role.

By default only you can access the directory. With --shared, the members of a
group own the store together and take over from each other: directories have the
mode 2770 and files 0660, whatever the umask. Every member can change or delete
everything in the store.

On a server, --replicas sets the number of copies of the log. The default is 3 on
a cluster of at least three servers, else 1. One copy is as safe as that server's
sync_interval (set it to "always"); three survive the loss of a server.
` + accessHelp

// accessHelp describes the credentials of clients.
const accessHelp = `
With --store nats://HOST:PORT, or tls://HOST:PORT to require TLS, credentials
come from the environment:

  CKPTSTORE_STORE_TOKEN       the token, or
  CKPTSTORE_STORE_TOKEN_FILE  a file with the token that only its user can read
  CKPTSTORE_TLS_CA            CA of the server's certificate; requires TLS
  CKPTSTORE_TLS_CERT, _KEY    this client's certificate and key`

// ownGroup is the value of --shared without a group: the group that the directory has.
const ownGroup = "."

func (a *app) initCommand() *cobra.Command {
	var o store.URLOptions
	var group string
	var missing bool
	c := &cobra.Command{
		Use: "init", Short: "Create a store", Args: console.Args(cobra.NoArgs),
		Long: initHelp,
		Example: `  ckptstore init --store ckpts
  ckptstore init --store /mnt/team/ckpts --shared=research
  ckptstore init --store ckpts --data 's3://models/team?region=eu-central-1'
  ckptstore init --store nats://127.0.0.1:4222 --data /mnt/shared/ckpts --replicas 3`,
		RunE: func(c *cobra.Command, _ []string) error {
			made, verb := store.Made{Location: a.location, Replicas: 1}, "created"
			o.Warn = func(text string) { a.Warn("warning: %s", text) }
			var err error
			if store.IsURL(a.location) && c.Flags().Changed("shared") {
				return console.Usagef("init %s: --shared goes with a directory; on a server, its own accounts decide who may write", jetlog.Redacted(a.location))
			}
			if store.IsURL(a.location) && missing {
				return console.Usagef("init %s: --if-missing goes with a directory", jetlog.Redacted(a.location))
			}
			if store.IsURL(a.location) {
				made, err = store.InitURL(c.Context(), a.location, o)
			} else if c.Flags().Changed("replicas") {
				return console.Usagef("init %s: --replicas goes with a URL: the log of a directory is in that directory", a.location)
			} else {
				in := store.InitOptions{Data: o.Data, Shared: c.Flags().Changed("shared"), Group: strings.TrimPrefix(group, ownGroup), Warn: o.Warn}
				made.Store, err = store.InitWith(c.Context(), a.location, in)
				if missing && errors.Is(err, store.ErrExists) {
					if id, unfit := store.Found(a.location, in); !errors.Is(unfit, store.ErrNoStore) {
						made.Store, verb, err = id, "found", unfit
					}
				}
			}
			if err != nil {
				return err
			}
			return console.Emit(a.Console, made, []any{made}, func(w *tabwriter.Writer, _ bool) {
				fmt.Fprintf(w, "%s store %s in %s", verb, made.Store, made.Location)
				if store.IsURL(a.location) {
					fmt.Fprintf(w, ", copies of the log: %d", made.Replicas)
				}
				fmt.Fprintln(w)
			})
		},
	}
	c.Flags().StringVar(&o.Data, "data", "", "where the checkpoints are: s3://BUCKET/PREFIX, or with a URL a directory")
	c.Flags().StringVar(&group, "shared", "", "share the store with GROUP (default: the directory's group); all members can save, load and delete")
	c.Flags().Lookup("shared").NoOptDefVal = ownGroup
	c.Flags().BoolVar(&missing, "if-missing", false, "leave a store that is there as it is; --data and --shared must fit it")
	c.Flags().IntVar(&o.Replicas, "replicas", 0, "with a URL: copies of the log, 1, 3 or 5 (default: 3 on a cluster of three or more servers, else 1)")
	return c
}
