package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/ckptstore/ckptstore/internal/audit/ledger"
	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/claim"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/durable"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/share"
	"github.com/ckptstore/ckptstore/internal/store/place"
)

// ErrNothing reports that there is nothing to recover.
var ErrNothing = problem.New(problem.NotFound, "nothing to recover")

// RecoverOptions configure [Recover].
type RecoverOptions struct {
	// Location is the directory of the store: the damaged store or, with From, the new
	// one.
	Location string
	// From is a directory with the data/ of a damaged store. It is only read; its files
	// are linked. Or it is the URL of the bucket with the data, which stays there and is the
	// new store's from then on. Empty: the data stays where it is.
	From string
	// Of lists the identities of the stores whose receipts count. Empty: the identity in
	// store.json and its earlier ones or, without that file, the identity that all
	// receipts name.
	Of      []string
	Command []string     // for the log
	Logger  *slog.Logger // default: discard

	step func(name string) error // for tests: simulates a crash before each step
}

// Recovered is the report of a recovery.
type Recovered struct {
	Store       string                `json:"store"`    // the new identity
	Formerly    []string              `json:"formerly"` // identities whose receipts counted, the newest first
	Location    string                `json:"location"`
	From        string                `json:"from,omitempty"`
	Aside       string                `json:"aside,omitempty"`    // where the old log is now
	Evidence    string                `json:"evidence,omitempty"` // where the tamper evidence of the old log is now: the new one has none
	Sequence    uint64                `json:"sequence"`           // at which the new log ends
	Checkpoints []RecoveredCheckpoint `json:"checkpoints"`        // in the order of their commits
	Rejected    []Rejected            `json:"rejected"`
	Unknown     []string              `json:"unknown"` // lost with the old log
}

// RecoveredCheckpoint is a checkpoint that is committed in the new log.
type RecoveredCheckpoint struct {
	Run         string    `json:"run"`
	Trial       string    `json:"trial"`
	Checkpoint  string    `json:"checkpoint"`
	Step        int64     `json:"step"`
	Attempt     int       `json:"attempt"`
	Bytes       int64     `json:"bytes"`
	Manifest    string    `json:"manifest"`
	CommittedAt time.Time `json:"committed_at"`
	Formerly    string    `json:"formerly"` // the store of its receipt
	Was         uint64    `json:"was"`      // the sequence in that store's log
}

// Rejected is a directory that did not become a checkpoint.
type Rejected struct {
	Path   string `json:"path"`
	Kind   string `json:"kind"` // uncommitted, damaged or foreign
	Reason string `json:"reason"`
}

// unknown lists what receipts do not record.
var unknown = []string{
	"metrics, and so the choice of @best",
	"earlier jobs, attempts and workers, and why they ended",
	"which checkpoints were superseded, and what each continued: each trial is one line now, in the order of the commits",
	"the configuration of trials, and what they were forked from",
	"pins and tags",
	"saves that were aborted, and the names of deleted checkpoints",
	"recorded digests of files that were imported in place: `ckptstore verify` records them again",
}

// Recover makes a store from the receipts of a store whose log is damaged or missing. The new
// store has a new identity and a log that commits every checkpoint that its files prove, under
// the same run, trial and ID. In place, Recover sets the old log aside and changes no file of
// data/. An interrupted recovery loses nothing: no process opens the directory, and the same
// call finishes it.
//
// It returns [ErrExists] if a store here or in From opens, and [ErrLocked] if another process
// has one open. If no checkpoint can be recovered, it returns [ErrNothing] and changes nothing;
// the report names the reasons.
func Recover(ctx context.Context, o RecoverOptions) (Recovered, error) {
	r := &recovery{RecoverOptions: o}
	if r.Logger == nil {
		r.Logger = slog.New(slog.DiscardHandler)
	}
	if r.step == nil {
		r.step = func(string) error { return nil }
	}
	if err := r.places(); err != nil {
		return r.report, fmt.Errorf("recover: %w", err)
	}
	err := r.run(ctx)
	if err != nil {
		err = fmt.Errorf("recover %s: %w", r.dir, err)
	}
	return r.report, err
}

// recovery is the state of one call of Recover.
type recovery struct {
	RecoverOptions
	dir, data string // of the store; where the checkpoints are
	bucket    string // URL of the bucket that has the checkpoints; empty: they are in data
	root      *data.Root
	marked    identity // in the bucket
	report    Recovered
	newest    map[string]int // attempts, by trial
}

