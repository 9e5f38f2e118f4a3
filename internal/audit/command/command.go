// Package command has the commands of `ckptstore audit` that make and check tamper
// evidence.
package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/mod/sumdb/note"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/audit"
	"github.com/ckptstore/ckptstore/internal/audit/ledger"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/store"
)

// Open opens the store of the command line for one command.
type Open func(ctx context.Context, do func(*store.Store) error) error

type verbs struct {
	*console.Console
	read, write Open
}

// Commands returns the commands. Those that change nothing in the store open it by read.
func Commands(c *console.Console, read, write Open) []*cobra.Command {
	v := &verbs{c, read, write}
	return []*cobra.Command{v.keygen(), v.configure(), v.checkpoint(), v.prove(), v.export(), v.verify(), v.witness(), v.serve()}
}

const help = `Make and check evidence that the log of a store was not rewritten.

"audit keygen" turns it on. From then on the owner of the store keeps a Merkle tree over
the log and signs its root, the head, at most twice a second. With witnesses it has each
head cosigned before it is published, so that no reader can be shown another history. The
formats are those of C2SP: tlog-tiles, tlog-checkpoint, tlog-proof, tlog-witness.

Exit codes: 0 ok, 1 failed, 2 usage, 4 not found, 6 tampered or incomplete, 7 the policy
is not met, 10 no store, 11 locked.`

// Command returns the command audit with all of [Commands].
func Command(c *console.Console, read, write Open) *cobra.Command {
	verb := &cobra.Command{
		Use: "audit", Short: "Prove that the log was not rewritten", Long: help, Args: console.Args(cobra.ArbitraryArgs),
		RunE: func(c *cobra.Command, given []string) error {
			if len(given) == 0 {
				return c.Help()
			}
			return console.Usagef("unknown command %q; see `%s --help`", given[0], c.CommandPath())
		},
	}
	verb.AddCommand(Commands(c, read, write)...)
	return verb
}

// book opens the evidence of the store.
func (v *verbs) book(ctx context.Context, open Open, do func(*store.Store, *ledger.Book) error) error {
	return open(ctx, func(s *store.Store) error {
		b, err := s.Ledger()
		if err != nil {
			return err
		}
		return do(s, b)
	})
}

// headOut is a head as commands print it.
type headOut struct {
	Origin string `json:"origin"`
	Size   int64  `json:"size"`
	Root   string `json:"root"`
	Note   string `json:"note"`
}

func (v *verbs) checkpoint() *cobra.Command {
	var wait time.Duration
	c := &cobra.Command{
		Use: "checkpoint", Short: "Make a head now, and print its note", Args: console.Args(cobra.NoArgs),
		Long: `Have the owner of the store append the decision audit.sealed, which proves for each
trial which events it has, and publish a head that includes it. Print the note. Keep
notes where the owner of the store cannot change them: each proves later that the log
was not rewritten before it.`,
		Example: "  ckptstore audit checkpoint > ~/notes/$(date +%F)",
		RunE: func(c *cobra.Command, _ []string) error {
			return v.book(c.Context(), v.write, func(_ *store.Store, b *ledger.Book) error {
				ctx, cancel := context.WithTimeout(c.Context(), wait)
				defer cancel()
				signed, h, err := b.Want(ctx)
				if err != nil {
					return err
				}
				out := headOut{h.Origin, h.Size, h.Root.String(), string(signed)}
				return console.Emit(v.Console, out, []headOut{out}, func(w *tabwriter.Writer, _ bool) { fmt.Fprint(w, out.Note) })
			})
		},
	}
	c.Flags().DurationVar(&wait, "timeout", time.Minute, "how long to wait for the head")
	return c
}

// since reads a note of an older head. The signature is checked: by the policy's logs, or
// by the store's own key.
func since(file string, logs ...note.Verifier) (*audit.Head, error) {
	if file == "" {
		return nil, nil
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("--since: %w", err)
	}
	h, err := audit.OpenHead(text, logs...)
	if err != nil {
		return nil, fmt.Errorf("--since %s: %w", file, err)
	}
	return &h, nil
}

func sinceOf(file string, b *ledger.Book) (*audit.Head, error) {
	logs, err := b.Logs()
	if err != nil {
		return nil, err
	}
	return since(file, logs...)
}

