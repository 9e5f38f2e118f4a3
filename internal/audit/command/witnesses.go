package command

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/internal/audit/ledger"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/store"
)

// keygenOut is the output of audit keygen.
type keygenOut struct {
	Origin string `json:"origin,omitempty"`
	Key    string `json:"key"`
	File   string `json:"file"`
}

func (v *verbs) keygen() *cobra.Command {
	var o ledger.KeygenOptions
	var domain, witnesses, cosigner, previous string
	again := false
	c := &cobra.Command{
		Use: "keygen FILE", Short: "Make the signing key and turn the evidence on", Args: console.Args(cobra.ExactArgs(1)),
		Long: `Make a signing key in FILE and turn tamper evidence on for the store. The owner of
the store begins with the evidence when it next opens the store for writing; end a
"ckptstore serve" and start it again.

FILE must lie outside the store, where those who can write to the store cannot read it:
with the key they could sign a rewritten log, up to the last head that a witness knows.
Print the line "log KEY" into the policy of those who verify.

Witnesses must know the key of the log before they cosign its heads. So register the
printed key with them, and then name them with "ckptstore audit configure". With
--witnesses FILE they are named at once; then the store does not open for writing until
one of them knows the key, unless --optional is given.

--new-origin gives a store that keeps evidence a new key and a new origin. Use it to
continue a restored backup whose key has signed later events: such a store does not open
for writing otherwise. Use it to replace the key, too. Before anything else, the next
owner appends an audit.sealed that quotes the newest known note of the old origin: that of
the store, that of the store it was copied from, or the one of --previous. Add the printed
line to the policy of those who verify, and keep the old line there: notes of the old
origin can then still be given with --since. Witnesses must know the new key before the
store opens for writing; they stay configured without --witnesses.

A store that was recovered needs no --new-origin: its log is a new one, and its first
audit.sealed quotes the newest note of the lost log.

--witness NAME makes the key of a witness instead, and changes no store.`,
		Example: "  ckptstore audit keygen ~/keys/log.key --domain example.org\n  ckptstore audit keygen ~/keys/log-2.key --domain example.org --new-origin\n  ckptstore audit keygen ~/keys/witness.key --witness example.org/witness",
		RunE: func(c *cobra.Command, given []string) error {
			if cosigner != "" {
				key, err := ledger.NewKey(given[0], cosigner)
				if err == nil {
					key, err = ledger.CosignatureKey(key)
				}
				if err != nil {
					return err
				}
				return v.printKey(keygenOut{Key: key, File: given[0]}, "witness key")
			}
			if previous != "" && !again {
				return console.Usagef("audit keygen: --previous is for --new-origin")
			}
			if witnesses != "" {
				text, err := os.ReadFile(witnesses)
				if err != nil {
					return fmt.Errorf("--witnesses: %w", err)
				}
				o.Policy = string(text)
			}
			return v.read(c.Context(), func(s *store.Store) error {
				if err := inDirectory(s); err != nil {
					return fmt.Errorf("audit keygen: %w", err)
				}
				o.Store, o.File, o.Origin, o.Formerly = s.Location, given[0], domain+"/"+s.ID, s.Formerly()
				made, err := v.origin(o, again, previous)
				if err != nil {
					return err
				}
				return v.printKey(keygenOut{made.Origin, made.Key, made.Signer}, "log")
			})
		},
	}
	host, err := os.Hostname()
	if err != nil {
		host = "localhost"
	}
	c.Flags().StringVar(&domain, "domain", host, "first part of the log's origin; the second is the store's identity")
	c.Flags().StringVar(&witnesses, "witnesses", "", "`FILE` with the witnesses to ask")
	c.Flags().BoolVar(&o.Optional, "optional", false, "open the store also while no witness answers")
	c.Flags().BoolVar(&again, "new-origin", false, "give a store that keeps evidence a new origin and key")
	c.Flags().StringVar(&previous, "previous", "", "with --new-origin: a `NOTE` of the old origin to quote, if the store has no newer one")
	c.Flags().StringVar(&cosigner, "witness", "", "make the key of a witness with this `NAME`")
	return c
}

// origin makes the first origin of a store, or a new one.
func (*verbs) origin(o ledger.KeygenOptions, again bool, previous string) (ledger.Config, error) {
	if !again {
		return ledger.Keygen(o)
	}
	var signed []byte
	if previous != "" {
		var err error
		if signed, err = os.ReadFile(previous); err != nil {
			return ledger.Config{}, fmt.Errorf("--previous: %w", err)
		}
	}
	return ledger.NewOrigin(o, signed)
}

func (v *verbs) printKey(out keygenOut, what string) error {
	return console.Emit(v.Console, out, []keygenOut{out}, func(w *tabwriter.Writer, _ bool) {
		fmt.Fprintf(w, "%s %s\n", what, out.Key)
	})
}

// inDirectory refuses a store that can have no evidence.
func inDirectory(s *store.Store) error {
	if s.Dir() == "" || s.Dir() != s.Location {
		return problem.Errorf(problem.Invalid, "%s: evidence is kept for stores in a directory with a log of its own", s.Location)
	}
	return nil
}

