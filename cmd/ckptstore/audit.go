package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/internal/answer"
	"github.com/ckptstore/ckptstore/internal/attest"
	"github.com/ckptstore/ckptstore/internal/audit/command"
	"github.com/ckptstore/ckptstore/internal/audit/ledger"
	"github.com/ckptstore/ckptstore/internal/auditreport"
	"github.com/ckptstore/ckptstore/internal/bytesize"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/durable"
	"github.com/ckptstore/ckptstore/internal/foreign"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/store"
)

func (a *app) auditCommand() *cobra.Command {
	c := command.Command(a.Console, a.read, a.with)
	c.AddCommand(a.attestCommand(), a.auditReportCommand())
	return c
}

const attestHelp = `Sign a statement about the directory DIR, which ` + "`ckptstore export --format`" + ` wrote from the
checkpoint REF. The command first compares every byte of DIR with what the export of
REF writes, and refuses a DIR with another byte, or with a file that is missing or not
of the checkpoint. --also NAME signs a further file of DIR, such as config.json; the
statement lists it as not of the checkpoint.

  oms   OpenSSF Model Signing v1.0: the SHA-256 of every file. It also has the
        origin (the identity of the store), the checkpoint, the sequence of its
        commit, and the digest of its manifest. "model_signing verify key" checks it.
  slsa  SLSA provenance v1 about the same digest: the job, its command and
        configuration without their secrets, and the parent as a resolved
        dependency with its sequence and digest.

Both are in-toto statements in a Sigstore bundle v0.3, written to --to.

KEY is an ECDSA key on P-256, P-384 or P-521 in PEM, in a file that only you can read
and that has no other name. A key in the store or in DIR is refused. The bundle proves
that the holder of KEY made the statement, not that the log is unchanged.

Exit codes: 0 signed, 1 failed, 2 usage or unusable key, 4 no such checkpoint, 5 the
file exists, 6 DIR is not REF or the checkpoint is damaged, 12 the key is not private.`

// attestation are the options of `audit attest`.
type attestation struct {
	format, key, to string
	force           bool
	also            []string
}

// attested is the output of `audit attest --json`.
type attested struct {
	Checkpoint string      `json:"checkpoint"`
	Sequence   uint64      `json:"sequence"`
	Manifest   string      `json:"manifest"`
	Path       string      `json:"path"`
	Format     data.Format `json:"format"` // of the directory
	Statement  string      `json:"statement"`
	Bundle     string      `json:"bundle"` // path
	Files      int         `json:"files"`
	Bytes      int64       `json:"bytes"`  // of the files
	SHA256     string      `json:"sha256"` // of the subject
	Key        string      `json:"key"`    // SHA-256 of the public key
	Parents    []string    `json:"parents"`
}

func (a *app) attestCommand() *cobra.Command {
	var o attestation
	c := &cobra.Command{
		Use: "attest REF DIR --format oms|slsa --key KEY", Short: "Sign a statement about an exported checkpoint", Long: attestHelp,
		Args: console.Args(cobra.ExactArgs(2)),
		Example: `  ckptstore export bert@step-2000 bert-hf --format hf
  ckptstore audit attest bert@step-2000 bert-hf --format oms --key ~/.keys/signing.pem
  model_signing verify key bert-hf --signature bert-hf.oms.json --public_key signing.pub`,
		RunE: func(c *cobra.Command, given []string) error {
			switch {
			case o.format != "oms" && o.format != "slsa":
				return console.Usagef("--format %q: want oms or slsa", o.format)
			case o.key == "":
				return console.Usagef("--key KEY is missing; see `ckptstore audit attest --help`")
			case o.to == "":
				o.to = filepath.Clean(given[1]) + "." + o.format + ".json"
			}
			return a.read(c.Context(), func(s *store.Store) error { return a.attest(c.Context(), s, given[0], given[1], o) })
		},
	}
	f := c.Flags()
	f.StringVar(&o.format, "format", "", "statement: oms or slsa")
	f.StringVar(&o.key, "key", "", "file with the private key")
	f.StringVar(&o.to, "to", "", "file to write (default: DIR.oms.json or DIR.slsa.json)")
	f.BoolVar(&o.force, "force", false, "replace the file of --to")
	f.StringArrayVar(&o.also, "also", nil, "sign this file of DIR although it is not of the checkpoint (repeatable)")
	return c
}

// free refuses a file to write that exists, or that would become a part of the signed
// directory.
func free(to, dir string, force bool) error {
	full, err := filepath.Abs(to)
	if err != nil {
		return err
	}
	if parent, err := filepath.EvalSymlinks(filepath.Dir(full)); err == nil {
		full = filepath.Join(parent, filepath.Base(full))
	}
	if within, err := filepath.Abs(dir); err == nil {
		if real, err := filepath.EvalSymlinks(within); err == nil && strings.HasPrefix(full, real+"/") {
			return console.Usagef("--to %s lies in the directory that is signed; write it next to the directory", to)
		}
	}
	if _, err := os.Lstat(to); !errors.Is(err, fs.ErrNotExist) && !force {
		return problem.Errorf(problem.Conflict, "%s exists; choose another file by --to, or replace it with --force", to)
	}
	return nil
}

