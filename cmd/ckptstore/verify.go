package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/bytesize"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// verified is the output of `verify --json`.
type verified struct {
	Store       string         `json:"store"`
	Checkpoints int            `json:"checkpoints"`
	Files       int            `json:"files"`
	Chunks      int            `json:"chunks"`
	Bytes       int64          `json:"bytes"`
	Read        int64          `json:"bytes_read"`               // of Bytes; a file of several checkpoints is read once
	Quick       bool           `json:"quick"`                    // no tensor was read
	Attested    int64          `json:"bytes_attested,omitempty"` // of files whose server keeps the checksum that the index has
	BySize      int64          `json:"bytes_by_size,omitempty"`  // of other files: --quick compared their sizes and headers
	Log         *store.ReadLog `json:"log,omitempty"`            // without REF
	Learned     []learned      `json:"learned,omitempty"`        // digests of adopted files, now recorded
	Repaired    []repaired     `json:"repaired,omitempty"`
	Unrepaired  []unrepaired   `json:"unrepaired,omitempty"`
	Findings    []finding      `json:"findings"` // after repairs

	logAlone bool // only the log was read
	strict   bool // messages that the owner has recorded as log.voided are findings too
}

// learned is a file of digests that this verification recorded.
type learned struct {
	Run        string `json:"run"`
	Trial      string `json:"trial"`
	Checkpoint string `json:"checkpoint"`
	File       string `json:"file"`
}

// logDamage is the kind of a finding in the log, which belongs to no checkpoint.
const logDamage data.Kind = "log"

// logVoid is the kind of a finding about a message of the log that is not an event.
const logVoid data.Kind = "void"

type finding struct {
	Run        string `json:"run"`
	Trial      string `json:"trial,omitempty"`
	Checkpoint string `json:"checkpoint"`
	data.Finding
	Sequence uint64 `json:"sequence,omitempty"` // of the log
	Until    uint64 `json:"until,omitempty"`
}

// verifyFlags are the flags of verify.
type verifyFlags struct{ log, strict, offline, deep, quick, repair, learn bool }

// writes reports whether the verification changes the store: see [store.Options].
func (f verifyFlags) writes() bool { return f.log || f.repair || f.learn }

// check refuses conflicting flags.
func (f verifyFlags) check(refs []string) error {
	switch {
	case f.log && len(refs) > 0:
		return console.Usagef("--log verifies the log of all checkpoints; omit REF")
	case f.strict && (len(refs) > 0 || f.offline):
		return console.Usagef("--strict is about the log; omit REF and --offline")
	case f.offline && f.log:
		return console.Usagef("--offline does not read the log, --log reads only the log: give one of them")
	case f.quick && f.deep:
		return console.Usagef("--quick reads no tensor, --deep reads all: give one of them")
	case f.log && (f.quick || f.deep):
		return console.Usagef("--log reads no checkpoint; omit --quick and --deep")
	case f.learn && (f.quick || f.offline || f.log):
		return console.Usagef("--learn reads the tensors and writes to the log; omit --quick, --offline and --log")
	case f.repair && (f.quick || f.offline || f.log):
		return console.Usagef("--repair reads the tensors and needs the log; omit --quick, --offline and --log")
	}
	return nil
}