func (r *recovery) run(ctx context.Context) error {
	if err := r.open(ctx); err != nil {
		return err
	}
	if r.From != "" {
		if err := makeOwn(r.dir); err != nil {
			return err
		}
	}
	j, begun, err := readJournal(r.dir)
	if err == nil && !begun {
		err = r.mayBegin(ctx)
	}
	if err != nil {
		return err
	}
	lock, err := tryLock(r.dir)
	if err != nil {
		return err
	}
	if lock == nil {
		return fmt.Errorf("%w: another process holds %s: end it first; `ckptstore agent stop --wait` ends an agent", ErrLocked, filepath.Join(r.dir, lockName))
	}
	defer func() { _ = lock.Close() }()
	if j, begun, err = readJournal(r.dir); err != nil {
		return err
	}
	if begun && j.From != r.From {
		return fmt.Errorf("a recovery from %q into this directory is unfinished: finish it with the same --from, or delete the directory", j.From)
	}
	if !j.Ready {
		if err := r.build(ctx); err != nil {
			return err
		}
		if j, _, err = readJournal(r.dir); err != nil {
			return err
		}
	}
	r.report = j.Report
	return r.finish(ctx)
}

// open opens the data.
func (r *recovery) open(ctx context.Context) (err error) {
	if r.bucket == "" {
		if _, err := r.inside().Stat(r.data); err != nil {
			return fmt.Errorf("%w in %s: %w: its checkpoints would be in data/", ErrNoStore, filepath.Dir(r.data), err)
		}
		r.root, err = data.Open(vfs.Default, r.data)
		return err
	}
	var bucket *place.Bucket
	if r.root, _, bucket, err = openPlace("", r.bucket, r.Logger); err != nil {
		return err
	}
	r.bucket, r.data = bucket.Location(), r.root.Dir()
	mark, err := bucket.Mark(ctx)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w in %s: there is no %s", ErrNoStore, r.bucket, place.MarkName)
	}
	if err != nil {
		return err
	}
	if err := json.Unmarshal(mark, &r.marked); err != nil || r.marked.Product != product {
		return fmt.Errorf("%w: the %s in %s does not identify a store", ErrDamaged, place.MarkName, r.bucket)
	}
	return nil
}

// inside returns the directory that holds the checkpoints, as a root.
func (r *recovery) inside() beneath.Root { return beneath.At(filepath.Dir(r.data)) }

// build makes the new log and records durably what it did. It may be repeated.
func (r *recovery) build(ctx context.Context) error {
	if err := r.believed(ctx); err != nil {
		return err
	}
	found, err := r.examine(ctx)
	if err != nil {
		return err
	}
	if len(found) == 0 {
		return fmt.Errorf("%w: none of %d directories in %s is a checkpoint with a valid receipt, manifest and indexes", ErrNothing, len(r.report.Rejected), r.data)
	}
	r.report.Store, r.report.Location, r.report.From, r.report.Unknown = NewID(), r.dir, r.From, unknown
	if r.From != "" && r.bucket != "" {
		if err := writeJournal(r.dir, journal{From: r.From}); err != nil {
			return err
		}
	} else if r.From != "" {
		if err := r.link(ctx, found); err != nil {
			return err
		}
	} else if exists(filepath.Join(r.dir, "log")) {
		r.report.Aside = nextIncident(r.dir, len(incidents(r.dir)))
	}
	if name := "audit." + r.report.Formerly[0]; exists(filepath.Join(r.dir, "audit")) {
		r.report.Evidence = filepath.Join(r.dir, name)
	} else if old := filepath.Join(r.From, "audit"); r.leaves() && exists(old) {
		r.report.Evidence = old
	}
	temp := filepath.Join(r.dir, recoverTemp)
	err = errors.Join(os.RemoveAll(temp), os.Mkdir(temp, 0o700))
	if err == nil {
		err = r.step("build the log")
	}
	if err == nil {
		err = r.writeLog(ctx, filepath.Join(temp, "log"))
	}
	if err == nil {
		err = syncTree(temp)
	}
	if err == nil {
		err = r.step("the log is built")
	}
	if err != nil {
		return err
	}
	return writeJournal(r.dir, journal{Ready: true, From: r.From, Report: r.report})
}

// link links the checkpoints into the new directory, after the file that marks the directory as
// a recovery's.
func (r *recovery) link(ctx context.Context, found []data.Examined) error {
	if err := writeJournal(r.dir, journal{From: r.From}); err != nil {
		return err
	}
	to, err := data.Open(vfs.Default, filepath.Join(r.dir, "data"))
	if err != nil {
		return err
	}
	for _, x := range found {
		if err := r.step("link " + x.Ref.String()); err != nil {
			return err
		}
		if err := r.root.LinkTo(ctx, x.Ref, to); err != nil {
			return fmt.Errorf("%w: links need one filesystem and the rights to the files: choose a --store on that of %s, or recover in place without --from", err, r.data)
		}
	}
	return nil
}

