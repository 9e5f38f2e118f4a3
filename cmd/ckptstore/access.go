package main

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/api"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/front"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/problem/system"
	"github.com/ckptstore/ckptstore/internal/signing/command"
	"github.com/ckptstore/ckptstore/internal/store"
)

const usersHelp = `Manage a file of users for "ckptstore serve": --client-users lets them connect to the log
over TCP, each with a token of its own, and --http-users to the HTTP API. The file has only
digests of tokens. A server that runs reads it again when it changes: a user whose token is
revoked or expires is disconnected within a second, also from an open stream.

  reader     reads
  operator   also appends events to the log, and decides: stop, preempt, fork, pin, tag
  admin      also lists who has access, and records in the log who was given it
  auditor    reads the log, its evidence and who has access, and nothing else

An event that a user appends has the user's name, as user:NAME: see "ckptstore events
--actor". "access issue" and "access revoke" record in the log of --store what they do. The
file decides who may connect; the log has who gave whom which right, and when. In a
directory without a store, and without --store, nothing is recorded, with a warning.

Keys sign decisions. "access keygen" makes one for a trainer or a user, "access issue --key"
has the log grant it, and $CKPTSTORE_SIGNING_KEY names its file for "trainer" and
"ckptstore", which then sign each decision that they append. "access require" refuses
decisions of runs without a signature. "audit verify", "audit report" and "verify --log"
check the signatures.`

func (a *app) accessCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "access", Short: "Issue and revoke tokens of users", Long: usersHelp, Args: console.Args(cobra.ArbitraryArgs),
		RunE: func(c *cobra.Command, given []string) error {
			if len(given) == 0 {
				return c.Help()
			}
			return console.Usagef("unknown command %q; see `%s --help`", given[0], c.CommandPath())
		},
	}
	file := ""
	c.PersistentFlags().StringVar(&file, "users", "", "the file of users")
	c.AddCommand(a.issueCommand(&file), a.accessListCommand(&file), a.revokeCommand(&file), a.whoamiCommand(), a.keys().Keygen(), a.keys().Require())
	return c
}

// keys returns the commands about keys.
func (a *app) keys() command.Verbs {
	return command.Verbs{Console: a.Console, Read: a.read, Write: a.with, By: issuer}
}

func users(file string) error {
	if file == "" {
		return console.Usagef("--users FILE is missing: the file that `ckptstore serve --client-users` reads")
	}
	return nil
}

// issuedOut is the output of access issue --json.
type issuedOut struct {
	Name     string    `json:"name"`
	Role     string    `json:"role"`
	Secret   string    `json:"secret,omitempty"` // the token; not with --to
	To       string    `json:"to,omitempty"`     // the file with the token
	Token    string    `json:"token,omitempty"`  // its name
	Hash     string    `json:"hash"`
	Expires  time.Time `json:"expires,omitzero"`
	Sequence uint64    `json:"sequence,omitempty"` // of access.granted; 0: not recorded
}