func (a *app) verifyCommand() *cobra.Command {
	var o verifyFlags
	c := &cobra.Command{
		Use: "verify [REF]", Short: "Verify checkpoints and the log, byte by byte", Args: console.Args(cobra.MaximumNArgs(1)),
		Long: `Read every file of the committed checkpoints, or of REF, and verify it: data against the
index, the index against the manifest, the manifest against the log. Nothing in the
store is changed. Damage is reported by file, tensor and block, and the exit code is
then 6. Without REF the whole log is read too; if it does not open, verify reads the
checkpoints that are committed according to their receipts.

By default (--deep) every byte is read, because only that finds damage in tensors. With
--quick, verify compares receipts, manifests, indexes, and the sizes and headers of
files, which takes no longer than a listing. In a bucket it also compares the checksum
that the server keeps of each rank's file with the index: damage on the server's disks is not
found by that. Checkpoints, files and tensors are read in
parallel, and a file of several checkpoints is read once.

With --learn, verify records the digests of files that were imported in place, if the
files' own checksums match.

` + repairHelp + `

With --log, verify reads only the log: it checks every sequence against the server's
counts, every decision against the previous one in its lane, and every blob against its
digest. Damage is reported by sequence and recorded: no process opens the store until a
later reading finds no damage. The owner of the store does the same every six hours; see
` + "`ckptstore views status`" + `.

Readers skip messages that are not events. Such a message is a finding until the owner
of the store has recorded it as log.voided. After that it is listed, and is a finding
only with --strict.

` + offlineHelp + `
The receipts then decide which checkpoints are committed, and no digest is learned.

` + pathHelp + `
Such files are verified only by the checksums that they contain.`,
		Example: "  ckptstore verify\n  ckptstore verify bert@step-2000\n  ckptstore verify --quick\n  ckptstore verify --repair\n  ckptstore verify --log --json",
		RunE: func(c *cobra.Command, refs []string) error {
			if err := o.check(refs); err != nil {
				return err
			}
			if o.offline {
				return a.verifyOffline(c.Context(), refs, o)
			}
			if !o.writes() && (len(refs) == 0 || !spelledPath(refs[0])) && a.byReceipts() {
				return a.verifyOffline(c.Context(), refs, o)
			}
			if len(refs) == 1 {
				path, err := a.isPath(c.Context(), refs[0])
				if err != nil {
					return err
				}
				if path && (o.repair || o.learn) {
					return console.Usagef("--repair, --learn: %s is a path, and files of other programs are never written to; omit these flags", refs[0])
				}
				if path && o.quick {
					return console.Usagef("--quick: %s is a path, whose checksums are in its data; omit --quick", refs[0])
				}
				if path {
					return a.verifyPath(c.Context(), refs[0])
				}
			}
			options := a.options()
			options.Reader, options.LeaveVoids = !o.writes(), true
			s, err := store.Open(c.Context(), options)
			if o.log && errors.Is(err, store.ErrKnownDamage) {
				return a.verifyKnownDamage(c.Context(), o.strict)
			}
			if o.log && errors.Is(err, store.ErrDamaged) {
				return a.printVerified(verified{Findings: []finding{logFinding(err)}, logAlone: true})
			}
			if len(refs) == 0 && !o.repair && errors.Is(err, store.ErrDamaged) {
				return a.verifyReceipts(c.Context(), err, o)
			}
			if err != nil {
				return err
			}
			if o.log {
				out := verified{Store: s.ID, Findings: []finding{}, logAlone: true, strict: o.strict}
				err := a.readLog(c.Context(), s, &out)
				if err == nil {
					err = a.printVerified(out)
				}
				return errors.Join(err, s.Close())
			}
			return errors.Join(a.verify(c.Context(), s, refs, o), s.Close())
		},
	}
	f := c.Flags()
	f.BoolVar(&o.log, "log", false, "verify only the log")
	f.BoolVar(&o.strict, "strict", false, "report messages that are not events even if the owner has recorded them")
	f.BoolVar(&o.offline, "offline", false, "read only receipts: no lock, no log")
	f.BoolVar(&o.repair, "repair", false, "restore damaged chunks from the store or a staging slot")
	f.BoolVar(&o.learn, "learn", false, "record the digests of files that were imported in place")
	f.BoolVar(&o.deep, "deep", false, "read every byte (the default)")
	f.BoolVar(&o.quick, "quick", false, "check receipts, manifests, indexes and file sizes, but read no tensor")
	return c
}

func (a *app) verify(ctx context.Context, s *store.Store, refs []string, o verifyFlags) (done error) {
	var before []projections.Checkpoint // committed when the repair began
	if o.repair {
		unlock, err := s.LockRepair()
		if err != nil {
			return err
		}
		defer func() { done = errors.Join(done, unlock()) }()
		if before, err = verifyTargets(ctx, s, nil); err != nil {
			return err
		}
	}
	targets, err := verifyTargets(ctx, s, refs)
	if len(refs) == 0 && errors.Is(err, events.ErrNewer) { // for some runs; verify the others
		defer func(unknown error) { done = errors.Join(unknown, done) }(err)
	} else if err != nil {
		return err
	}
	out := verified{Store: s.ID, Quick: o.quick, Findings: []finding{}, strict: o.strict}
	bar := a.Progress("verify", bytesOf(targets))
	defer bar.Done()
	reports, err := s.VerifyAll(ctx, targets, store.VerifyOptions{Quick: o.quick, Progress: bar.Set})
	if err != nil {
		return err
	}
	bar.Done()
	if o.repair {
		if targets, reports, err = a.repairAndVerify(ctx, s, before, targets, reports, &out); err != nil {
			return err
		}
	}
	for i, c := range targets {
		out.add(c.Run, c.Trial, c.ID, reports[i])
	}
	if len(refs) == 0 {
		links, err := s.Data.Links(ctx)
		if err != nil {
			return err
		}
		out.addDamaged(links)
		if err := a.readLog(ctx, s, &out); err != nil {
			return err
		}
	}
	return a.printVerified(out)
}

