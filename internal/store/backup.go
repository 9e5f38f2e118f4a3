package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/audit/ledger"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/durable"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store/copier"
	"github.com/ckptstore/ckptstore/projections"
)

// BackupOptions configure [Store.Backup].
type BackupOptions struct {
	Link     bool                    // hard-link the files of checkpoints instead of copying them
	Progress func(done, total int64) // in bytes; may be nil. Calls do not overlap.

	step func(name string) error // for tests: simulates a crash before each step
}

// Backed is the report of a backup.
type Backed struct {
	Store       string    `json:"store"`
	From        string    `json:"from"`
	Path        string    `json:"path"`
	Sequence    uint64    `json:"sequence"` // of the last event in the backup
	Event       string    `json:"event"`
	Made        time.Time `json:"made"`
	Passes      int       `json:"passes"` // over checkpoints committed meanwhile
	Checkpoints int       `json:"checkpoints"`
	copier.Sum
	Outside    []copier.Outside    `json:"outside"`    // not contained
	Incomplete []copier.Incomplete `json:"incomplete"` // as in the store
}

// Backup copies a store into the directory dir while other processes use the store. The
// copy is the store as of one event, the cut: its log has every event up to the cut and
// none after it, and every checkpoint that is committed and not deleted at the cut has
// all its files. It contains everything acknowledged before the call. The order is:
//
//  1. backup.json, which marks dir as being written
//  2. the committed checkpoints
//  3. the log's end becomes the cut; checkpoints committed since are copied, deleted
//     ones are removed. If files vanish meanwhile, this step is repeated: the decision
//     to delete them must be before the cut.
//  4. blobs, the workers' output, the log up to the cut
//  5. store.json
//
// Each step is durable before the next. An interrupted backup is not a store, and the
// same call finishes it. The copy has the identity of the store, but is read-only:
// [Restore] makes a store of it.
//
// Backup reports checkpoints that are incomplete in the store; the copy has them as
// incomplete too.
func (s *Store) Backup(ctx context.Context, dir string, o BackupOptions) (Backed, error) {
	b := &backup{store: s, opts: o}
	if o.step == nil {
		b.opts.step = func(string) error { return nil }
	}
	err := b.run(ctx, dir)
	if err != nil {
		err = fmt.Errorf("back up %s to %s: %w", s.Location, dir, err)
	}
	return b.report, err
}

// backup is the state of one call of Backup.
type backup struct {
	store  *Store
	opts   BackupOptions
	to     *destination
	files  *copier.Checkpoints
	report Backed
}

func (b *backup) run(ctx context.Context, dir string) (err error) {
	s := b.store
	if s.opts.dir != "" {
		return fmt.Errorf("%w: the log of %s is in several copies, and none can be backed up: `ckptstore export` writes a checkpoint elsewhere", ErrLocation, s.opts.dir)
	}
	if IsURL(s.opts.Location) {
		return fmt.Errorf("%w: %s is a server: run this with the directory of its owner, or back up the server's stream and the data directory by themselves", ErrLocation, jetlog.Redacted(s.Location))
	}
	if s.backup != nil {
		return s.backup
	}
	if dir, err = filepath.Abs(dir); err != nil {
		return err
	}
	if err := apart(s.Location, dir); err != nil {
		return err
	}
	id, err := readIdentity(s.Location)
	if err != nil {
		return err
	}
	mark := copyMark{Product: product, Store: s.ID, From: resolved(s.Location), Begun: time.Now().UTC()}
	if b.to, err = openDestination(dir, backupName, mark); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.to.close()) }()
	if err := b.opts.step("marked"); err != nil {
		return err
	}
	b.report = Backed{Store: s.ID, From: s.Location, Path: dir}
	if b.files, err = b.checkpointCopier(); err != nil {
		return err
	}
	cut, err := b.checkpoints(ctx)
	if err != nil {
		return err
	}
	if err := b.rest(ctx); err != nil {
		return err
	}
	end, err := b.writeLog(ctx, cut)
	if err == nil {
		err = writeEnd(dir, s.ID, end)
	}
	if err == nil {
		err = ledger.Copy(s.Location, dir, cut)
	}
	if err == nil {
		err = b.opts.step("the end is noted")
	}
	if err != nil {
		return err
	}
	b.sum(cut, end.ID)
	return b.finish(id)
}