func (a *app) issueCommand(file *string) *cobra.Command {
	role, until, to, days := "", "", "", 0
	var i api.Issue
	var k command.Grant
	c := &cobra.Command{
		Use: "issue NAME --users FILE", Short: "Make a token for a user", Args: console.Args(cobra.ExactArgs(1)),
		Long: `Make a token for the user NAME. With --to it is in a new file that only this user can read;
otherwise it is printed. The user names the file by $CKPTSTORE_STORE_TOKEN_FILE, or sets the
token as $CKPTSTORE_STORE_TOKEN. A user can have several tokens, which --token tells apart.

The log of --store gets the event access.granted before the file gets the token: with user,
role, name and expiry of the token, and the beginning of its SHA-256, never the token. If
the log does not take it, nothing is issued.

With --key no token is made: the log of --store grants the key to NAME, which is also the
name of the key. From then on decisions that it signs are those of NAME. Operators' keys sign
decisions, for the runs of --runs; admins' keys also decide about keys. This process signs
the grant with $CKPTSTORE_SIGNING_KEY, which is the key of an admin. The first key of a store
is an admin's, and signs its own grant.`,
		Example: "  ckptstore access issue ada --users users --role operator --store ckpts --to ada.token\n  ckptstore access issue eva --users users --role auditor --days 30 --store ckpts --to eva.token\n  CKPTSTORE_SIGNING_KEY=ada.key ckptstore access issue bert-trainer --role operator --key trainer.pub --runs 'bert*' --store ckpts",
		RunE: func(c *cobra.Command, names []string) (err error) {
			if k.Key == "" {
				if err := users(*file); err != nil {
					return err
				}
			}
			known := false
			if i.Role, known = api.RoleOf(role); !known {
				return console.Usagef("--role %q: want reader, operator, admin or auditor", role)
			}
			if i.Name = names[0]; c.Flags().Changed("days") {
				if until != "" || days < 1 {
					return console.Usagef("--days %d: want a number above zero, and no --expires", days)
				}
				i.Expires = time.Now().AddDate(0, 0, days)
			} else if until != "" {
				if i.Expires, err = time.Parse(time.RFC3339, until); err != nil {
					return console.Usagef("--expires %q: want a time such as 2026-12-24T12:00:00Z", until)
				}
			}
			if k.Key != "" {
				if *file != "" || to != "" || i.Token != "" {
					return console.Usagef("access issue --key: it grants a key and makes no token: omit --users, --to and --token")
				}
				return a.keys().Grant(c.Context(), i, k)
			}
			made := false
			if to != "" {
				i.Keep = func(token string) error {
					err := newSecret(to, token)
					made = err == nil
					return err
				}
			}
			var out issuedOut
			i.Record = func(u api.User) (err error) {
				body := &events.AccessGranted{User: u.Name, Role: u.Role.String(), Hash: u.Hash(), Token: u.Token, By: issuer()}
				if !u.Expires.IsZero() {
					body.Expires = u.Expires.Format(time.RFC3339)
				}
				out.Sequence, err = a.recordAccess(c.Context(), body)
				return err
			}
			token, u, err := api.IssueToken(c.Context(), *file, i)
			if err != nil {
				if made {
					err = errors.Join(err, os.Remove(to))
				}
				return err
			}
			if to != "" {
				token = ""
			}
			out = issuedOut{u.Name, u.Role.String(), token, to, u.Token, u.Hash(), u.Expires, out.Sequence}
			if a.Format == "json" {
				return console.Emit(a.Console, out, []issuedOut{out}, func(*tabwriter.Writer, bool) {})
			}
			if to != "" {
				_, err = fmt.Fprintf(a.Out, "the token of %s is in %s\n", u.Name, to)
				return err
			}
			_, err = fmt.Fprintln(a.Raw, token)
			return err
		},
	}
	f := c.Flags()
	f.StringVar(&role, "role", "reader", "reader, operator, admin or auditor")
	f.StringVar(&i.Token, "token", "", "`NAME` of the token, such as laptop")
	f.StringVar(&to, "to", "", "new `FILE` for the token, which only this user can read (default: print the token)")
	f.StringVar(&until, "expires", "", "`TIME` until which the token is valid, in RFC 3339 (default: until it is revoked)")
	f.IntVar(&days, "days", 0, "the token or key expires after this many days")
	f.StringVar(&k.Key, "key", "", "grant this `KEY` instead of a token: a public key of 'access keygen', or a file with it")
	f.StringSliceVar(&k.Runs, "runs", nil, "`PATTERNS` of the runs whose decisions the key may sign (default: all)")
	return c
}

// newSecret makes a file with a token, which only this user can read.
func newSecret(path, token string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return problem.Errorf(problem.Conflict, "--to %s: the file exists: name another, or remove it", path)
	}
	if err != nil {
		return fmt.Errorf("--to: %w", err)
	}
	_, err = f.WriteString(token + "\n")
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return errors.Join(fmt.Errorf("--to: %w", err), os.Remove(path))
	}
	return nil
}

// issuer names the user of this process, as the user's own machine does.
func issuer() string {
	host, err := os.Hostname()
	return fmt.Sprintf("uid:%d@%s", os.Getuid(), cmp.Or(host, fmt.Sprint(err)))
}