// believed determines whose receipts count.
func (r *recovery) believed(ctx context.Context) error {
	if len(r.Of) > 0 {
		r.report.Formerly = r.Of
		return nil
	}
	if r.bucket != "" {
		r.report.Formerly = append([]string{r.marked.Store}, r.marked.Formerly...)
		return nil
	}
	id, err := identityIn(filepath.Dir(r.data))
	switch {
	case err == nil:
		r.report.Formerly = append([]string{id.Store}, id.Formerly...)
		return nil
	case !errors.Is(err, ErrNoStore) && !errors.Is(err, ErrDamaged):
		return err
	}
	receipts, _, err := r.root.Checkpoints(ctx)
	if err != nil {
		return err
	}
	for _, x := range receipts {
		if !slices.Contains(r.report.Formerly, x.Store) {
			r.report.Formerly = append(r.report.Formerly, x.Store)
		}
	}
	if len(r.report.Formerly) > 1 {
		return fmt.Errorf("%w: store.json is gone and the receipts are those of %d stores, %s: name the one with --of, or several, the newest first",
			ErrDamaged, len(r.report.Formerly), strings.Join(r.report.Formerly, ", "))
	}
	return nil
}

// A recovery builds the new log under recoverTemp and records the result in recoverName. From
// then on it can only be finished, by any process that runs it again:
//
//	recover.json   {ready, the report}; the last to go
//	.tmp-recover/  log/, until it is renamed to STORE/log
//
// The old log becomes STORE/log.damaged, or log.damaged-2 and so on.
const (
	recoverName = "recover.json"
	recoverTemp = durable.TempPrefix + "recover"
)

// journal is recover.json.
type journal struct {
	Ready  bool      `json:"ready"` // the new log is complete, the rest is renames
	From   string    `json:"from"`
	Report Recovered `json:"report"`
}

// leaves reports whether the lost store is another directory, which stays as it is.
func (r *recovery) leaves() bool { return r.From != "" && r.bucket == "" }

// finish puts the new log in place. Every step may have been done before.
func (r *recovery) finish(ctx context.Context) error {
	built, log := filepath.Join(r.dir, recoverTemp, "log"), filepath.Join(r.dir, "log")
	id := identity{
		Product: product, Store: r.report.Store, Format: Format, Created: time.Now().UTC(),
		Formerly: r.report.Formerly, Recovered: r.report.Sequence, Data: r.bucket, Owner: ownerAfter(r.dir),
	}
	text, err := json.MarshalIndent(id, "", "  ")
	if err != nil {
		return err
	}
	root := beneath.At(r.dir)
	sync := func() error { return durable.SyncDir(r.dir) }
	for _, step := range []struct {
		name string
		do   func() error
	}{
		{"remove the views", func() error {
			var errs []error
			for _, name := range []string{"views", readName, endName, cardName, claim.Name, claim.BeatName, copyName} {
				errs = append(errs, os.RemoveAll(filepath.Join(r.dir, name)))
			}
			return errors.Join(errs...)
		}},
		{"set the log aside", func() error {
			if r.report.Aside == "" || exists(r.report.Aside) || !exists(built) {
				return nil
			}
			return os.Rename(log, r.report.Aside)
		}},
		{"set the audit aside", func() error { // it is of the old log
			_, err := ledger.SetAside(r.dir, r.report.Formerly[0])
			if err == nil && r.leaves() {
				_, err = ledger.Quote(r.From, r.dir, r.report.Formerly[0])
			}
			return err
		}},
		{"sync", sync},
		{"place the log", func() error {
			if !exists(built) {
				return nil
			}
			return os.Rename(built, log)
		}},
		{"make directories", func() error {
			return errors.Join(root.MkdirAll(filepath.Join(r.dir, "data"), 0o700), root.MkdirAll(filepath.Join(r.dir, "blobs"), 0o700),
				share.Dirs(r.dir, log), share.Tree(log, nil), sync())
		}},
		{"mark the bucket", func() error {
			if r.bucket == "" {
				return nil
			}
			bucket, err := place.Open(r.bucket, r.Logger)
			if err != nil {
				return err
			}
			return bucket.TakeOver(ctx, append(text, '\n'))
		}},
		{"write the identity", func() error { return durable.Write(filepath.Join(r.dir, "store.json"), append(text, '\n')) }},
		{"remove the temporary log", func() error { return errors.Join(os.RemoveAll(filepath.Join(r.dir, recoverTemp)), sync()) }},
		{"remove the journal", func() error { return errors.Join(removed(filepath.Join(r.dir, recoverName)), sync()) }},
	} {
		err := r.step(step.name)
		if err == nil {
			err = step.do()
		}
		if err != nil {
			return fmt.Errorf("%s: %w", step.name, err)
		}
	}
	return durable.SyncDir(filepath.Dir(r.dir))
}

func readJournal(dir string) (j journal, found bool, err error) {
	text, err := readFile(filepath.Join(dir, recoverName))
	if errors.Is(err, os.ErrNotExist) {
		return j, false, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &j)
	}
	return j, err == nil, err
}

func writeJournal(dir string, j journal) error {
	text, err := json.MarshalIndent(j, "", "  ")
	if err != nil {
		return err
	}
	return durable.Write(filepath.Join(dir, recoverName), append(text, '\n'))
}
