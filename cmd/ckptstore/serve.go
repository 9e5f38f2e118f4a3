package main

import (
	"cmp"
	"context"
	"crypto/sha256"
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
	"github.com/ckptstore/ckptstore/internal/api"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/front"
	"github.com/ckptstore/ckptstore/internal/logpeers"
	"github.com/ckptstore/ckptstore/internal/otlp"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/internal/store/sockets"
)

const serveHelp = `Own the store until SIGINT or SIGTERM. Trainers and other commands on this
machine connect to the owner; without one, each command owns the store while it
runs. If another process owns the store, serve stands by and takes over when that
process ends.

With --listen HOST:PORT, clients can also connect over TCP: ckptstore and trainer
with --store nats://HOST:PORT, and other clients of the NATS protocol. With port 0
serve chooses a free port and prints it on stderr and in owner.json. Clients can
append events, read the log, and hold leases and cursors of their own; every other
request is refused. Each event is checked and stamped with the client's identity:
the name in its certificate, or that it has the token. Checkpoint data does not go
over TCP: other machines must mount the store's directory under the same path.

While a client holds the lease of a run, only that client can append the decisions
of its trainer. Clients can delete checkpoints of other runs only with
--client-delete. --client-runs and --client-bytes limit what they append.

On an address that other machines can reach, --tls-cert and --tls-key are required,
and a token or --tls-ca. The token comes from --token-file or
$CKPTSTORE_STORE_TOKEN, never from the command line. With --tls-ca, clients must
present a certificate of that CA.

With --client-users FILE, each user of the file has a token of its own, a role, and a name
in the events that it appends: see ckptstore access. A token is revoked while serve runs.

On loopback, without --token-file, --client-users and --tls-ca, serve creates a token in a file that
only its user can read, and prints the path on stderr. Clients of the same user on
this machine find it by the address nats://127.0.0.1:PORT; give other clients the
token or its file. serve removes the file when it ends.

With --http HOST:PORT, serve also answers the HTTP API and serves the page, to this user and
to those of --http-users: see ckptstore ui. On an address that other machines can reach,
--http-cert and --http-key are required.

With --traces, serve sends a trace of each save and load to the OpenTelemetry collector that
$OTEL_EXPORTER_OTLP_ENDPOINT names, such as http://127.0.0.1:4318, by OTLP over HTTP. It reads the
standard variables for endpoint, headers, timeout, compression, certificates, service name and
resource attributes. Without a collector that answers, nothing waits. Of several processes with
--traces, the first sends the traces of the whole store, and another continues when it ends.

With --store nats://..., serve --listen is a gateway to the store on that server. The
gateway has the server's credentials, from the URL or $CKPTSTORE_STORE_TOKEN and the
like; --token-file and --tls-ca are for its clients. Several gateways may run at the
same time, on any machines, and clients can name all of them, separated by commas.
Only processes with the server's own credentials can do more.

In a pod of Kubernetes, an error that ends serve is also left in /dev/termination-log,
where kubectl shows it; $CKPTSTORE_TERMINATION_LOG names another file, or is none.
` + accessHelp

// serveName is the name of the command that owns a store until it is stopped.
const serveName = "serve"