// output writes to a file that must not exist, or to standard output.
func (v *verbs) output(path string, write func(io.Writer) error) error {
	if path == "" {
		return write(v.Raw)
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	if err = errors.Join(write(f), f.Close()); err != nil {
		err = errors.Join(err, os.Remove(path))
	}
	return err
}

func (v *verbs) prove() *cobra.Command {
	var old, to string
	c := &cobra.Command{
		Use: "prove REF|SEQUENCE", Short: "Prove that one event is in the log", Args: console.Args(cobra.ExactArgs(1)),
		Long: `Write a proof that an event is in the log under the newest head: a C2SP tlog-proof with
the event in its extra line. REF stands for the decision that committed a checkpoint. It
names the manifest by its digest, which names the indexes, which name each chunk.

A checkpoint of adopted files that were never read has no digests of them: "ckptstore
verify --learn" records them.`,
		Example: "  ckptstore audit prove bert@step-2000 > step-2000.tlog-proof\n  ckptstore audit prove 4711 --since head.2026-01",
		RunE: func(c *cobra.Command, given []string) error {
			return v.book(c.Context(), v.read, func(s *store.Store, b *ledger.Book) error {
				head, err := sinceOf(old, b)
				if err != nil {
					return err
				}
				sequence, err := v.sequence(c.Context(), s, given[0])
				if err != nil {
					return err
				}
				proof, err := b.Prove(c.Context(), sequence, head)
				if err != nil {
					return err
				}
				return v.output(to, func(w io.Writer) error { _, err := w.Write(proof); return err })
			})
		},
	}
	c.Flags().StringVar(&old, "since", "", "also prove that the log continues the head of this `NOTE`")
	c.Flags().StringVar(&to, "to", "", "write to a new `FILE` instead of standard output")
	return c
}

// sequence returns the sequence that an argument of audit prove means.
func (v *verbs) sequence(ctx context.Context, s *store.Store, arg string) (uint64, error) {
	if n, err := events.ParseSequence(arg); err == nil {
		return n, nil
	}
	c, err := store.Queries{From: s.Views()}.Resolve(ctx, arg)
	if err != nil {
		return 0, err
	}
	if c.CommittedSeq == 0 {
		return 0, problem.Errorf(problem.NotCommitted, "audit prove: %s@%s is %s: no event commits it", c.Run, c.ID, c.State)
	}
	if err := s.Digested(ctx, c); err != nil {
		return 0, fmt.Errorf("audit prove: %w", err)
	}
	return c.CommittedSeq, nil
}

func (v *verbs) export() *cobra.Command {
	var o ledger.ExportOptions
	var old, to string
	c := &cobra.Command{
		Use: "export --run RUN", Short: "Write a bundle that proves what happened in a run", Args: console.Args(cobra.NoArgs),
		Long: `Write a bundle with the events of a run and the proof that the run has no others, up to
the newest audit.sealed. "ckptstore audit verify" checks it on a machine without the
store, a network or a clock. --from and --until choose the events whose content is in
the bundle; of the others it has the entry, which proves that they exist.

Run "ckptstore audit checkpoint" first to include the newest events.`,
		Example: "  ckptstore audit export --run bert --to bert.bundle",
		RunE: func(c *cobra.Command, _ []string) error {
			if o.Run == "" {
				return console.Usagef("audit export: --run is missing")
			}
			return v.book(c.Context(), v.read, func(s *store.Store, b *ledger.Book) (err error) {
				if o.Since, err = sinceOf(old, b); err != nil {
					return err
				}
				o.Blobs = s.Blobs.Get
				return v.output(to, func(w io.Writer) error { return b.Export(c.Context(), o, w) })
			})
		},
	}
	f := c.Flags()
	f.StringVar(&o.Run, "run", "", "the run")
	f.Uint64Var(&o.From, "from", 1, "first event with its content")
	f.Uint64Var(&o.Until, "until", 0, "last event with its content; 0: the newest")
	f.StringVar(&old, "since", "", "also prove that the log continues the head of this `NOTE`")
	f.StringVar(&to, "to", "", "write to a new `FILE` instead of standard output")
	return c
}

func (v *verbs) verify() *cobra.Command {
	var policy, old string
	var unwitnessed bool
	c := &cobra.Command{
		Use: "verify [FILE]", Short: "Check a bundle or a proof, or the whole log", Args: console.Args(cobra.MaximumNArgs(1)),
		Long: `Check a bundle of "audit export" or a proof of "audit prove" against a policy in the
form of C2SP tlog-policy:

  log KEY                     printed by "audit keygen"
  witness NAME KEY URL
  quorum NAME                 or a group; "quorum none" without witnesses
  signer KEY                  an admin's key, by "ckptstore access keygen"
  signed PATTERN              decisions of runs that match must be signed

This needs no store, network or clock. A missing cosignature is exit code 7; so is a
policy without witnesses, unless --unwitnessed is given. With --since the log must also
continue the head of an older note; if it does not, both roots are printed. The note may
be of an earlier origin, if the policy has its key in a further line "log": see "audit
keygen --new-origin". If the log has lost events of that head, this is exit code 6.

Signatures of decisions are checked by the keys that the log grants: see "ckptstore access
issue --key". A decision whose signature is forged, replayed, or of a key that is unknown or
revoked is exit code 6, and so is one without a signature where it must have one. Decisions
that need none and have none are counted. Name the admins' keys in lines "signer": without
them, the first key that the log grants counts.

Without FILE, read the whole log of the store and compare it with the newest head, the
listed heads, the tiles and the decisions audit.sealed. Give --policy here too, from a
place that those who can write to the store cannot change. Without it, the key and the
witnesses are those that the store itself names: a user who can write to the store can
rewrite the log and name a key of their own.`,
		Example: "  ckptstore audit verify bert.bundle --policy policy --since head.2026-01\n  ckptstore audit verify --policy policy --since head.2026-01",
		RunE: func(c *cobra.Command, given []string) error {
			if len(given) == 1 && policy == "" {
				return console.Usagef("audit verify %s: --policy is missing: it names the key of the log and its witnesses", given[0])
			}
			var p *audit.Policy
			var head *audit.Head
			if policy != "" {
				text, err := os.ReadFile(policy)
				if err != nil {
					return fmt.Errorf("--policy: %w", err)
				}
				parsed, err := audit.ParsePolicy(string(text))
				if err != nil {
					return err
				}
				if head, err = since(old, parsed.Logs...); err != nil {
					return err
				}
				p = &parsed
			}
			if len(given) == 0 {
				return v.verifyLog(c.Context(), p, unwitnessed, old, head)
			}
			return v.verifyFile(given[0], *p, unwitnessed, head)
		},
	}
	f := c.Flags()
	f.StringVar(&policy, "policy", "", "`FILE` with the keys of the log and of its witnesses")
	f.StringVar(&old, "since", "", "the log must continue the head of this `NOTE`")
	f.BoolVar(&unwitnessed, "unwitnessed", false, "accept a policy without witnesses")
	return c
}

func (v *verbs) verifyFile(path string, p audit.Policy, unwitnessed bool, old *audit.Head) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	first := make([]byte, 64)
	n, err := io.ReadFull(f, first)
	if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, io.EOF) {
		return fmt.Errorf("%s: %w", path, err)
	}
	whole := io.MultiReader(strings.NewReader(string(first[:n])), f)
	if audit.IsProof(first[:n]) {
		data, err := io.ReadAll(whole)
		if err != nil {
			return err
		}
		out, err := audit.VerifyProof(data, p, unwitnessed, old)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		return console.Emit(v.Console, out, []audit.ProvedEvent{out}, func(w *tabwriter.Writer, _ bool) {
			fmt.Fprintf(w, "event %d is in the log %s of size %d\n%s\n%s\n%s%s", out.Sequence, out.Origin, out.Size, out.Message.Subject, out.Message.Data, follows(out.Head, old), signer(out))
		})
	}
	out, err := audit.VerifyBundle(whole, p, unwitnessed, old)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if err := console.Emit(v.Console, out, []audit.Verified{out}, func(w *tabwriter.Writer, _ bool) {
		fmt.Fprintf(w, "run %s: %d events of %d trials, all up to event %d; %d with their content\nlog %s, size %d, root %s\n%s%s\n",
			out.Run, out.Events, out.Trials, out.Complete, out.Messages, out.Origin, out.Size, out.Root, follows(out.Head, old), signatures(out))
	}); err != nil {
		return err
	}
	if s := out.Signatures; s != nil && len(s.Findings) > 0 {
		return problem.Errorf(problem.Findings, "%s: %d decisions whose signature does not hold", path, len(s.Findings)+s.More)
	}
	return nil
}