// recordAccess appends an event about access to the log of the store, and returns its
// sequence. Without a store, and without --store, it warns and returns 0.
func (a *app) recordAccess(ctx context.Context, body events.Body) (seq uint64, err error) {
	err = a.with(ctx, func(s *store.Store) error {
		seq, err = s.RecordAccess(ctx, body)
		return err
	})
	if errors.Is(err, store.ErrNoStore) && !a.named {
		a.Warn("warning: %s is recorded in no log: there is no store %s; name one by --store", body.Kind(), a.location)
		return 0, nil
	}
	return seq, err
}

func (a *app) accessListCommand(file *string) *cobra.Command {
	server := ""
	keys := false
	c := &cobra.Command{
		Use: "list --users FILE", Short: "List the users of a file", Args: console.Args(cobra.NoArgs),
		Long: `List the users of a file, or of the server of an HTTP API: an admin or an auditor may ask it,
with the token in $CKPTSTORE_STORE_TOKEN or the file $CKPTSTORE_STORE_TOKEN_FILE. With
--output wide there is a line for each token.

With --keys list the keys that the log of --store grants, and the runs whose decisions must
be signed.`,
		Example: "  ckptstore access list --users users\n  ckptstore access list --http https://train.example:7700",
		RunE: func(c *cobra.Command, _ []string) error {
			if keys {
				if server != "" || *file != "" {
					return console.Usagef("access list --keys: it reads the log of --store: omit --users and --http")
				}
				return a.keys().List(c.Context())
			}
			var list []api.UserAccess
			switch {
			case server != "" && *file != "":
				return console.Usagef("give --users or --http, not both")
			case server != "":
				var got api.AccessList
				if err := askServer(c.Context(), server, "access", &got); err != nil {
					return err
				}
				list = got.Users
			default:
				if err := users(*file); err != nil {
					return err
				}
				found, err := api.ReadUsers(*file)
				if err != nil {
					return err
				}
				list = api.AccessOf(found)
			}
			return console.Emit(a.Console, list, list, func(w *tabwriter.Writer, wide bool) {
				if !wide {
					console.Row(w, "NAME", "ROLE", "TOKENS")
					for _, u := range list {
						console.Row(w, u.Name, u.Role, u.Tokens)
					}
					return
				}
				console.Row(w, "NAME", "ROLE", "TOKEN", "HASH", "EXPIRES")
				for _, u := range list {
					for _, t := range u.Issued {
						console.Row(w, u.Name, u.Role, cmp.Or(t.Token, "-"), t.Hash, expiry(t.Expires))
					}
				}
			})
		},
	}
	c.Flags().StringVar(&server, "http", "", "ask the server of an HTTP API at this `URL`")
	c.Flags().BoolVar(&keys, "keys", false, "list the keys that sign decisions")
	return c
}

// expiry returns the end of a token in words.
func expiry(at time.Time) string {
	if at.IsZero() {
		return "never"
	}
	if text := console.When(at); time.Now().Before(at) {
		return text
	}
	return "expired " + console.When(at)
}

// revokedOut is the output of access revoke --json.
type revokedOut struct {
	Name     string   `json:"name"`
	Role     string   `json:"role,omitempty"` // not of tokens that were revoked before
	Tokens   int      `json:"tokens"`
	Hashes   []string `json:"hashes"`
	Sequence uint64   `json:"sequence,omitempty"` // of access.revoked; 0: not recorded
}

