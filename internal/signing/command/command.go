// Package command has the parts of `ckptstore access` that are about keys: making, granting,
// listing and revoking them, and requiring signatures.
package command

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/api"
	"github.com/ckptstore/ckptstore/internal/audit"
	"github.com/ckptstore/ckptstore/internal/audit/ledger"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/signing"
	"github.com/ckptstore/ckptstore/internal/store"
)

// Open opens the store of the command line for one command.
type Open func(ctx context.Context, do func(*store.Store) error) error

// Verbs are the commands about keys.
type Verbs struct {
	*console.Console
	Read, Write Open          // of the store
	By          func() string // names the user of this process, for the log
}

// Grant are the flags of `access issue` about a key.
type Grant struct {
	Key  string // public key, or a file with it
	Runs []string
}

// madeKey is the output of access keygen --json.
type madeKey struct {
	Name   string `json:"name"`
	File   string `json:"file"` // with the signing key
	Key    string `json:"key"`  // as signatures name it
	Public string `json:"public"`
}

// Keygen returns the command that makes a key.
func (a Verbs) Keygen() *cobra.Command {
	to := ""
	c := &cobra.Command{
		Use: "keygen NAME --to FILE", Short: "Make a key that signs decisions", Args: console.Args(cobra.ExactArgs(1)),
		Long: `Make an Ed25519 key for the trainer or user NAME. The signing key is in the new file --to,
which only this user can read; the public key is printed, in the form of C2SP signed-note.
"access issue --key" has the log of a store grant it.

$CKPTSTORE_SIGNING_KEY names the file for the commands that sign. It must be outside of the
store, and readable by its user only. Workers do not get the variable, but run as the same
user: a worker that is not trusted needs another user.`,
		Example: "  ckptstore access keygen bert-trainer --to trainer.key > trainer.pub",
		RunE: func(_ *cobra.Command, names []string) error {
			if to == "" {
				return console.Usagef("access keygen: --to FILE is missing: the file for the signing key")
			}
			if err := api.ValidUser(names[0]); err != nil {
				return fmt.Errorf("access keygen: %w", err)
			}
			public, err := ledger.NewKey(to, names[0])
			if errors.Is(err, fs.ErrExist) {
				return problem.Errorf(problem.Conflict, "access keygen: --to %s: the file exists: name another, or remove it", to)
			}
			if err != nil {
				return fmt.Errorf("access keygen: %w", err)
			}
			out := madeKey{Name: names[0], File: to, Key: audit.KeyOf(public), Public: public}
			return console.Emit(a.Console, out, []madeKey{out}, func(w *tabwriter.Writer, _ bool) { fmt.Fprintln(w, out.Public) })
		},
	}
	c.Flags().StringVar(&to, "to", "", "new `FILE` for the signing key, which only this user can read")
	return c
}

// publicKey returns the public key of a flag: the key itself, or the content of a file.
func publicKey(given string) (string, error) {
	if audit.KeyOf(given) != given {
		return given, nil
	}
	text, err := os.ReadFile(given)
	if err != nil {
		return "", console.Usagef("--key %s: it is no public key of `ckptstore access keygen`, and no file with one", given)
	}
	key := strings.TrimSpace(string(text))
	if audit.KeyOf(key) == key {
		return "", console.Usagef("--key %s: the file has no public key of `ckptstore access keygen`", given)
	}
	return key, nil
}

// grantedKey is the output of access issue --key --json.
type grantedKey struct {
	Name     string    `json:"name"`
	Role     string    `json:"role"`
	Key      string    `json:"key"`
	Runs     []string  `json:"runs"`
	Expires  time.Time `json:"expires,omitzero"`
	Sequence uint64    `json:"sequence"`
}

// Grant has the log grant a key to a user.
func (a Verbs) Grant(ctx context.Context, i api.Issue, k Grant) error {
	if role := i.Role.String(); role != audit.RoleOperator && role != audit.RoleAdmin {
		return console.Usagef("access issue --key: a key with --role %s signs nothing: want operator or admin", role)
	}
	if err := api.ValidUser(i.Name); err != nil {
		return err
	}
	if err := validPatterns("--runs", k.Runs); err != nil {
		return err
	}
	public, err := publicKey(k.Key)
	if err != nil {
		return err
	}
	if name, _, _ := strings.Cut(public, "+"); name != i.Name {
		return console.Usagef("--key: it is the key of %s, not of %s", name, i.Name)
	}
	body := &events.AccessGranted{User: i.Name, Role: i.Role.String(), By: a.By(), Key: public, Runs: k.Runs}
	if !i.Expires.IsZero() {
		if !i.Expires.After(time.Now()) {
			return console.Usagef("the key would expire at %s, which has passed", i.Expires.UTC().Format(time.RFC3339))
		}
		body.Expires = i.Expires.UTC().Truncate(time.Second).Format(time.RFC3339)
	}
	out := grantedKey{Name: i.Name, Role: body.Role, Key: audit.KeyOf(public), Runs: k.Runs, Expires: i.Expires}
	if out.Sequence, err = a.decide(ctx, body); err != nil {
		return err
	}
	return console.Emit(a.Console, out, []grantedKey{out}, func(w *tabwriter.Writer, _ bool) {
		fmt.Fprintf(w, "event %d grants the key %s to %s, %s\n", out.Sequence, out.Key, out.Name, out.Role)
	})
}