// signer returns a line about the signature of a proved event.
func signer(p audit.ProvedEvent) string {
	if p.Signer == "" {
		return ""
	}
	return "it names the key " + p.Signer + " as its signer; a bundle of `ckptstore audit export` has what proves that\n"
}

// signatures returns lines about the signatures of decisions.
func signatures(v audit.Verified) string {
	s := v.Signatures
	switch {
	case s == nil && v.Unchecked > 0:
		return fmt.Sprintf("%d decisions have signatures that were not checked: the bundle does not show which keys were granted", v.Unchecked)
	case s == nil:
		return "decisions are not signed"
	}
	var lines strings.Builder
	for _, f := range s.Findings {
		fmt.Fprintf(&lines, "event %d: %s\n", f.Sequence, f.Problem)
	}
	return lines.String() + s.Text()
}

// follows returns a line about an older head of an earlier origin that a head continues.
func follows(h audit.Head, old *audit.Head) string {
	if old == nil || old.Origin == h.Origin {
		return ""
	}
	return fmt.Sprintf("it has the first %d events of the log %s, which it follows\n", old.Size, old.Origin)
}

// logOut is the output of audit verify without a file.
type logOut struct {
	ledger.VerifiedLog
	Keys string `json:"keys"` // whose: of the given policy, or those that the store names
}

