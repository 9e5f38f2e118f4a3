package store

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// ErrNothing says that there is nothing to recover.
var ErrNothing = problem.New(problem.NotFound, "nothing to recover")

// RecoverOptions say what to recover.
type RecoverOptions struct {
	// Location is the directory of the store: the damaged one, or with From
	// that of the new one.
	Location string
	// From is a directory with the data/ of a damaged store, which is only
	// read; its files are linked. Empty: the data stays where it is.
	From string
	// Of are the identities of the stores whose receipts count. Empty: that of
	// store.json, and those that it had before, or without that file the one
	// that all receipts name.
	Of      []string
	Command []string     // for the log
	Logger  *slog.Logger // default: discard

	step func(name string) error // of tests: a crash before each step
}

// Recovered is the report of a recovery.
type Recovered struct {
	Store       string                `json:"store"`    // the new identity
	Formerly    []string              `json:"formerly"` // whose receipts were believed, the newest first
	Location    string                `json:"location"`
	From        string                `json:"from,omitempty"`
	Aside       string                `json:"aside,omitempty"` // where the old log is now
	Sequence    uint64                `json:"sequence"`        // at which the new log ends
	Checkpoints []RecoveredCheckpoint `json:"checkpoints"`     // in the order of their commits
	Rejected    []Rejected            `json:"rejected"`
	Unknown     []string              `json:"unknown"` // what only the old log knew
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

// unknown is what no receipt says.
var unknown = []string{
	"metrics, and so what @best would choose",
	"the jobs, attempts and workers of before, and why they ended",
	"which checkpoints were superseded, and what each continued: in each trial they are one line now, in the order of their commits",
	"the configuration of trials, and what they were forked from",
	"pins and tags",
	"saves that were aborted, and the names of deleted checkpoints",
	"recorded digests of files that were imported in place: `ckptstore verify` records them again",
}

// Recover makes a store of the receipts of one whose log is damaged or gone: a
// new identity and a log in which every checkpoint that its files prove is
// committed again, under its own run, trial and ID. In the directory itself
// the old log is set aside and no file of data/ changes. Cut at any moment,
// nothing is lost, nobody opens the directory, and the same call finishes it.
//
// A store that opens is [ErrExists], here and in From; one that somebody has
// open is [ErrLocked]. Without any checkpoint that could be
// recovered the error is [ErrNothing], and the report says why; nothing was
// changed then.
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

// recovery is one call of Recover.
type recovery struct {
	RecoverOptions
	dir, data string // of the store; where the checkpoints are
	report    Recovered
	newest    map[string]int // attempts, by trial
}

func (r *recovery) run(ctx context.Context) error {
	if _, err := r.inside().Stat(r.data); err != nil {
		return fmt.Errorf("%w in %s: %w: its checkpoints would be in data/", ErrNoStore, filepath.Dir(r.data), err)
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
		return fmt.Errorf("%w: another process holds %s: end it first", ErrLocked, filepath.Join(r.dir, lockName))
	}
	defer func() { _ = lock.Close() }()
	if j, begun, err = readJournal(r.dir); err != nil {
		return err
	}
	if begun && j.From != r.From {
		return fmt.Errorf("a recovery from %q into this directory was cut: finish it with the same --from, or delete the directory", j.From)
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
	return r.finish()
}

// inside is the directory that has the checkpoints.
func (r *recovery) inside() beneath.Root { return beneath.At(filepath.Dir(r.data)) }

// build makes the new log, and what describes it durable. It may be repeated.
func (r *recovery) build(ctx context.Context) error {
	if err := r.believed(ctx); err != nil {
		return err
	}
	found, err := r.examine(ctx)
	if err != nil {
		return err
	}
	if len(found) == 0 {
		return fmt.Errorf("%w: of %d directories in %s none is a checkpoint that its receipt, manifest and indexes prove", ErrNothing, len(r.report.Rejected), r.data)
	}
	r.report.Store, r.report.Location, r.report.From, r.report.Unknown = NewID(), r.dir, r.From, unknown
	if r.From != "" {
		if err := r.link(ctx, found); err != nil {
			return err
		}
	} else if exists(filepath.Join(r.dir, "log")) {
		r.report.Aside = nextIncident(r.dir, len(incidents(r.dir)))
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

// link links the checkpoints into the new directory. What says that the
// directory is a recovery's comes first.
func (r *recovery) link(ctx context.Context, found []data.Examined) error {
	if err := writeJournal(r.dir, journal{From: r.From}); err != nil {
		return err
	}
	from, err := data.Open(vfs.Default, r.data)
	if err != nil {
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
		if err := from.LinkTo(ctx, x.Ref, to); err != nil {
			return fmt.Errorf("%w: links need one filesystem and the rights to the files: choose a --store on that of %s, or recover in place without --from", err, r.data)
		}
	}
	return nil
}

// believed finds out whose receipts count.
func (r *recovery) believed(ctx context.Context) error {
	if len(r.Of) > 0 {
		r.report.Formerly = r.Of
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
	data, err := data.Open(vfs.Default, r.data)
	if err != nil {
		return err
	}
	receipts, _, err := data.Checkpoints(ctx)
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