func (a *app) serveCommand() *cobra.Command {
	var (
		address string
		access  store.Access
		grant   front.Grant
		quota   string
		people  string
		web     api.Listen
		traced  bool
	)
	c := &cobra.Command{
		Use: serveName, Short: "Own a store until stopped, and serve it to other processes", Args: console.Args(cobra.NoArgs),
		Long: serveHelp,
		Example: `  ckptstore serve --store ckpts
  ckptstore serve --store ckpts --listen 0.0.0.0:4222 --token-file token --tls-cert cert.pem --tls-key key.pem
  ckptstore serve --store nats://user:secret@cluster:4222 --listen 127.0.0.1:4223`,
		RunE: func(c *cobra.Command, _ []string) error {
			if !store.IsURL(a.location) && logpeers.Replicated(a.location) {
				return console.Usagef("serve %s: its log has %d copies: the trainers of its jobs serve them, and after a job each command does", a.location, logpeers.Copies)
			}
			if web.Address != "" {
				if err := web.Validate(); err != nil {
					return err
				}
			}
			var collector otlp.Config
			if traced {
				var err error
				if collector, err = otlp.FromEnvironment(os.Getenv); err != nil {
					return err
				}
			}
			if store.IsURL(a.location) && address == "" && web.Address == "" && !traced {
				return console.Usagef("serve %s: a store on a server has no owner; give --listen HOST:PORT or --http HOST:PORT to serve clients without that server's credentials, or a directory with --store",
					jetlog.Redacted(a.location))
			}
			o := a.options()
			if address == "" && (access != (store.Access{}) || grant.Runs != nil || grant.Delete || quota != "" || people != "") {
				return console.Usagef("serve: --token-file, --tls-cert, --tls-key, --tls-ca, --client-users, --client-runs, --client-delete and --client-bytes need --listen HOST:PORT")
			}
			if address != "" {
				// With a URL, the variables are that server's credentials; and with users, that of one of them.
				if access.TokenFile == "" && !store.IsURL(a.location) && people == "" {
					access.Token = os.Getenv(store.EnvToken)
					access.TokenFile = os.Getenv(store.EnvTokenFile)
				}
				known := &clients{}
				if people != "" {
					var err error
					if known.users, err = api.OpenUsers(people, a.logger()); err != nil {
						return console.Usagef("serve: --client-users: %w", err)
					}
					access.Clients = known
				}
				listen, err := access.Listen(address)
				if err != nil {
					return console.Usagef("serve: %w", err)
				}
				if known.users != nil && listen.Token != "" {
					user, err := known.users.Of(sha256.Sum256([]byte(listen.Token)))
					if !errors.Is(err, api.ErrUnknown) {
						return console.Usagef("serve: the token in --token-file %s is that of user %s: it would have all rights, and could not be revoked; give another, or none", access.TokenFile, cmp.Or(user.Name, "who is no longer admitted"))
					}
				}
				if quota != "" {
					if grant.Bytes, err = console.ParseSize(quota); err != nil {
						return console.Usagef("serve: --client-bytes: %w", err)
					}
				}
				if err := grant.Validate(); err != nil {
					return console.Usagef("serve: %w", err)
				}
				listen.Grant, known.grant = grant, grant
				o.Listen = listen
				announced := ""
				o.Bound = func(addr net.Addr) {
					if addr.String() == announced {
						return // it owns the store again
					}
					announced = addr.String()
					scheme := "nats"
					if listen.TLS != nil {
						scheme = "tls"
					}
					fmt.Fprintf(a.Err, "listening on %s://%s\n", scheme, addr)
					if path, err := sockets.TokenFile(addr.String()); err == nil && listen.Open() {
						fmt.Fprintf(a.Err, "clients show the token in %s; those of this user find it\n", path)
					}
				}
			}
			return a.withOptions(c.Context(), o, func(s *store.Store) error {
				state := "serving"
				if !s.Owns() && !store.IsURL(a.location) {
					state = "another process owns this store; standing by for"
					if address != "" {
						state = "another process owns this store, and no client can connect to " + address + " until it ends; standing by for"
					}
				}
				fmt.Fprintf(a.Err, "%s store %s in %s; stop with Ctrl-C\n", state, s.ID, s.Location)
				var tracer *otlp.Tracer
				if traced {
					tracer = otlp.Start(c.Context(), s, collector, otlp.Options{Version: version(), Logger: a.logger()})
					defer tracer.Close()
				}
				if web.Address == "" {
					<-c.Context().Done()
					return nil
				}
				server, err := a.serveHTTP(c.Context(), s, web, tracer)
				if err != nil {
					return err
				}
				fmt.Fprintf(a.Err, "HTTP API at %s; `ckptstore ui` prints the link with the token\n", server.URL)
				<-c.Context().Done()
				return server.Close()
			})
		},
	}
	f := c.Flags()
	web.Flags(f, "")
	f.BoolVar(&traced, "traces", false, "send a trace of each save and load to the OpenTelemetry collector of $OTEL_EXPORTER_OTLP_ENDPOINT")
	f.StringVar(&address, "listen", "", "accept clients over TCP on HOST:PORT")
	f.StringVar(&access.TokenFile, "token-file", "", "file with the clients' token; only its user may be able to read it ($CKPTSTORE_STORE_TOKEN_FILE)")
	f.StringVar(&access.Cert, "tls-cert", "", "server certificate, PEM")
	f.StringVar(&access.Key, "tls-key", "", "key of --tls-cert; only its user may be able to read it")
	f.StringVar(&people, "client-users", "", "file of users with tokens of their own, made by ckptstore access issue")
	f.StringSliceVar(&grant.Runs, "client-runs", nil, "patterns of runs for which TCP clients can append, such as 'team-a-*' (default: all runs)")
	f.BoolVar(&grant.Delete, "client-delete", false, "let TCP clients delete checkpoints of runs whose lease they do not hold")
	f.StringVar(&quota, "client-bytes", "", "most bytes that TCP clients can append while this process owns the log, such as 10GiB (default: limited by the disk)")
	f.StringVar(&access.CA, "tls-ca", "", "require client certificates of this CA")
	return c
}

// goneEvery is how often a process checks that the directory of its store still exists.
const goneEvery = 200 * time.Millisecond

// exitWhenGone exits this process if the directory is removed or replaced before ctx
// ends. It exits at once, without closing the log: any further write could go into a
// new store of the same name.
func exitWhenGone(ctx context.Context, dir string, log *slog.Logger) {
	was, err := os.Stat(dir)
	if err != nil {
		return // opening the store returns the reason
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
			log.Error("store directory removed or replaced; exiting without further writes", "store", dir)
			os.Exit(problem.NoStore.Ckptstore())
		}
	}()
}

// gone reports whether a directory was replaced or is being removed. The latter shows by
// its store.json, which no command removes.
func gone(dir string, was fs.FileInfo) bool {
	is, err := os.Stat(dir)
	if err == nil && os.SameFile(is, was) {
		_, err = os.Lstat(filepath.Join(dir, "store.json"))
	} else if err == nil {
		return true
	}
	return errors.Is(err, fs.ErrNotExist)
}