// checkpointCopier returns a copier for the data of the store.
func (b *backup) checkpointCopier() (*copier.Checkpoints, error) {
	s := b.store
	if s.InBucket() {
		return nil, fmt.Errorf("backup: %w: the checkpoints are in %s, which keeps them: copy the directory of the log while no process has the store open, and let the bucket keep versions or copies", errors.ErrUnsupported, s.Data.Dir())
	}
	to, err := data.Open(vfs.Default, filepath.Join(b.to.dir, "data"))
	if err != nil {
		return nil, err
	}
	to.OfStore(s.ID, s.formerly...)
	return copier.NewCheckpoints(s.Location, b.to.dir, to, b.opts.Link, b.opts.Progress), nil
}

// rest copies everything except the log and the checkpoints. An event names only blobs
// that are durable already, so the blobs of events up to the cut exist. The workers'
// output is still being written: it is never linked.
func (b *backup) rest(ctx context.Context) error {
	dir := b.store.Location
	if err := b.files.Files.Tree(ctx, filepath.Join(dir, "blobs"), filepath.Join(b.to.dir, "blobs")); err != nil {
		return err
	}
	if err := copier.New(dir, b.to.dir, false, nil).Tree(ctx, filepath.Join(dir, logsName), filepath.Join(b.to.dir, logsName)); err != nil && !errors.Is(err, copier.ErrVanished) {
		return err
	}
	return b.opts.step("the rest is copied")
}

// logsName is the directory of the workers' output: see package internal/launch/logs.
const logsName = "logs"

// sum completes the report.
func (b *backup) sum(cut uint64, event string) {
	r := &b.report
	r.Sequence, r.Event, r.Made = cut, event, time.Now().UTC()
	r.Sum = b.files.Files.Sum()
	r.Outside, r.Incomplete = b.files.Findings()
}

// finish makes the directory a backup.
func (b *backup) finish(id identity) (err error) {
	if b.report.Checkpoints, err = copier.Count(filepath.Join(b.to.dir, "data")); err != nil {
		return err
	}
	m := b.to.mark
	m.Whole, m.Made, m.Sequence, m.Event = true, b.report.Made, b.report.Sequence, b.report.Event
	m.Checkpoints, m.Incomplete = b.report.Checkpoints, len(b.report.Incomplete)
	if err := writeCopyMark(filepath.Join(b.to.dir, backupName), m); err != nil {
		return err
	}
	if err := b.opts.step("the mark is whole"); err != nil {
		return err
	}
	return writeIdentity(b.to.dir, id)
}

// writeIdentity makes a directory a copy of a store. The copy has its own runtime
// directory, so that both can be open on one machine.
func writeIdentity(dir string, id identity) error {
	id.Copy, id.Owner = NewID(), thisUser()
	text, err := json.MarshalIndent(id, "", "  ")
	if err != nil {
		return err
	}
	return errors.Join(durable.Write(filepath.Join(dir, "store.json"), append(text, '\n')), durable.SyncDir(filepath.Dir(dir)))
}

// maxPasses bounds the passes of a backup over checkpoints committed meanwhile. Each
// pass copies what was committed during the one before.
const maxPasses = 100

// checkpoints copies the committed checkpoints and returns the cut.
func (b *backup) checkpoints(ctx context.Context) (cut uint64, err error) {
	s := b.store
	begun, err := s.Log.Last(ctx)
	if err != nil {
		return 0, err
	}
	runs, err := query.Ask(ctx, s.Views(), query.Runs, query.Params{})
	if err != nil {
		return 0, err
	}
	if err := b.expect(ctx, runs); err != nil {
		return 0, err
	}
	for _, r := range runs {
		rows, err := b.rows(ctx, r.Name)
		if err != nil {
			return 0, err
		}
		rows = pick(rows, func(c projections.Checkpoint) bool {
			return c.State == projections.Committed && c.CommittedSeq <= begun
		})
		if err := b.clear(r.Name, rows); err != nil {
			return 0, err
		}
		if err := b.files.Each(ctx, rows, b.receipt); err != nil {
			return 0, err
		}
		if err := b.opts.step("copied run " + r.Name); err != nil {
			return 0, err
		}
	}
	for cut = begun; b.report.Passes < maxPasses; {
		to, err := s.Log.Last(ctx)
		if err != nil {
			return 0, err
		}
		if err := b.opts.step("looked"); err != nil {
			return 0, err
		}
		again, err := b.since(ctx, cut, to)
		if err != nil {
			return 0, err
		}
		cut = to
		b.report.Passes++
		if err := b.opts.step("pass"); err != nil {
			return 0, err
		}
		if !again {
			return cut, b.files.SyncDirs()
		}
	}
	return 0, fmt.Errorf("checkpoints were deleted faster than they were copied, %d times: run the backup again when fewer are deleted", maxPasses)
}