// configureOut is the output of audit configure.
type configureOut struct {
	Witnesses []ledger.WitnessState `json:"witnesses"`
	Optional  bool                  `json:"optional"`
}

func (v *verbs) configure() *cobra.Command {
	var o ledger.WitnessesOptions
	var policy string
	c := &cobra.Command{
		Use: "configure", Short: "Choose the witnesses of the log", Args: console.Args(cobra.NoArgs),
		Long: `Choose the witnesses that cosign the heads of the log. Register the log's key, which
"audit keygen" printed, with each of them first. The command asks each witness for the
head that it knows, and changes nothing if one does not know the log or does not answer.

--witnesses FILE names them, in the form of C2SP tlog-policy:

  witness NAME KEY URL
  group NAME any|all|N MEMBER...
  quorum NAME                 of a witness or a group; "quorum none" without witnesses

From then on each head is cosigned before it is published. Before the owner of the store
appends anything, it asks all witnesses for the newest head that they know, for up to 5
seconds each time, and has them check that the log continues that head: an older state
of the whole directory and a rewritten log are refused. While none answers, the store
does not open for writing. With --optional it does, and then nothing refuses an older
state; a witness that does not answer is then accepted here, too.

A flag that is not given keeps what is configured. The owner of the store uses the new
configuration when it next opens the store for writing; end a "ckptstore serve" and
start it again. A user who can write to the store can change the configuration: those
who verify keep a policy of their own.`,
		Example: "  ckptstore audit configure --witnesses policy\n  ckptstore audit configure --optional",
		RunE: func(c *cobra.Command, _ []string) error {
			if policy == "" && !c.Flags().Changed("optional") {
				return console.Usagef("audit configure: --witnesses or --optional is missing")
			}
			if policy != "" {
				text, err := os.ReadFile(policy)
				if err != nil {
					return fmt.Errorf("--witnesses: %w", err)
				}
				if o.Policy = string(text); strings.TrimSpace(o.Policy) == "" {
					return console.Usagef("audit configure: --witnesses %s: the file is empty; `quorum none` is the policy without witnesses", policy)
				}
			}
			return v.read(c.Context(), func(s *store.Store) error {
				if err := inDirectory(s); err != nil {
					return fmt.Errorf("audit configure: %w", err)
				}
				if !c.Flags().Changed("optional") {
					had, err := ledger.ReadConfig(s.Location)
					if err != nil {
						return fmt.Errorf("audit configure: %w", err)
					}
					o.Optional = had.Optional
				}
				o.Store = s.Location
				states, err := ledger.SetWitnesses(c.Context(), o)
				if err != nil {
					return err
				}
				out := configureOut{states, o.Optional}
				return console.Emit(v.Console, out, states, func(w *tabwriter.Writer, _ bool) {
					for _, s := range states {
						if s.Error != "" {
							fmt.Fprintln(w, s.Error)
						} else {
							fmt.Fprintf(w, "%s knows the log up to size %d\n", s.URL, s.Size)
						}
					}
					if len(states) == 0 {
						fmt.Fprintln(w, "no witnesses: heads are not cosigned")
					}
				})
			})
		},
	}
	c.Flags().StringVar(&policy, "witnesses", "", "`FILE` with the witnesses to ask")
	c.Flags().BoolVar(&o.Optional, "optional", false, "open the store also while no witness answers")
	return c
}

func (v *verbs) witness() *cobra.Command {
	var listen, dir, key string
	var logs []string
	c := &cobra.Command{
		Use: "witness", Short: "Cosign heads of logs that continue those cosigned before", Args: console.Args(cobra.NoArgs),
		Long: `Serve C2SP tlog-witness: cosign a head only if its log continues the head that was
cosigned last. Run it on a machine that the owners of the logs do not control. It keeps
the newest head of each log in --dir, which one process at a time uses; a lost directory
forgets them. If a log forks, it prints that, and appends both notes to a file there, whose
name ends with ".fork": they are the evidence.`,
		Example: "  ckptstore audit witness --key witness.key --dir /var/lib/witness --log LOGKEY --listen 127.0.0.1:7380",
		RunE: func(c *cobra.Command, _ []string) error {
			if key == "" || dir == "" || len(logs) == 0 {
				return console.Usagef("audit witness: --key, --dir and --log are required")
			}
			w, err := ledger.NewWitness(dir, key, logs, v.complain("audit witness"))
			if err != nil {
				return err
			}
			return errors.Join(v.listen(c.Context(), listen, w), w.Close())
		},
	}
	f := c.Flags()
	f.StringVar(&listen, "listen", "127.0.0.1:7380", "address")
	f.StringVar(&dir, "dir", "", "directory of the newest heads")
	f.StringVar(&key, "key", "", "`FILE` with the key, made by audit keygen --witness")
	f.StringArrayVar(&logs, "log", nil, "verifier `KEY` of a log; repeatable")
	return c
}