func (a *app) revokeCommand(file *string) *cobra.Command {
	token, keys := "", []string(nil)
	c := &cobra.Command{
		Use: "revoke NAME --users FILE", Short: "Revoke the tokens of a user", Args: console.Args(cobra.ExactArgs(1)),
		Long: `Revoke all tokens of a user, or the one of --token. The revocation counts from the moment in
which the file changes; then the log of --store gets the event access.revoked. If the log
does not take it, the tokens are revoked and the command fails; the same command for the user,
or with the hash of the token, then records it. The file keeps the digests for a month: until
then the user is refused with the reason.

With --key the log of --store revokes keys of the user: what they sign from then on does not
hold. This process signs that with $CKPTSTORE_SIGNING_KEY, the key of an admin. The last key
of an admin cannot be revoked.`,
		Example: "  ckptstore access revoke ada --users users --store ckpts\n  ckptstore access revoke ada --users users --token laptop --store ckpts",
		RunE: func(c *cobra.Command, names []string) error {
			if len(keys) > 0 {
				if *file != "" || token != "" {
					return console.Usagef("access revoke --key: it revokes keys and no token: omit --users and --token")
				}
				return a.keys().Revoke(c.Context(), names[0], keys)
			}
			if err := users(*file); err != nil {
				return err
			}
			gone, err := api.RevokeTokens(c.Context(), *file, names[0], token)
			out, done := revokedOut{Name: names[0], Tokens: len(gone), Hashes: []string{}}, "revoked %d tokens of %s\n"
			switch {
			case system.KindOf(err) == problem.NotFound:
				earlier := a.unrecorded(c.Context(), *file, names[0], token)
				if len(earlier) == 0 {
					return err
				}
				out.Tokens, out.Hashes, done = len(earlier), earlier, "recorded that %d tokens of %s are revoked\n"
			case err != nil:
				return err
			default:
				out.Role = gone[0].Role.String()
			}
			for _, u := range gone {
				out.Hashes = append(out.Hashes, u.Hash())
			}
			var failed error
			if out.Sequence, failed = a.recordAccess(c.Context(), &events.AccessRevoked{User: names[0], Hashes: out.Hashes, By: issuer()}); failed != nil {
				failed = fmt.Errorf("the tokens are revoked, and the log does not have it: %w; then repeat the command for the user, or with --token %s", failed, out.Hashes[0])
			}
			err = console.Emit(a.Console, out, []revokedOut{out}, func(w *tabwriter.Writer, _ bool) { fmt.Fprintf(w, done, out.Tokens, out.Name) })
			return errors.Join(err, failed)
		},
	}
	c.Flags().StringVar(&token, "token", "", "revoke only the token of this `NAME` or hash")
	c.Flags().StringSliceVar(&keys, "key", nil, "revoke these `KEYS` of the user instead: NAME+HASH, as 'access list --keys' prints them, or all")
	return c
}

// unrecorded returns the hashes of tokens that the file has as revoked and the log has not. Without
// a store that answers there are none.
func (a *app) unrecorded(ctx context.Context, file, user, hash string) []string {
	hashes, err := api.RevokedTokens(file, user, hash)
	if err != nil || len(hashes) == 0 {
		return nil
	}
	err = a.with(ctx, func(s *store.Store) (err error) {
		hashes, err = s.UnrecordedRevocations(ctx, user, hashes)
		return err
	})
	if err != nil {
		if !errors.Is(err, store.ErrNoStore) || a.named {
			a.Warn("warning: whether the log has the revocations of %s is unknown: %v", user, err)
		}
		return nil
	}
	return hashes
}

// identity is the output of access whoami --json.
type identity struct {
	Server string `json:"server"`
	api.Identity
	Runs   []string `json:"runs,omitempty"` // patterns of the runs for which a client of the log may append; without: all
	Delete bool     `json:"delete"`         // a client of the log may delete checkpoints of runs whose lease it does not hold
}