func (a Verbs) decide(ctx context.Context, body events.Body) (seq uint64, err error) {
	err = a.Write(ctx, func(s *store.Store) error {
		seq, err = s.DecideKeys(ctx, body)
		return err
	})
	return seq, err
}

func validPatterns(flag string, patterns []string) error {
	for _, p := range patterns {
		if _, err := path.Match(p, ""); err != nil || p == "" {
			return console.Usagef("%s %q: want a pattern of runs as of a shell, such as 'team-a-*'", flag, p)
		}
	}
	return nil
}

// revokedKeys is the output of access revoke --key --json.
type revokedKeys struct {
	Name     string   `json:"name"`
	Keys     []string `json:"keys"`
	Sequence uint64   `json:"sequence"`
}

// Revoke has the log revoke keys of a user; `all` stands for all of them.
func (a Verbs) Revoke(ctx context.Context, user string, keys []string) error {
	out := revokedKeys{Name: user}
	err := a.Write(ctx, func(s *store.Store) error {
		k, err := signing.ReadKeys(ctx, s.Log)
		if err != nil {
			return err
		}
		for _, g := range k.Grants {
			if g.User == user && g.Until == 0 && (slices.Equal(keys, []string{"all"}) || slices.Contains(keys, g.Key)) {
				out.Keys = append(out.Keys, g.Key)
			}
		}
		if len(out.Keys) == 0 || !slices.Equal(keys, []string{"all"}) && len(out.Keys) < len(keys) {
			return problem.Errorf(problem.NotFound, "%s has no key %s that signs: `ckptstore access list --keys` lists them", user, strings.Join(keys, ", "))
		}
		out.Sequence, err = s.DecideKeys(ctx, &events.AccessRevoked{User: user, Hashes: []string{}, By: a.By(), Keys: out.Keys})
		return err
	})
	if err != nil {
		return err
	}
	return console.Emit(a.Console, out, []revokedKeys{out}, func(w *tabwriter.Writer, _ bool) {
		fmt.Fprintf(w, "event %d revokes %s\n", out.Sequence, strings.Join(out.Keys, ", "))
	})
}

// List prints the keys that the log grants.
func (a Verbs) List(ctx context.Context) error {
	var k signing.Keys
	err := a.Read(ctx, func(s *store.Store) (err error) {
		k, err = signing.ReadKeys(ctx, s.Log)
		return err
	})
	if err != nil {
		return err
	}
	return console.Emit(a.Console, k, k.Grants, func(w *tabwriter.Writer, _ bool) {
		console.Row(w, "KEY", "ROLE", "RUNS", "GRANTED", "SIGNS")
		for _, g := range k.Grants {
			runs, until := "all", "until "+console.When(g.Expires)
			if len(g.Runs) > 0 {
				runs = strings.Join(g.Runs, ",")
			}
			switch {
			case g.Until > 0:
				until = fmt.Sprintf("revoked by event %d", g.Until)
			case g.Expires.IsZero():
				until = "until it is revoked"
			}
			console.Row(w, g.Key, g.Role, runs, fmt.Sprintf("event %d", g.Since), until)
		}
		for _, p := range k.Require {
			fmt.Fprintf(w, "decisions of runs %s must be signed\n", p)
		}
	})
}

// requiredOut is the output of access require --json.
type requiredOut struct {
	Runs     []string `json:"runs"`
	Required bool     `json:"required"`
	Sequence uint64   `json:"sequence"`
}

// Require returns the command that requires signatures of runs.
func (a Verbs) Require() *cobra.Command {
	end := false
	c := &cobra.Command{
		Use: "require RUNS...", Short: "Refuse decisions of runs that no granted key has signed", Args: console.Args(cobra.MinimumNArgs(1)),
		Long: `From here on the store takes no decision of the runs that match one of the patterns RUNS
unless a key that the log grants has signed it: no save is committed, and nothing is pinned
or deleted. Verifiers report such a decision that is in the log nevertheless. --end ends
the requirement.

This process signs the requirement with $CKPTSTORE_SIGNING_KEY, the key of an admin.`,
		Example: "  CKPTSTORE_SIGNING_KEY=ada.key ckptstore access require 'bert*' --store ckpts",
		RunE: func(c *cobra.Command, runs []string) (err error) {
			if err := validPatterns("access require", runs); err != nil {
				return err
			}
			out := requiredOut{Runs: runs, Required: !end}
			err = a.Write(c.Context(), func(s *store.Store) error {
				user := ""
				if key := s.Signer(); key != nil {
					user = key.Name()
				}
				var body events.Body = &events.AccessGranted{User: user, Role: audit.RoleAdmin, By: a.By(), Require: runs}
				if end {
					body = &events.AccessRevoked{User: user, Hashes: []string{}, By: a.By(), Require: runs}
				}
				out.Sequence, err = s.DecideKeys(c.Context(), body)
				return err
			})
			if err != nil {
				return err
			}
			return console.Emit(a.Console, out, []requiredOut{out}, func(w *tabwriter.Writer, _ bool) {
				text := "must be signed"
				if end {
					text = "need not be signed"
				}
				fmt.Fprintf(w, "event %d: decisions of runs %s %s from here on\n", out.Sequence, strings.Join(runs, ", "), text)
			})
		},
	}
	c.Flags().BoolVar(&end, "end", false, "end the requirement")
	return c
}