// verifyMemory is the soft memory limit, in bytes, of a process that reads the whole
// log, unless $GOMEMLIMIT is set.
const verifyMemory = 160 << 20

// readLog verifies the log.
func (a *app) readLog(ctx context.Context, s *store.Store, out *verified) error {
	// Most of the data read is garbage at once: without a limit the heap is twice as large.
	if os.Getenv("GOMEMLIMIT") == "" {
		defer debug.SetMemoryLimit(debug.SetMemoryLimit(verifyMemory))
	}
	read, err := s.VerifyLog(ctx, nil)
	if err != nil {
		return err
	}
	out.addLog(read)
	if read.Newer > 0 {
		a.Warn("%d events of a newer version were not checked; upgrade this program", read.Newer)
	}
	if len(read.Findings) > 0 && !out.logAlone {
		a.Warn("the log is damaged; run `ckptstore verify --log` to record that, so that no process continues with the store")
	}
	return nil
}

// verifyKnownDamage reads again a log that is recorded as damaged.
func (a *app) verifyKnownDamage(ctx context.Context, strict bool) error {
	id, read, err := store.VerifyKnownDamage(ctx, a.options(), nil)
	if errors.Is(err, store.ErrDamaged) {
		return a.printVerified(verified{Findings: []finding{logFinding(err)}, logAlone: true})
	}
	if err != nil {
		return err
	}
	out := verified{Store: id, Findings: []finding{}, logAlone: true, strict: strict}
	out.addLog(read)
	return a.printVerified(out)
}

func (v *verified) addLog(read store.ReadLog) {
	v.Log = &read
	v.addVoids(read)
	for _, f := range read.Findings {
		v.Findings = append(v.Findings, finding{
			Finding:  data.Finding{Kind: logDamage, File: "log", Block: -1, Offset: -1, Problem: f.String()},
			Sequence: f.Sequence, Until: f.Until,
		})
	}
}

// printVerified prints the result. It returns errFindings if there are findings.
func (a *app) printVerified(out verified) error {
	err := console.Emit(a.Console, out, out.Findings, func(w *tabwriter.Writer, _ bool) {
		out.printRepairs(w)
		for _, f := range out.Findings {
			if f.Kind == logDamage || f.Kind == logVoid {
				fmt.Fprintf(w, "log: %s\n", f.Problem)
				continue
			}
			fmt.Fprintf(w, "%s: %s\n", refOf(f.Run, f.Trial, f.Checkpoint), f.Finding)
		}
		for _, l := range out.Learned {
			fmt.Fprintf(w, "%s: learned the digests of its adopted files (%s)\n", refOf(l.Run, l.Trial, l.Checkpoint), l.File)
		}
		if out.Log != nil {
			out.printVoids(w)
			signed := ""
			if out.Log.Signed > 0 {
				signed = fmt.Sprintf(", %d signed", out.Log.Signed)
			}
			fmt.Fprintf(w, "log: %d of %d events read, %d decisions%s, %d blobs\n", out.Log.Events, out.Log.Last, out.Log.Decisions, signed, out.Log.Blobs)
		}
		if out.logAlone {
			fmt.Fprintf(w, "%d findings\n", len(out.Findings))
			return
		}
		if out.Quick {
			attested := ""
			if out.Attested > 0 {
				attested = ", " + bytesize.Text(out.Attested) + " attested by the server's checksums"
			}
			if out.Attested > 0 && out.BySize > 0 {
				attested += ", " + bytesize.Text(out.BySize) + " compared by size and header"
			}
			fmt.Fprintf(w, "%d checkpoints, %d files, no tensor was read%s: %d findings\n", out.Checkpoints, out.Files, attested, len(out.Findings))
			return
		}
		fmt.Fprintf(w, "%d checkpoints, %d files, %d chunks, %s: %d findings\n",
			out.Checkpoints, out.Files, out.Chunks, bytesize.Text(out.Bytes), len(out.Findings))
	})
	if err == nil && len(out.Findings) > 0 {
		return errFindings
	}
	return err
}

