package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/projections/viewdb"
)

// When a store is opened, the receipts are compared with the log that are
// likely to tell of one that was rolled back: those with the highest sequences,
// which such a log does not reach, and a sample of what was saved last in other
// trials, for one that has gone on since. All are compared in the background,
// and by `ckptstore verify --log`.
const (
	compareTrials = 64 // in which something was saved or removed last
	compareEach   = 4  // receipts of each
	compareLast   = 16 // with the highest sequences, and
	compareOthers = 8  // of the others
)

// recorded holds the log to be the one that this store has had: its end, and
// the events that receipts name. A log that lacks the event of a receipt was
// rolled back or cut, however whole it looks. Whoever went on with it would save
// again under the names of checkpoints that are there, and number its events as
// theirs. It returns how much of the log is settled.
func recorded(ctx context.Context, s *Store, log *jetlog.Log) (settled uint64, err error) {
	receipts, damaged, err := s.Data.Newest(ctx, compareTrials, compareEach)
	if err != nil {
		return 0, fmt.Errorf("list receipts: %w", err)
	}
	for _, d := range damaged {
		if d.Link() {
			s.opts.Logger.Warn("symbolic link in the data not followed", "path", d.File, "error", d.Err)
			continue
		}
		s.opts.Logger.Warn("a receipt is damaged and is written again if the log knows its checkpoint", "path", d.File, "error", d.Err)
	}
	last, err := log.Last(ctx)
	if err != nil {
		return 0, err
	}
	if last < s.recovered {
		return 0, fmt.Errorf("%w: the log was rolled back: it ends at event %d, and when the store was recovered it had %d: restore log/ from a backup, or move it away and run `ckptstore recover` again",
			ErrDamaged, last, s.recovered)
	}
	if err := wasRead(s, last); err != nil {
		return 0, err
	}
	for _, r := range toCompare(receipts, s.ID, compareLast, compareOthers) {
		if err := compareReceipt(ctx, s, log, r, last); err != nil {
			return 0, err
		}
	}
	return hadEnd(ctx, s, log, last)
}

// wasRead holds the log to be as long as it was when it was last read: of a
// log whose views are gone, and whose end no receipt is about, nothing else
// knows.
func wasRead(s *Store, last uint64) error {
	if IsURL(s.opts.Location) {
		return nil
	}
	read, _, err := lastFullRead(s.Location)
	if err != nil {
		s.opts.Logger.Warn("that the log is as long as it was is not known", "error", err)
		return nil
	}
	if last < read.Sequence {
		return fmt.Errorf("%w: the log was rolled back: it ends at event %d, and on %s it was read up to event %d: restore log/ from a backup, or run `ckptstore recover`, which makes a log of the receipts; to go on without what it lost, delete %s",
			ErrDamaged, last, read.At.Local().Format(time.DateTime), read.Sequence, filepath.Join(s.Location, readName))
	}
	return nil
}

// toCompare are the receipts of a store that are compared, the newest first: the
// newest, and of the newest of other trials some, from all over the log.
func toCompare(receipts []checkpoint.Receipt, id string, newest, others int) []checkpoint.Receipt {
	mine := slices.DeleteFunc(slices.Clone(receipts), func(r checkpoint.Receipt) bool { return r.Store != id })
	slices.SortFunc(mine, func(a, b checkpoint.Receipt) int { return cmp.Compare(b.Sequence, a.Sequence) })
	chosen, rest := mine[:min(newest, len(mine))], mine[min(newest, len(mine)):]
	seen := map[[2]string]bool{}
	for _, r := range chosen {
		seen[[2]string{r.Run, r.Trial}] = true
	}
	rest = slices.DeleteFunc(slices.Clone(rest), func(r checkpoint.Receipt) bool {
		of := [2]string{r.Run, r.Trial}
		older := seen[of]
		seen[of] = true
		return older
	})
	if len(rest) > others {
		for i := range others {
			rest[i] = rest[i*len(rest)/others]
		}
		rest = rest[:others]
	}
	return slices.Concat(chosen, rest)
}

func compareReceipt(ctx context.Context, s *Store, log *jetlog.Log, r checkpoint.Receipt, last uint64) error {
	has := fmt.Sprintf("the log ends at event %d", last)
	if r.Sequence <= last {
		event, err := log.At(ctx, r.Sequence)
		switch {
		case err == nil && event.ID == r.Event:
			return nil
		case err == nil:
			has = fmt.Sprintf("in the log that is %s, %s", event.ID, event.Kind)
		case errors.Is(err, jetlog.ErrEnd), errors.Is(err, jetlog.ErrGap):
			has = err.Error()
		default:
			return err
		}
	}
	where, offline := "log/", s.Location
	if IsURL(s.Location) {
		where, offline = "the server's stream "+jetlog.Stream, filepath.Dir(s.DataDir)
	}
	return fmt.Errorf("%w: the log was rolled back: by %s, event %d is %s, which commits %s@%s; %s: restore %s from a backup, or run `ckptstore recover`, which makes a log of the receipts; a copy that was not made by `ckptstore backup` looks like this too; to go on without that checkpoint, move its directory away; `ckptstore ls --offline --store %s` reads the checkpoints",
		ErrDamaged, filepath.Join(s.DataDir, r.Ref.String(), checkpoint.ReceiptFile), r.Sequence, r.Event, r.Run, r.Checkpoint, has, where, offline)
}

// damage makes what the log and the views call by their own names a damaged
// store.
func damage(err error) error {
	if err == nil || errors.Is(err, ErrDamaged) || errors.Is(err, ErrForeign) {
		return err
	}
	for _, is := range []error{
		jetlog.ErrGap, jetlog.ErrUnsafe, jetlog.ErrUnrecovered, jetlog.ErrCursorDamaged,
		viewdb.ErrForeign, viewdb.ErrRolledBack, viewdb.ErrGap,
	} {
		if errors.Is(err, is) {
			return fmt.Errorf("%w: %w", ErrDamaged, err)
		}
	}
	return err
}

// IsDamage reports whether err says that a log or views are damaged: what
// [Open] calls [ErrDamaged], and what reading on may find later under the names
// of the log and the views.
func IsDamage(err error) bool { return errors.Is(damage(err), ErrDamaged) }

// openViews opens the views of a directory. What is wrong with them is damage,
// unless the machine lacks something or their file system fails, which is
// [viewdb.ErrFailed].
func openViews(ctx context.Context, s *Store, dir string) (*viewdb.DB, error) {
	db, err := viewdb.OpenContext(ctx, dir, viewdb.Options{FS: viewsOn(s.opts.viewsFS, dir), Store: s.ID, Logger: s.opts.Logger, Patience: viewsPatience(filepath.Dir(dir), time.Now())})
	if err == nil || ctx.Err() != nil || errors.Is(err, viewdb.ErrFailed) {
		return db, err
	}
	for _, lack := range []error{
		syscall.EACCES, syscall.EPERM, syscall.EROFS, syscall.ENOSPC, syscall.EDQUOT, syscall.EMFILE, syscall.ENFILE, syscall.ENOMEM, syscall.EAGAIN,
	} {
		if errors.Is(err, lack) {
			return nil, err
		}
	}
	return nil, viewsError{fmt.Errorf("%w: %w", ErrDamaged, err)}
}

// viewsError is damage of the views alone: the log may be whole.
type viewsError struct{ error }

func (e viewsError) Unwrap() error { return e.error }
