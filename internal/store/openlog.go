package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/ckptstore/ckptstore/events/jetlog"
)

// openedLog is the log of a directory whose server runs in this process, and
// which nothing contradicts that is known of it.
type openedLog struct {
	server  *jetlog.Server
	log     *jetlog.Log
	settled uint64 // event up to which decisions are carried out; 0 when that is not known
}

// openLog starts the server over the log of a directory, under the store's lock
// and within [guarded], and holds the log to be that of the store, as long as it
// was, and to have the events of the receipts. On an error the caller closes
// what was opened.
func openLog(ctx context.Context, s *Store, dir string, listen *jetlog.Listen) (o openedLog, err error) {
	// A server would make a new log, and then miss the events.
	if _, err = os.Stat(filepath.Join(dir, "log")); err != nil {
		return o, fmt.Errorf("%w: its log is not there: %w: `ckptstore restore` a backup, or run `ckptstore recover`; `ckptstore ls --offline` still lists the checkpoints", ErrDamaged, err)
	}
	if err = settleCut(dir, nil); err != nil {
		return o, err
	}
	if o.server, err = jetlog.StartServer(ctx, jetlog.ServerOptions{
		Dir: filepath.Join(dir, "log"), Logger: serverLogger(s.opts.Logger), Listen: listen,
		Archive: archiveDir(dir), Admit: s.space.admit, Deciding: s.ballast().release,
	}); err != nil {
		return o, err
	}
	owner := o.server.OwnerOptions()
	owner.Archive, owner.Logger = archiveDir(dir), s.opts.Logger
	if o.log, err = jetlog.Connect(ctx, owner); err != nil {
		return o, err
	}
	if err = checkLog(ctx, o.log, s.ID); err != nil {
		return o, err
	}
	o.settled, err = recorded(ctx, s, o.log)
	return o, err
}

// close may be called after an error of openLog.
func (o openedLog) close() {
	if o.log != nil {
		o.log.Close()
	}
	if o.server != nil {
		o.server.Shutdown()
	}
}

// aloneWithLog takes the lock of a store that nobody owns, and opens its log for
// do alone: no other process can connect. An owner is [ErrLocked].
func aloneWithLog(ctx context.Context, s *Store, instead string, do func(*jetlog.Log) error) (err error) {
	if err := mayOpen(s.Location); err != nil {
		return err
	}
	lock, err := tryLock(s.Location)
	if err == nil && lock == nil {
		err = fmt.Errorf("%w: another process owns %s: end it first%s", ErrLocked, s.Location, instead)
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unlock(lock)) }()
	stop, err := s.lend(ctx, s.Location)
	if err != nil {
		return err
	}
	defer stop()
	return guarded(s, s.Location, func() error {
		opened, err := openLog(ctx, s, s.Location, nil)
		defer opened.close()
		if err == nil {
			err = do(opened.log)
		}
		return damage(err)
	})
}
