package store

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"

	"github.com/ckptstore/ckptstore/events/jetlog"
)

// ErrKnownDamage says that a reading of the log has found damage, and none since
// has found nothing. It comes with [ErrDamaged].
var ErrKnownDamage = errors.New("its log was read and is damaged")

// sound refuses a directory of whose log damage is recorded: whoever went on
// with it would build on events that are lost. A blob that is not there, or was never,
// concerns the save of its event alone, and a cursor its subscriber.
func sound(dir string) error {
	r, _, err := lastFullRead(dir)
	if err != nil {
		return fmt.Errorf("%w: whether damage was found is not known: %w", ErrDamaged, err)
	}
	if r.Damage == nil {
		return nil
	}
	found := slices.DeleteFunc(slices.Clone(r.Damage.Findings), func(f LogFinding) bool { return f.Aside })
	if len(found) == 0 {
		return nil
	}
	more := ""
	if n := len(found); n > 1 {
		more = fmt.Sprintf(", and %d findings more", n-1)
	}
	return fmt.Errorf("%w: %w: %s%s: restore log/ and blobs/ from a backup and run `ckptstore verify --log`, which clears this when it finds nothing, or run `ckptstore recover`; `ckptstore ls --offline --store %s` reads the checkpoints",
		ErrDamaged, ErrKnownDamage, found[0], more, dir)
}

// warnOfDamage tells a process that goes on beside an owner, which may end what
// runs there.
func (s *Store) warnOfDamage() {
	if err := sound(s.Location); err != nil && !s.Owns() {
		s.opts.Logger.Warn("the owner of this store goes on, and the next one will refuse: end all trainings, and keep the directory as it is", "error", err)
	}
}

// VerifyKnownDamage is [Store.VerifyLog] for a store that does not open because
// of [ErrKnownDamage]. The log is read under
// the store's lock, and nobody can connect meanwhile; an owner is [ErrLocked].
func VerifyKnownDamage(ctx context.Context, o Options, progress func(events uint64)) (id string, out ReadLog, err error) {
	if IsURL(o.Location) {
		return "", out, fmt.Errorf("verify the log at %s: a server's store has no directory in which damage is recorded", jetlog.Redacted(o.Location))
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	dir, err := filepath.Abs(o.Location)
	if err != nil {
		return "", out, fmt.Errorf("verify the log: %w", err)
	}
	s, err := closedStore(dir, o)
	if err != nil {
		return "", out, err
	}
	err = aloneWithLog(ctx, s, ", or run the same command again, which then asks it", func(log *jetlog.Log) (err error) {
		s.Log = log
		out, err = s.VerifyLog(ctx, progress)
		return err
	})
	if err != nil {
		err = fmt.Errorf("verify the log: %w", err)
	}
	return s.ID, out, err
}