// verifyTargets returns the checkpoint of refs, or all committed checkpoints. With an
// [events.ErrNewer], these are the checkpoints of the runs that it can read.
func verifyTargets(ctx context.Context, s *store.Store, refs []string) ([]projections.Checkpoint, error) {
	if len(refs) == 1 {
		c, err := store.Committed(ctx, s.Views(), refs[0])
		return []projections.Checkpoint{c}, err
	}
	runs, err := query.Ask(ctx, s.Views(), query.Runs, query.Params{})
	if err != nil {
		return nil, err
	}
	var targets []projections.Checkpoint
	var unknown []error
	for _, run := range runs {
		rows, err := query.Ask(ctx, s.Views(), query.Checkpoints, query.Params{Run: run.Name, All: true})
		if errors.Is(err, events.ErrNewer) {
			unknown = append(unknown, err)
			continue
		}
		if err != nil {
			return nil, err
		}
		for _, c := range rows {
			if c.State == projections.Committed {
				targets = append(targets, c)
			}
		}
	}
	return targets, errors.Join(unknown...)
}

// bytesOf sums the sizes of checkpoints.
func bytesOf(checkpoints []projections.Checkpoint) (total int64) {
	for _, c := range checkpoints {
		total += c.Bytes
	}
	return total
}

// verifyReceipts verifies the checkpoints that are committed according to their receipts,
// for a log that does not open because of why. On a server it cannot: the location of
// the data is in the log.
func (a *app) verifyReceipts(ctx context.Context, why error, o verifyFlags) error {
	out := verified{Quick: o.quick, Findings: []finding{logFinding(why)}}
	if store.IsURL(a.location) {
		a.Warn("no data was read: its location is in the log")
		return a.printVerified(out)
	}
	data, err := a.data()
	if err != nil {
		return errors.Join(why, err)
	}
	receipts, damaged, err := data.Checkpoints(ctx)
	if err != nil {
		return errors.Join(why, err)
	}
	out.addDamaged(damaged)
	if err := a.verifyEach(ctx, data, receipts, &out); err != nil {
		return errors.Join(why, err)
	}
	return a.printVerified(out)
}

// verifyOffline verifies the checkpoint of refs, or all checkpoints that are committed
// according to their receipts.
func (a *app) verifyOffline(ctx context.Context, refs []string, o verifyFlags) error {
	out := verified{Quick: o.quick, Findings: []finding{}}
	if len(refs) == 1 {
		return a.withOffline(ctx, refs[0], all, func(s source) error {
			if s.foreign != nil {
				return a.verifyPath(ctx, refs[0])
			}
			r := s.reader.(*data.FileReader)
			receipt, err := r.Root().Receipt(ctx, store.RefOf(s.checkpoint))
			if err == nil {
				err = a.verifyEach(ctx, r.Root(), []checkpoint.Receipt{receipt}, &out)
			}
			if err != nil {
				return err
			}
			return a.printVerified(out)
		})
	}
	data, err := a.data()
	if err != nil {
		return err
	}
	receipts, damaged, err := data.Checkpoints(ctx)
	if err != nil {
		return err
	}
	out.addDamaged(damaged)
	if err := a.verifyEach(ctx, data, receipts, &out); err != nil {
		return err
	}
	return a.printVerified(out)
}

func (v *verified) addDamaged(damaged []data.Damaged) {
	for _, d := range damaged {
		kind, file := data.Corrupt, checkpoint.ReceiptFile
		if d.Link() {
			kind, file = data.Unreadable, d.File
		}
		v.Findings = append(v.Findings, finding{Run: d.Ref.Run, Trial: d.Ref.Trial, Checkpoint: d.Ref.Checkpoint, Finding: data.Finding{
			Kind: kind, File: file, Block: -1, Offset: -1, Problem: d.Err.Error(),
		}})
	}
}