func (b *backup) rows(ctx context.Context, run string) ([]projections.Checkpoint, error) {
	return query.Ask(ctx, b.store.Views(), query.Checkpoints, query.Params{Run: run, All: true})
}

// expect computes the number of bytes to copy, if progress is reported.
func (b *backup) expect(ctx context.Context, runs []projections.Run) error {
	if b.opts.Progress == nil {
		return nil
	}
	for _, r := range runs {
		rows, err := b.rows(ctx, r.Name)
		if err != nil {
			return err
		}
		for _, c := range rows {
			if c.State == projections.Committed {
				b.files.Expect(c.Bytes)
			}
		}
	}
	return nil
}

// since brings the copy from the state as of one event to that of a later one. It
// reports true if that state cannot be copied any more because files were removed since.
func (b *backup) since(ctx context.Context, from, to uint64) (again bool, err error) {
	changed := map[string]map[checkpoint.Ref]bool{} // by run
	if from < to {
		for e, err := range b.store.Log.Read(ctx, from+1, to) {
			if err != nil {
				return false, err
			}
			id, gone, err := touched(e)
			if err != nil {
				return false, err
			}
			if id == "" {
				continue
			}
			ref := checkpoint.RefOf(e.Scope.Run, e.Scope.Trial, id)
			if gone {
				if err := b.files.Remove(ref); err != nil {
					return false, err
				}
				continue
			}
			if changed[e.Scope.Run] == nil {
				changed[e.Scope.Run] = map[checkpoint.Ref]bool{}
			}
			changed[e.Scope.Run][ref] = true
		}
	}
	lacked := b.files.Lacked()
	for run, refs := range changed {
		rows, err := b.rows(ctx, run)
		if err != nil {
			return false, err
		}
		rows = pick(rows, func(c projections.Checkpoint) bool { return refs[RefOf(c)] })
		for _, c := range rows {
			again = again || c.State == projections.Deleted && c.DeletedSeq > to
		}
		rows = pick(rows, func(c projections.Checkpoint) bool { return c.State == projections.Committed })
		if err := b.files.Each(ctx, rows, b.receipt); err != nil {
			return false, err
		}
	}
	return again || b.files.Lacked() > lacked, nil
}

// touched returns the checkpoint whose files an event affects, and whether the event
// removes them.
func touched(e events.Recorded) (id string, gone bool, err error) {
	switch e.Kind {
	case events.CheckpointCommitted{}.Kind(), events.CheckpointAttached{}.Kind(), events.CheckpointDeleted{}.Kind():
	default:
		return "", false, nil
	}
	body, err := e.Body()
	if err != nil {
		return "", false, fmt.Errorf("event %d: %w", e.Sequence, err)
	}
	switch body := body.(type) {
	case *events.CheckpointCommitted:
		return body.Checkpoint, false, nil
	case *events.CheckpointAttached:
		return body.Checkpoint, false, nil
	case *events.CheckpointDeleted:
		return body.Checkpoint, true, nil
	case *events.Void:
		return "", false, nil
	}
	return "", false, fmt.Errorf("event %d: %s has a body of type %T", e.Sequence, e.Kind, body)
}

// clear removes a run's checkpoints that an earlier, interrupted call copied and that
// were deleted since.
func (b *backup) clear(run string, live []projections.Checkpoint) error {
	refs := map[checkpoint.Ref]bool{}
	for _, c := range live {
		refs[RefOf(c)] = true
	}
	return b.files.RemoveOthers(run, refs)
}

// receipt writes the missing receipt of a copied checkpoint: a crash has left it out,
// or it is being written.
func (b *backup) receipt(ctx context.Context, c projections.Checkpoint) error {
	r, err := receiptOf(ctx, b.store.ID, b.store.Log, c)
	if err != nil {
		return err
	}
	return b.files.Data.WriteReceipt(ctx, RefOf(c), r)
}

func pick(rows []projections.Checkpoint, is func(projections.Checkpoint) bool) (some []projections.Checkpoint) {
	for _, c := range rows {
		if is(c) {
			some = append(some, c)
		}
	}
	return some
}