func (a *app) attest(ctx context.Context, s *store.Store, ref, dir string, o attestation) error {
	if err := free(o.to, dir, o.force); err != nil {
		return err
	}
	key, err := attest.ReadKey(o.key, s.Dir(), s.Data.Dir(), dir)
	if err != nil {
		return err
	}
	c, err := store.Committed(ctx, s.Views(), ref)
	if err != nil {
		return err
	}
	// Bytes of adopted files that were never read are not known to be those of the commit.
	if err := s.Digested(ctx, c); err != nil {
		return fmt.Errorf("audit attest: %w", err)
	}
	r, err := s.ReaderOf(c)
	if err != nil {
		return err
	}
	bar := a.Progress("compare", c.Bytes)
	defer bar.Done()
	files, format, err := store.CompareExport(ctx, r, dir, foreign.CompareOptions{Also: o.also, Progress: bar.Set})
	if err != nil {
		return err
	}
	bar.Done()
	full, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	out := attested{Checkpoint: c.Run + "@" + c.ID, Sequence: c.CommittedSeq, Manifest: c.Manifest, Path: dir, Format: format, Statement: o.format, Bundle: o.to, Key: key.Hint(), Parents: []string{}}
	subject := attest.Subject{Name: filepath.Base(full)}
	for _, f := range files {
		subject.Files = append(subject.Files, attest.File{Name: f.Name, SHA256: f.SHA256, Also: f.Also})
		out.Files++
		out.Bytes += f.Bytes
	}
	out.SHA256 = fmt.Sprintf("%x", subject.Root())
	training, err := answer.Training(ctx, s.ID, s.Views(), c)
	if err != nil {
		return err
	}
	for _, p := range training.Parents {
		out.Parents = append(out.Parents, p.Ref())
	}
	var statement []byte
	switch o.format {
	case "slsa":
		statement, err = attest.Provenance(subject, training)
	default:
		statement, err = attest.Model(subject, training.Checkpoint)
	}
	if err != nil {
		return err
	}
	bundle, err := key.Bundle(statement)
	if err != nil {
		return err
	}
	if err := durable.Write(o.to, bundle); err != nil {
		return fmt.Errorf("write %s: %w", o.to, err)
	}
	return console.Emit(a.Console, out, []attested{out}, func(w *tabwriter.Writer, _ bool) {
		fmt.Fprintf(w, "%s: %s statement about %d files, %s, of %s, committed at event %d\n", o.to, o.format, out.Files, bytesize.Text(out.Bytes), out.Checkpoint, out.Sequence)
	})
}

const auditReportHelp = `Print what an auditor reads about RUN: its jobs with their commands and hosts; its
trials, attempts and configurations; checkpoints of other runs and programs that it
follows from; every checkpoint with its state, parent, size and the digest of its
manifest; every load; and every decision with its sequence, its time and who appended it.
Reports of metrics are counted, not listed.

"By" is the sender as identified by the owner of the store (token, cert:NAME,
uid:NUMBER), and the name that the program gives itself. Without an identified sender,
the owner's own process appended the event, or a server that identifies no sender. Times
of decisions are those of the log's server; all others are those of the machine that
appended the event.

The report names the newest signed head of the log and the events that it does not cover.
It takes the events from the store: "ckptstore audit verify --policy" checks that the log
leads to that head. Without a head, the report is as trustworthy as the store.

html is one file without scripts or other resources. --json is the same as --format json.`

func (a *app) auditReportCommand() *cobra.Command {
	format, asOf := "", uint64(0)
	c := &cobra.Command{
		Use: "report RUN", Short: "Print who did what in a run, when, and with which bytes", Long: auditReportHelp,
		Args: console.Args(cobra.ExactArgs(1)),
		Example: `  ckptstore audit report bert
  ckptstore audit report bert --as-of 1200 --format html > bert.html`,
		RunE: func(c *cobra.Command, runs []string) error {
			if c.Flags().Changed("as-of") && asOf == 0 {
				return console.Usagef("--as-of 0: sequences count from 1")
			}
			switch {
			case a.Format == "json" && !c.Flags().Changed("format"):
				format = "json"
			case a.Format != "table" && a.Format != format:
				return console.Usagef("--output %s does not go with --format %s: omit one of them", a.Format, format)
			}
			switch format {
			case "md", "json", "html":
			default:
				return console.Usagef("--format %q: want md, json or html", format)
			}
			return a.read(c.Context(), func(s *store.Store) error { return a.auditReport(c.Context(), s, runs[0], asOf, format) })
		},
	}
	c.Flags().Uint64Var(&asOf, "as-of", 0, "report as of the event with this sequence (default: the end of the log)")
	c.Flags().StringVar(&format, "format", "md", "format: md, json or html")
	return c
}

func (a *app) auditReport(ctx context.Context, s *store.Store, run string, asOf uint64, format string) error {
	head := func() (*auditreport.Head, string, error) { return newestHead(s) }
	r, err := auditreport.New(ctx, auditreport.From{Store: s.ID, Log: s.Log, Views: s.Views(), AsOf: s.Past.AsOf, Head: head}, run, asOf)
	if err != nil {
		return err
	}
	switch format {
	case "json":
		return r.JSON(a.Raw)
	case "html":
		return r.HTML(a.Raw)
	}
	return r.Markdown(a.Out)
}

// newestHead returns the newest published head of the log, or why there is none.
func newestHead(s *store.Store) (*auditreport.Head, string, error) {
	b, err := s.Ledger()
	if errors.Is(err, ledger.ErrOff) {
		return nil, auditreport.NoAudit, nil
	}
	if err != nil {
		return nil, "", err
	}
	_, h, err := b.Checkpoint()
	if errors.Is(err, ledger.ErrOff) {
		return nil, "none was published yet", nil
	}
	if err != nil {
		return nil, "", err
	}
	return &auditreport.Head{Origin: h.Origin, Size: uint64(h.Size), Root: h.Root.String()}, "", nil //nolint:gosec // not negative
}