// verifyLog checks the whole log, by the policy of the store itself if p is nil. Then it
// reads the older note, too.
func (v *verbs) verifyLog(ctx context.Context, p *audit.Policy, unwitnessed bool, old string, head *audit.Head) error {
	return v.book(ctx, v.read, func(_ *store.Store, b *ledger.Book) error {
		keys, word := "policy", ""
		if p != nil {
			b.Accept(*p, unwitnessed)
		} else {
			err := b.AcceptOwn(unwitnessed)
			if err == nil {
				head, err = sinceOf(old, b)
			}
			if err != nil {
				return err
			}
			keys = "store"
			word = "the key and the witnesses are those that the store itself names, which a user who can write to it can replace: compare with yours by --policy\n"
		}
		found, err := b.Verify(ctx, head)
		if err != nil {
			return err
		}
		out := logOut{found, keys}
		if err := console.Emit(v.Console, out, out.Findings, func(w *tabwriter.Writer, _ bool) {
			for _, f := range out.Findings {
				fmt.Fprintln(w, f.Problem)
			}
			for _, o := range out.Origins {
				fmt.Fprintln(w, o)
			}
			fmt.Fprintf(w, "%d events of %d read, %d run maps compared, %d findings\nlog %s, size %d, root %s\n%s\n%s",
				out.Events, out.Size, out.Sealed, len(out.Findings), out.Origin, out.Size, out.Root, out.Signatures.Text(), word)
		}); err != nil {
			return err
		}
		if len(out.Findings) > 0 {
			return problem.Errorf(problem.Findings, "audit verify: %s", strconv.Itoa(len(out.Findings))+" findings")
		}
		return nil
	})
}

func (v *verbs) serve() *cobra.Command {
	var listen string
	c := &cobra.Command{
		Use: "serve", Short: "Serve head, tiles and entries to other people's verifiers", Args: console.Args(cobra.NoArgs),
		Long: `Serve the log as C2SP tlog-tiles: /checkpoint, /tile/<level>/<n> and /tile/entries/<n>.
Mirrors and monitors of any program can read it. Entries have no content of events: a
body is there as a salted digest.`,
		Example: "  ckptstore audit serve --listen 127.0.0.1:7381",
		RunE: func(c *cobra.Command, _ []string) error {
			return v.book(c.Context(), v.read, func(_ *store.Store, b *ledger.Book) error {
				return v.listen(c.Context(), listen, b.Handler(v.complain("audit serve")))
			})
		},
	}
	c.Flags().StringVar(&listen, "listen", "127.0.0.1:7381", "address")
	return c
}

// complain returns a function that prints errors of a command, and the same error only once.
func (v *verbs) complain(command string) func(error) {
	var mu sync.Mutex
	last := ""
	return func(err error) {
		mu.Lock()
		defer mu.Unlock()
		if text := err.Error(); text != last {
			last = text
			fmt.Fprintf(v.Err, "%s: %s\n", command, text)
		}
	}
}

// listen serves until ctx ends.
func (v *verbs) listen(ctx context.Context, address string, h http.Handler) error {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", address)
	if err != nil {
		return err
	}
	fmt.Fprintf(v.Err, "listening on http://%s\n", l.Addr())
	server := &http.Server{Handler: h, ReadHeaderTimeout: 10 * time.Second, ReadTimeout: time.Minute, WriteTimeout: time.Minute}
	stop := context.AfterFunc(ctx, func() {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		_ = server.Shutdown(end)
	})
	defer stop()
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
