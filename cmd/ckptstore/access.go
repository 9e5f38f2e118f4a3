package main

import (
	"crypto/sha256"
	"fmt"
	"slices"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/internal/api"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/front"
)

const usersHelp = `Manage a file of users for "ckptstore serve": --client-users lets them connect to the log
over TCP, each with a token of its own, and --http-users to the HTTP API. The file has only
digests of tokens. A server that runs reads it again when it changes: a user whose token is
revoked is disconnected from the log within a second.

  reader     reads
  operator   also appends to the log, and decides: stop, preempt, fork, pin, tag
  admin      like operator

An event that a user appends has the user's name, as user:NAME: see "ckptstore events
--actor". The file itself is not in the log: "access list" shows the rights of today.`

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
	c.AddCommand(a.issueCommand(&file), a.accessListCommand(&file), a.revokeCommand(&file))
	return c
}

// userOut is a user as commands print it.
type userOut struct {
	Name   string `json:"name"`
	Role   string `json:"role"`
	Tokens int    `json:"tokens"`
}

func users(file string) error {
	if file == "" {
		return console.Usagef("--users FILE is missing: the file that `ckptstore serve --client-users` reads")
	}
	return nil
}

func (a *app) issueCommand(file *string) *cobra.Command {
	role := ""
	c := &cobra.Command{
		Use: "issue NAME --users FILE", Short: "Make a token for a user, and print it", Args: console.Args(cobra.ExactArgs(1)),
		Long: `Make a token for the user NAME and print it. The user sets it as $CKPTSTORE_STORE_TOKEN, or
puts it into a file for $CKPTSTORE_STORE_TOKEN_FILE. A user can have several tokens.`,
		Example: "  ckptstore access issue ada --users users --role operator > ada.token",
		RunE: func(c *cobra.Command, names []string) error {
			if err := users(*file); err != nil {
				return err
			}
			for _, r := range []api.Role{api.Reader, api.Operator, api.Admin} {
				if r.String() != role {
					continue
				}
				token, err := api.IssueToken(c.Context(), *file, names[0], r)
				if err != nil {
					return err
				}
				_, err = fmt.Fprintln(a.Raw, token)
				return err
			}
			return console.Usagef("--role %q: want reader, operator or admin", role)
		},
	}
	c.Flags().StringVar(&role, "role", "reader", "reader, operator or admin")
	return c
}

func (a *app) accessListCommand(file *string) *cobra.Command {
	return &cobra.Command{
		Use: "list --users FILE", Short: "List the users of a file", Args: console.Args(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			if err := users(*file); err != nil {
				return err
			}
			found, err := api.ReadUsers(*file)
			if err != nil {
				return err
			}
			list := []userOut{}
			for _, u := range found {
				at := slices.IndexFunc(list, func(o userOut) bool { return o.Name == u.Name })
				if at < 0 {
					at, list = len(list), append(list, userOut{Name: u.Name, Role: u.Role.String()})
				}
				list[at].Tokens++
			}
			return console.Emit(a.Console, list, list, func(w *tabwriter.Writer, _ bool) {
				console.Row(w, "NAME", "ROLE", "TOKENS")
				for _, u := range list {
					console.Row(w, u.Name, u.Role, u.Tokens)
				}
			})
		},
	}
}

func (a *app) revokeCommand(file *string) *cobra.Command {
	return &cobra.Command{
		Use: "revoke NAME --users FILE", Short: "Revoke all tokens of a user", Args: console.Args(cobra.ExactArgs(1)),
		RunE: func(c *cobra.Command, names []string) error {
			if err := users(*file); err != nil {
				return err
			}
			n, err := api.RevokeTokens(c.Context(), *file, names[0])
			if err != nil {
				return err
			}
			out := userOut{Name: names[0], Tokens: n}
			return console.Emit(a.Console, out, []userOut{out}, func(w *tabwriter.Writer, _ bool) { fmt.Fprintf(w, "revoked %d tokens of %s\n", n, names[0]) })
		},
	}
}

// clients are the users of a file, as clients of the log.
type clients struct {
	users *api.UsersFile
	grant front.Grant // of those that may append
}

var _ front.Clients = (*clients)(nil)

// Of implements [front.Clients].
func (c *clients) Of(digest [sha256.Size]byte) (front.Client, bool) {
	u, ok := c.users.Of(digest)
	if !ok {
		return front.Client{}, false
	}
	grant := c.grant
	if u.Role < api.Operator {
		grant = front.Grant{Runs: []string{}}
	}
	return front.Client{Name: u.Name, Grant: grant}, true
}
