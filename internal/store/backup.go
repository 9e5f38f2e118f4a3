package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/durable"
)

// BackupOptions say how to back up.
type BackupOptions struct {
	Link     bool                    // hard-link the files of checkpoints instead of copying them
	Progress func(done, total int64) // of bytes; nil: nobody is told. Calls do not overlap.

	step func(name string) error // of tests: a crash before each step
}

// Backed is the report of a backup.
type Backed struct {
	Store       string    `json:"store"`
	From        string    `json:"from"`
	Path        string    `json:"path"`
	Sequence    uint64    `json:"sequence"` // of the last event: what came later is not contained
	Event       string    `json:"event"`
	Made        time.Time `json:"made"`
	Passes      int       `json:"passes"` // over what was committed meanwhile
	Checkpoints int       `json:"checkpoints"`
	copySum
	Outside    []OutsideFiles `json:"outside"`    // not contained
	Incomplete []Incomplete   `json:"incomplete"` // as in the store
}

// OutsideFiles are those of other programs that a checkpoint is read from: a copy of
// a store does not have them.
type OutsideFiles struct {
	Checkpoint string   `json:"checkpoint"`
	Files      []string `json:"files"`
}

// Incomplete is a committed checkpoint that is not whole.
type Incomplete struct {
	Checkpoint string `json:"checkpoint"`
	Problem    string `json:"problem"`
}

// Backup makes a copy of a store in the directory dir, while others use the store. The
// copy is the store as of one event, the cut: its log has every event up to that and
// none after, and every checkpoint that is committed and not deleted there has all its
// files. All that was acknowledged before the call is in it. The order is:
//
//  1. backup.json, which says that dir is being written
//  2. the checkpoints that are committed
//  3. the log's end is the cut; the checkpoints that were committed since are copied,
//     those that were deleted are removed. Again, if files vanished meanwhile: the
//     decision to delete them must be before the cut.
//  4. blobs, the workers' output, the log up to the cut
//  5. store.json
//
// Each is durable before the next. When it was cut at any moment, dir is no store, and
// the same call finishes it. The copy has the identity of the store, but is only read:
// [Restore] makes a store of it.
//
// A checkpoint that is not whole in the store is not whole in the copy, and reported.
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

// backup is one call of Backup.
type backup struct {
	store  *Store
	opts   BackupOptions
	to     *destination
	copier *copier
	files  *checkpointCopier
	report Backed
}

func (b *backup) run(ctx context.Context, dir string) (err error) {
	s := b.store
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
	if b.files, err = b.newCheckpointCopier(s); err != nil {
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
		err = b.opts.step("the end is noted")
	}
	if err != nil {
		return err
	}
	b.sum(cut, end.ID)
	return b.finish(id)
}

// newCheckpointCopier is for the data of s; it sets the backup's copier too.
func (b *backup) newCheckpointCopier(s *Store) (*checkpointCopier, error) {
	to, err := data.Open(vfs.Default, filepath.Join(b.to.dir, "data"))
	if err != nil {
		return nil, err
	}
	to.OfStore(s.ID, s.formerly...)
	f := &checkpointCopier{from: s.DataDir, data: to, lacking: map[checkpoint.Ref]Incomplete{}, outside: map[checkpoint.Ref]OutsideFiles{}}
	b.copier = newCopier(s.Location, b.to.dir, b.opts.Link, f.progress(b.opts.Progress))
	f.copier = b.copier
	return f, nil
}

// rest copies what is neither log nor checkpoint. An event names a blob that is durable
// already, so those up to the cut are there. The workers' output is still written to:
// it is never linked.
func (b *backup) rest(ctx context.Context) error {
	dir := b.store.Location
	if err := b.copier.tree(ctx, filepath.Join(dir, "blobs"), filepath.Join(b.to.dir, "blobs")); err != nil {
		return err
	}
	if err := newCopier(dir, b.to.dir, false, nil).tree(ctx, filepath.Join(dir, logsName), filepath.Join(b.to.dir, logsName)); err != nil && !errors.Is(err, errVanished) {
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
	r.copySum = b.copier.sum
	r.Outside, r.Incomplete = b.files.findings()
}

// finish makes the directory a backup.
func (b *backup) finish(id identity) (err error) {
	if b.report.Checkpoints, err = countCheckpoints(filepath.Join(b.to.dir, "data")); err != nil {
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

// writeIdentity makes a directory a copy of a store. It has another runtime directory
// than the store, so that both can be open on one machine.
func writeIdentity(dir string, id identity) error {
	id.Copy, id.Owner = NewID(), thisUser()
	text, err := json.MarshalIndent(id, "", "  ")
	if err != nil {
		return err
	}
	return errors.Join(durable.Write(filepath.Join(dir, "store.json"), append(text, '\n')), durable.SyncDir(filepath.Dir(dir)))
}
