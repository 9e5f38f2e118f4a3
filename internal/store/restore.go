package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/audit/ledger"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/durable"
	"github.com/ckptstore/ckptstore/internal/store/copier"
	"github.com/ckptstore/ckptstore/projections"
)

// RestoreOptions configure [Restore].
type RestoreOptions struct {
	Backup   string // directory of the backup
	Location string // directory of the new store; absent or empty
	Deep     bool   // read every byte of the new store's checkpoints
	Progress func(done, total int64)
	Logger   *slog.Logger // default: discard

	step func(name string) error // for tests: simulates a crash before each step
}

// Restored is the report of a restore.
type Restored struct {
	Store       string    `json:"store"`
	From        string    `json:"from"`
	Path        string    `json:"path"`
	Sequence    uint64    `json:"sequence"` // of the last event
	Made        time.Time `json:"made"`     // when the backup was made
	Checkpoints int       `json:"checkpoints"`
	copier.Sum
	Outside    []copier.Outside    `json:"outside"`
	Incomplete []copier.Incomplete `json:"incomplete"`
	Verified   bool                `json:"verified"` // every byte was read
}

// Restore makes a store from a backup. Before it writes store.json, which makes the directory a
// store, it checks the following: the log opens and ends where the backup records it; the receipt
// of each checkpoint is that of its event; manifests and indexes are intact, and all files have
// their sizes; with Deep, every chunk has its digest. It reports findings in checkpoints; any
// other finding is an error.
//
// The new store has the identity of the original and continues where the backup ends. The same
// call finishes an interrupted restore.
func Restore(ctx context.Context, o RestoreOptions) (Restored, error) {
	r := &restore{RestoreOptions: o}
	if r.Logger == nil {
		r.Logger = slog.New(slog.DiscardHandler)
	}
	if r.step == nil {
		r.step = func(string) error { return nil }
	}
	err := r.run(ctx)
	if err != nil {
		err = fmt.Errorf("restore %s: %w", o.Backup, err)
	}
	return r.report, err
}

// restore is the state of one call of Restore.
type restore struct {
	RestoreOptions
	dir    string
	mark   copyMark // the backup's mark
	to     *destination
	files  *copier.Checkpoints
	report Restored
}

func (r *restore) run(ctx context.Context) (err error) {
	for _, location := range []string{r.Backup, r.Location} {
		if _, isURL, err := parseLocation(location); err != nil {
			return err
		} else if isURL {
			return fmt.Errorf("%w: %s is a server: a backup is a directory, and becomes the store of another one", ErrLocation, jetlog.Redacted(location))
		}
	}
	if r.Backup, err = filepath.Abs(r.Backup); err != nil {
		return err
	}
	if r.dir, err = filepath.Abs(r.Location); err != nil {
		return err
	}
	if err := apart(r.Backup, r.dir); err != nil {
		return err
	}
	id, err := r.whole()
	if err != nil {
		return err
	}
	release, err := lockExisting(filepath.Join(r.Backup, lockName))
	if errors.Is(err, ErrLocked) {
		return fmt.Errorf("%w: another process has %s open: end it first", ErrLocked, r.Backup)
	}
	if err != nil {
		return err
	}
	defer release()
	mark := copyMark{Product: product, Store: id.Store, From: resolved(r.Backup), Begun: time.Now().UTC()}
	if r.to, err = openDestination(r.dir, restoreName, mark); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.to.close()) }()
	if err := r.step("marked"); err != nil {
		return err
	}
	if err := r.copy(ctx, id); err != nil {
		return err
	}
	if err := r.check(ctx, id); err != nil {
		return err
	}
	// The server has written to the log.
	if err := syncTree(filepath.Join(r.dir, "log")); err != nil {
		return err
	}
	if err := r.step("checked"); err != nil {
		return err
	}
	if err := writeIdentity(r.dir, id); err != nil {
		return err
	}
	// With store.json the mark has no meaning any more.
	return errors.Join(removed(filepath.Join(r.dir, restoreName)), durable.SyncDir(r.dir))
}

// whole checks that the backup was finished and returns its identity.
func (r *restore) whole() (identity, error) {
	m, err := readCopyMark(filepath.Join(r.Backup, backupName))
	if errors.Is(err, os.ErrNotExist) {
		if exists(filepath.Join(r.Backup, "store.json")) {
			return identity{}, fmt.Errorf("%w: %s is a store and no backup: `ckptstore backup DIR --store %s` makes one", ErrLocation, r.Backup, r.Backup)
		}
		return identity{}, fmt.Errorf("%w: there is no backup in %s: it has no %s", ErrNoStore, r.Backup, backupName)
	}
	if err != nil {
		return identity{}, err
	}
	id, err := readIdentity(r.Backup)
	if err != nil {
		return id, err
	}
	if !m.Whole || m.Store != id.Store {
		return id, fmt.Errorf("%w: %s and store.json of %s do not belong together: make another backup", ErrDamaged, backupName, r.Backup)
	}
	r.mark = m
	r.report = Restored{Store: id.Store, From: r.Backup, Path: r.dir, Sequence: m.Sequence, Made: m.Made}
	return id, nil
}