func (a *app) whoamiCommand() *cobra.Command {
	server := ""
	c := &cobra.Command{
		Use: "whoami", Short: "Print which user a server takes you for, and what you may do", Args: console.Args(cobra.NoArgs),
		Long: `Ask a server which user it takes this process for: the one of --store nats://HOST:PORT, or
with --http URL that of an HTTP API. The token is in $CKPTSTORE_STORE_TOKEN or in the file
$CKPTSTORE_STORE_TOKEN_FILE.

Exit codes: 0 ok, 2 usage, 10 no server answers, 12 no token, or a token that is unknown,
was revoked or has expired: the error tells which.`,
		Example: "  ckptstore access whoami --store nats://train.example:4222\n  ckptstore access whoami --http https://train.example:7700 --json",
		RunE: func(c *cobra.Command, _ []string) error {
			out := identity{Server: server}
			switch {
			case server != "":
				if err := askServer(c.Context(), server, "whoami", &out.Identity); err != nil {
					return err
				}
			case !store.IsURL(a.location):
				return console.Usagef("access whoami: %s is a directory, which knows its users by its mode: name a server by --store nats://HOST:PORT or --http URL", a.location)
			default:
				ctx, cancel := context.WithTimeout(c.Context(), a.wait)
				defer cancel()
				who, err := store.Whoami(ctx, a.location)
				if err != nil {
					return err
				}
				out = identityOf(who)
				out.Server = jetlog.Redacted(a.location)
			}
			return console.Emit(a.Console, out, []identity{out}, func(w *tabwriter.Writer, _ bool) {
				console.Row(w, "principal", out.Principal)
				if out.Role != "" {
					console.Row(w, "role", out.Role)
				}
				if out.Hash != "" {
					console.Row(w, "token", strings.TrimSpace(out.Token+" "+out.Hash))
					console.Row(w, "expires", expiry(out.Expires))
				}
				for _, may := range out.May {
					console.Row(w, "may", may)
				}
				if len(out.Runs) > 0 {
					console.Row(w, "runs", strings.Join(out.Runs, ", "))
				}
			})
		},
	}
	c.Flags().StringVar(&server, "http", "", "ask the server of an HTTP API at this `URL`")
	return c
}

// identityOf describes a client of the log.
func identityOf(who front.Who) identity {
	name, _ := strings.CutPrefix(who.Principal, "user:") // uid:N and cert:NAME stay whole
	out := identity{Identity: api.Identity{Principal: who.Principal, Name: name, Role: who.Role, Token: who.Token, Hash: who.Hash, Expires: who.Expires, May: []string{}}, Runs: who.Runs, Delete: who.Delete}
	role, known := api.RoleOf(who.Role)
	if !known { // a token that several share, or a certificate
		if role = api.Reader; who.Append {
			role = api.Operator
		}
	}
	out.May = role.Words()
	if who.Delete {
		out.May = append(out.May, "delete checkpoints of runs whose lease another client may take")
	}
	return out
}

// askServer reads an answer of the HTTP API at a URL, with the token of the environment.
func askServer(ctx context.Context, server, path string, into any) error {
	token, secure, err := store.AccessFromEnv().Client()
	if err != nil {
		return err
	}
	err = api.Ask(ctx, &http.Client{Timeout: askTimeout, Transport: &http.Transport{TLSClientConfig: secure, DisableKeepAlives: true}}, server, path, token, into)
	switch {
	case err == nil, system.KindOf(err) != problem.Unauthorized:
		return err
	case token == "":
		return problem.Errorf(problem.Denied, "%w: set $%s, or $%s to a file with it", err, store.EnvToken, store.EnvTokenFile)
	}
	return problem.Wrap(problem.Denied, err)
}

// askTimeout bounds a request to a server.
const askTimeout = 15 * time.Second

// clients are the users of a file, as clients of the log.
type clients struct {
	users *api.UsersFile
	grant front.Grant // of those that may append
}

var _ front.Clients = (*clients)(nil)

// Of implements [front.Clients].
func (c *clients) Of(digest [sha256.Size]byte) (front.Client, error) {
	u, err := c.users.Of(digest)
	switch {
	case errors.Is(err, api.ErrRevoked):
		return front.Client{}, front.ErrRevoked
	case errors.Is(err, api.ErrExpired):
		return front.Client{}, front.ErrExpired
	case err != nil:
		return front.Client{}, front.ErrUnknown
	}
	return front.Client{Name: u.Name, Role: u.Role.String(), Token: u.Token, Hash: u.Hash(), Expires: u.Expires, Grant: grantOf(u.Role, c.grant)}, nil
}

// grantOf returns what a role may do as a client of the log, where those that may append
// have a grant.
func grantOf(role api.Role, grant front.Grant) front.Grant {
	if !role.May(api.Decide) {
		grant = front.Grant{Runs: []string{}}
	}
	grant.Access = role.May(api.GiveAccess)
	grant.LogAlone = !role.May(api.ReadState)
	return grant
}
