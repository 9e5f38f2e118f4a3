package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/front"
	"github.com/ckptstore/ckptstore/internal/store"
)

const serveHelp = `Own the store until SIGINT or SIGTERM. Trainers and other commands on this
machine connect to its owner; without one, each owns the store while it runs.
When another process owns the store, stand by and own it when that one ends.

With --listen, clients come in over TCP too: this program with --store
nats://HOST:PORT, and others that make the same requests of a NATS server. They
append events, which are checked and stamped with who they are: the name in their
certificate, or else that they have the token. They read the log, and hold leases
and cursors of their own. Everything else is refused. Port 0 is any free one; which,
is said on stderr and in owner.json. The data stays files: other machines mount the
store's directory under the same path. On an address that other machines reach, --tls-cert and
--tls-key are needed, and a token or --tls-ca. The token is in --token-file or
in $CKPTSTORE_STORE_TOKEN, never on the command line. With --tls-ca, clients
show a certificate of that CA.

What a trainer decides is taken only from the client that has the lease of the
run, while one has it. Checkpoints of other runs are deleted only with
--client-delete. --client-runs and --client-bytes bound what clients append.

With a nats:// URL as --store, serve --listen lets clients in to that server's store
in the same way. It alone has the server's credentials, from the URL or from
$CKPTSTORE_STORE_TOKEN and the like; what clients show is in --token-file, --tls-ca.
Several such processes may run at the same time, on any machines; clients may name
all of them, separated by commas. Only processes with the server's own credentials
can do more.

On loopback, without --token-file and --tls-ca, serve makes a token, in a file
that only its user can read. Clients of the same user on this machine find it by
the address in nats://127.0.0.1:PORT; other clients are given it, or its file. Its
path is on stderr, and the file is removed when serve ends.
` + accessHelp

func (a *app) serveCommand() *cobra.Command {
	var (
		address string
		access  store.Access
		grant   front.Grant
		quota   string
	)
	c := &cobra.Command{
		Use: "serve", Short: "Own a store until stopped, so that others connect to it", Args: console.Args(cobra.NoArgs),
		Long: serveHelp,
		Example: `  ckptstore serve --store ckpts
  ckptstore serve --store ckpts --listen 0.0.0.0:4222 --token-file token --tls-cert cert.pem --tls-key key.pem
  ckptstore serve --store nats://user:secret@cluster:4222 --listen 127.0.0.1:4223`,
		RunE: func(c *cobra.Command, _ []string) error {
			if store.IsURL(a.location) && address == "" {
				return console.Usagef("serve %s: a store on a server has no owner: say with --listen HOST:PORT where clients without that server's credentials are let in, or name a directory with --store",
					jetlog.Redacted(a.location))
			}
			o := a.options()
			if address == "" && (access != (store.Access{}) || grant.Runs != nil || grant.Delete || quota != "") {
				return console.Usagef("serve: --token-file, --tls-cert, --tls-key, --tls-ca, --client-runs, --client-delete and --client-bytes are for clients over TCP: say where with --listen HOST:PORT")
			}
			if address != "" {
				if access.TokenFile == "" && !store.IsURL(a.location) { // of a server it is that server's
					access.Token = os.Getenv(store.EnvToken)
					access.TokenFile = os.Getenv(store.EnvTokenFile)
				}
				listen, err := access.Listen(address)
				if err != nil {
					return console.Usagef("serve: %w", err)
				}
				if quota != "" {
					if grant.Bytes, err = console.ParseSize(quota); err != nil {
						return console.Usagef("serve: --client-bytes: %w", err)
					}
				}
				if err := grant.Validate(); err != nil {
					return console.Usagef("serve: %w", err)
				}
				listen.Grant = grant
				o.Listen = listen
				said := ""
				o.Bound = func(addr net.Addr) {
					if addr.String() == said {
						return // it began again to own the store
					}
					said = addr.String()
					scheme := "nats"
					if listen.TLS != nil {
						scheme = "tls"
					}
					fmt.Fprintf(a.Err, "listening on %s://%s\n", scheme, addr)
					if path, err := store.TokenFile(addr.String()); err == nil && listen.Open() {
						fmt.Fprintf(a.Err, "clients show the token in %s; those of this user find it\n", path)
					}
				}
			}
			return a.withOptions(c.Context(), o, func(s *store.Store) error {
				state := "serving"
				if !s.Owns() && !store.IsURL(a.location) {
					state = "another process owns this store; standing by for"
					if address != "" {
						state = "another process owns this store, nobody is let in on " + address + " until it ends; standing by for"
					}
				}
				fmt.Fprintf(a.Err, "%s store %s in %s; stop with Ctrl-C\n", state, s.ID, s.Location)
				<-c.Context().Done()
				return nil
			})
		},
	}
	f := c.Flags()
	f.StringVar(&address, "listen", "", "HOST:PORT for clients over TCP")
	f.StringVar(&access.TokenFile, "token-file", "", "file of the token that clients show; only its user may read it ($CKPTSTORE_STORE_TOKEN_FILE)")
	f.StringVar(&access.Cert, "tls-cert", "", "the server's certificate in PEM")
	f.StringVar(&access.Key, "tls-key", "", "its key; only its user may read it")
	f.StringSliceVar(&grant.Runs, "client-runs", nil, "patterns of the runs that clients over TCP append for, such as 'team-a-*' (default: every run)")
	f.BoolVar(&grant.Delete, "client-delete", false, "let clients over TCP delete checkpoints of runs that they do not run")
	f.StringVar(&quota, "client-bytes", "", "most that clients over TCP append to the log while this process owns it, such as 10GiB (default: as the disk has room)")
	f.StringVar(&access.CA, "tls-ca", "", "CA of the certificates that clients must show")
	return c
}

// goneEvery is how often a process looks whether the directory of its store is there.
const goneEvery = 200 * time.Millisecond

// exitWhenGone ends this process when a directory was removed, or another is in its
// place, until ctx ends. It ends at once: whatever else it wrote, to close the log in
// order too, could be written into a new store of that name.
func exitWhenGone(ctx context.Context, dir string, log *slog.Logger) {
	was, err := os.Stat(dir)
	if err != nil {
		return // what is opened there says why
	}
	go func() {
		tick := time.NewTicker(goneEvery)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			if !gone(dir, was) {
				continue
			}
			log.Error("the directory of the store was removed, or another is in its place: this process ends, and writes nothing more", "store", dir)
			os.Exit(exitNoStore)
		}
	}()
}

// gone reports whether a directory is another than it was, or is being removed: no
// command takes the file away that says what store it is.
func gone(dir string, was fs.FileInfo) bool {
	is, err := os.Stat(dir)
	if err == nil && os.SameFile(is, was) {
		_, err = os.Lstat(filepath.Join(dir, "store.json"))
	} else if err == nil {
		return true
	}
	return errors.Is(err, fs.ErrNotExist)
}