// copy copies everything except store.json.
func (r *restore) copy(ctx context.Context, id identity) error {
	root, err := data.Open(vfs.Default, filepath.Join(r.dir, "data"))
	if err != nil {
		return err
	}
	root.OfStore(id.Store, id.Formerly...)
	r.files = copier.NewCheckpoints(r.Backup, r.dir, root, false, r.Progress)
	from, err := data.Open(vfs.Default, filepath.Join(r.Backup, "data"))
	if err != nil {
		return err
	}
	if r.Progress != nil {
		size, err := copier.Size(filepath.Join(r.Backup, "data"))
		if err != nil {
			return err
		}
		r.files.Expect(size)
	}
	err = r.files.EachTrial(func(refs []checkpoint.Ref) error { return r.trial(ctx, from, refs) })
	if err == nil || errors.Is(err, os.ErrNotExist) {
		err = r.files.SyncDirs()
	}
	if err == nil {
		err = r.step("data copied")
	}
	if err == nil {
		err = os.RemoveAll(filepath.Join(r.dir, "log")) // a server may have changed the files of an earlier call
	}
	for _, name := range []string{"blobs", logsName, "log"} {
		if err == nil {
			err = r.files.Files.Tree(ctx, filepath.Join(r.Backup, name), filepath.Join(r.dir, name))
		}
	}
	if err == nil {
		err = r.files.Files.File(ctx, filepath.Join(r.Backup, endName), filepath.Join(r.dir, endName))
	}
	if err == nil {
		err = ledger.Copy(r.Backup, r.dir, r.report.Sequence)
	}
	return errors.Join(err, durable.SyncDir(r.dir))
}

// trial copies the checkpoints of a trial's directory.
func (r *restore) trial(ctx context.Context, from *data.Root, refs []checkpoint.Ref) error {
	var rows []projections.Checkpoint
	for _, ref := range refs {
		receipt, err := from.Receipt(ctx, ref)
		if err == nil && RefOf(RowOf(receipt)) != ref {
			err = fmt.Errorf("its receipt is that of %s@%s", receipt.Run, receipt.Checkpoint)
		}
		if err != nil {
			r.files.Lacks(ref, ref.String(), err.Error())
			if err := r.files.CopyUnchecked(ctx, ref); err != nil {
				return err
			}
			continue
		}
		rows = append(rows, RowOf(receipt))
	}
	return r.files.Each(ctx, rows, nil)
}

// check opens the log of the copy as an owner would, and checks all receipts against it.
func (r *restore) check(ctx context.Context, id identity) error {
	s, err := closedStoreOf(r.dir, id, Options{Location: r.dir, Logger: r.Logger})
	if err != nil {
		return err
	}
	if err := plainLog(r.dir); err != nil {
		return err
	}
	opened, err := openLog(ctx, s, r.dir, nil)
	defer opened.close()
	if err != nil {
		return damage(err)
	}
	last, err := opened.log.At(ctx, r.mark.Sequence)
	if err != nil {
		return damage(err)
	}
	if end, err := opened.log.Last(ctx); err != nil || end != r.mark.Sequence || last.ID != r.mark.Event {
		return errors.Join(err, fmt.Errorf("%w: the log of the backup ends at event %d, and %s records %d, %s: restore another backup", ErrDamaged, end, backupName, r.mark.Sequence, r.mark.Event))
	}
	receipts, _, err := s.Data.Checkpoints(ctx)
	if err != nil {
		return err
	}
	// The log is read from its beginning to its end.
	slices.SortFunc(receipts, func(a, b checkpoint.Receipt) int { return cmp.Compare(a.Sequence, b.Sequence) })
	for _, x := range receipts {
		if x.Store != s.ID {
			continue
		}
		if err := compareReceipt(ctx, s, opened.log, x, r.mark.Sequence); err != nil {
			return err
		}
	}
	n, err := copier.Count(s.dataDir())
	if err != nil {
		return err
	}
	r.report.Outside, r.report.Incomplete = r.files.Findings()
	r.report.Checkpoints, r.report.Sum = n, r.files.Files.Sum()
	if n != r.mark.Checkpoints {
		return fmt.Errorf("%w: the backup has %d checkpoints and %s records %d: restore another backup", ErrDamaged, n, backupName, r.mark.Checkpoints)
	}
	if !r.Deep {
		return nil
	}
	r.report.Verified = true
	return r.deep(ctx, s, receipts)
}

// deep reads every byte.
func (r *restore) deep(ctx context.Context, s *Store, receipts []checkpoint.Receipt) error {
	reports, err := VerifyReceipts(ctx, s.Data, receipts, VerifyOptions{})
	if err != nil {
		return err
	}
	for i, report := range reports {
		if !report.Clean() {
			r.files.Lacks(receipts[i].Ref, receipts[i].Run+"@"+receipts[i].Checkpoint, report.Findings[0].String())
		}
	}
	_, r.report.Incomplete = r.files.Findings()
	return nil
}