// verifyEach verifies checkpoints by their receipts.
func (a *app) verifyEach(ctx context.Context, data *data.Root, receipts []checkpoint.Receipt, out *verified) error {
	bar := a.Progress("verify", 0)
	defer bar.Done()
	reports, err := store.VerifyReceipts(ctx, data, receipts, store.VerifyOptions{Quick: out.Quick, Progress: bar.Set})
	if err != nil {
		return err
	}
	for i, r := range receipts {
		out.Store = r.Store
		out.add(r.Run, r.Trial, r.Checkpoint, reports[i])
	}
	return nil
}

// add adds the report of one checkpoint.
func (v *verified) add(run, trial, checkpoint string, report data.Report) {
	v.Checkpoints++
	v.Files += report.Files
	v.Chunks += report.Chunks
	v.Bytes += report.Bytes
	v.Read += report.Read
	v.Attested += report.Attested
	v.BySize += report.BySize
	for _, sums := range report.Sums {
		if sums.New {
			v.Learned = append(v.Learned, learned{run, trial, checkpoint, sums.Name})
		}
	}
	for _, f := range report.Findings {
		v.Findings = append(v.Findings, finding{Run: run, Trial: trial, Checkpoint: checkpoint, Finding: f})
	}
}

func logFinding(damage error) finding {
	return finding{Finding: data.Finding{Kind: logDamage, File: "log", Block: -1, Offset: -1, Problem: damage.Error()}}
}

// voidText describes why a message of the log is not an event.
func voidText(v store.LogVoid) string {
	return fmt.Sprintf("message %d on %q is not an event: %s", v.Sequence, v.Subject, v.Why)
}

// addVoids adds findings for the messages that are not events, except those that the
// owner has recorded (with strict, for all of them).
func (v *verified) addVoids(read store.ReadLog) {
	add := func(seq uint64, problem string) {
		v.Findings = append(v.Findings, finding{
			Finding:  data.Finding{Kind: logVoid, File: "log", Block: -1, Offset: -1, Problem: problem},
			Sequence: seq, Until: seq,
		})
	}
	wanted := read.Unrecorded
	if v.strict {
		wanted = read.VoidCount
	}
	for _, void := range read.Voids {
		if void.RecordedSeq == 0 || v.strict {
			add(void.Sequence, voidText(void))
			wanted--
		}
	}
	if wanted > 0 {
		add(0, fmt.Sprintf("%d more messages are not events", wanted))
	}
}

// printVoids lists the messages that the owner has recorded as not being events. The
// others are findings.
func (v *verified) printVoids(w io.Writer) {
	for _, void := range v.Log.Voids {
		if void.RecordedSeq > 0 && !v.strict {
			fmt.Fprintf(w, "log: %s (recorded by event %d)\n", voidText(void), void.RecordedSeq)
		}
	}
	if more := v.Log.VoidCount - len(v.Log.Voids); more > 0 {
		fmt.Fprintf(w, "log: %d more messages are not events\n", more)
	}
}

// verifyPath reads every byte of a checkpoint of another program.
func (a *app) verifyPath(ctx context.Context, path string) error {
	s, err := openPath(ctx, path)
	if err != nil {
		return err
	}
	bar := a.Progress("verify", s.manifest.Layout.Bytes())
	defer bar.Done()
	report, err := store.VerifyForeign(ctx, s.foreign, bar.Set)
	if err != nil {
		return err
	}
	bar.Done()
	out := verifiedPath{
		Path: s.foreign.Path(), Format: s.foreign.Format(), Files: report.Files, Chunks: report.Chunks, Bytes: report.Bytes,
		Unknown: report.Unknown, Findings: append([]data.Finding{}, report.Findings...),
	}
	err = console.Emit(a.Console, out, out.Findings, func(w *tabwriter.Writer, _ bool) {
		for _, f := range out.Findings {
			fmt.Fprintln(w, f)
		}
		fmt.Fprintf(w, "%d files, %d chunks, %s: %d findings\n", out.Files, out.Chunks, bytesize.Text(out.Bytes), len(out.Findings))
		if out.Unknown > 0 {
			fmt.Fprintf(w, "%d chunks were read but not verified: the files have no checksums for them\n", out.Unknown)
		}
	})
	if err == nil && len(out.Findings) > 0 {
		return errFindings
	}
	return err
}
