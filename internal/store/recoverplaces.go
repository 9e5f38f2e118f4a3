package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/durable"
	"github.com/ckptstore/ckptstore/internal/logpeers"
	"github.com/ckptstore/ckptstore/internal/store/place"
)

// places finds the directories of a recovery. It returns an error if they overlap: the new store
// would be inside the lost one.
func (r *recovery) places() error {
	if IsURL(r.Location) {
		return fmt.Errorf("%w: %s is a server: recover into a directory, with --from the directory of the data", ErrLocation, jetlog.Redacted(r.Location))
	}
	for _, location := range []string{r.Location, r.From} {
		if location == r.From && place.IsBucket(location) {
			continue
		}
		if _, isURL, err := parseLocation(location); err != nil {
			return err
		} else if isURL {
			return fmt.Errorf("%w: --from %s is a server: give the directory that has the store's data/", ErrLocation, jetlog.Redacted(location))
		}
	}
	dir, err := filepath.Abs(r.Location)
	if err != nil {
		return err
	}
	if err := notReplicated(dir); err != nil {
		return err
	}
	r.dir, r.data = dir, filepath.Join(dir, "data")
	// A restore with a store.json is finished, whatever else it has left.
	unfinished := exists(filepath.Join(dir, restoreName)) && !exists(filepath.Join(dir, "store.json"))
	if r.From == "" && (exists(filepath.Join(dir, backupName)) || unfinished) {
		return fmt.Errorf("%w, or an unfinished one: recover it into another directory, with --from %s", ErrBackup, dir)
	}
	if r.From == "" {
		if id, err := identityIn(dir); err == nil {
			r.bucket = id.Data
		}
		return nil
	}
	if place.IsBucket(r.From) {
		bucket, err := place.Open(r.From, nil)
		if err != nil {
			return fmt.Errorf("%w: --from: %w", ErrLocation, err)
		}
		r.bucket = bucket.Location()
		r.From = r.bucket
		return nil
	}
	from, err := filepath.Abs(r.From)
	if err != nil {
		return err
	}
	if err := notReplicated(from); err != nil {
		return err
	}
	r.From, r.data = from, filepath.Join(from, "data")
	to, of := resolved(dir), resolved(from)
	switch {
	case to == of:
		return fmt.Errorf("%w: --from %s is the store itself: leave it out to recover in place", ErrLocation, from)
	case within(to, of), within(of, to):
		return fmt.Errorf("%w: --store %s and --from %s overlap: choose a --store outside the lost one", ErrLocation, dir, from)
	}
	return nil
}

// notReplicated returns an error for a store whose log has copies: it is not lost without
// the files that recovery misses, and a second log over its data would be another store.
func notReplicated(dir string) error {
	if !logpeers.Replicated(dir) {
		return nil
	}
	return fmt.Errorf("%w: the log of %s is in three copies, in %s to %s or on the disks of its nodes: `ckptstore ls --store %s` opens it where two of them are, and so does a job with --log-replicas 3",
		ErrExists, dir, logpeers.CopyDir(dir, 0), filepath.Base(logpeers.CopyDir(dir, logpeers.Copies-1)), dir)
}

// resolved returns a path without symbolic links, as far as it exists.
func resolved(path string) string {
	real, err := filepath.EvalSymlinks(path)
	if parent := filepath.Dir(path); err != nil && parent != path {
		return filepath.Join(resolved(parent), filepath.Base(path))
	}
	if err != nil {
		return path
	}
	return real
}

func within(path, dir string) bool {
	rel, err := filepath.Rel(dir, path)
	return err == nil && rel != ".." && !strings.HasPrefix(rel, "../")
}

// mayBegin checks that the place is fit for recovery: a store that does not open or, with From,
// an empty place outside it.
func (r *recovery) mayBegin(ctx context.Context) error {
	if r.From != "" {
		if err := r.vacantFor(); err != nil || r.bucket != "" {
			return err
		}
		return r.mayLeave(ctx)
	}
	if _, err := identityIn(r.dir); errors.Is(err, ErrForeign) || errors.Is(err, ErrNewer) {
		return err
	} else if err != nil || !exists(filepath.Join(r.dir, "log")) {
		return nil
	}
	s, err := Open(ctx, Options{Location: r.dir, Logger: r.Logger})
	if err == nil {
		return errors.Join(errOpens(r.dir), s.Close())
	}
	if errors.Is(err, ErrDamaged) || errors.Is(err, ErrForeign) {
		r.Logger.Info("log does not open; recovering from receipts", "error", err)
		return nil
	}
	return err
}

func errOpens(dir string) error {
	return fmt.Errorf("%w: its log opens (%s), and has more than the receipts: `ckptstore verify --log` reads all of it; to continue without it anyway, move log/ away and run this again", ErrExists, filepath.Join(dir, "log"))
}

// vacantFor checks that the place for the new store is empty.
func (r *recovery) vacantFor() error {
	err := vacant(r.dir)
	switch {
	case errors.Is(err, ErrExists):
		return fmt.Errorf("%w: with --from, a new store is made: choose an empty or a new directory for --store", ErrExists)
	case err != nil:
		return fmt.Errorf("a new store is made there: %w", err)
	}
	return nil
}

// mayLeave checks that the store in From is lost: no process has it open, and its log does not
// open. From must not change, so the check opens a copy of the log, which a server may repair.
func (r *recovery) mayLeave(ctx context.Context) error {
	log := filepath.Join(r.From, "log")
	for _, path := range []string{filepath.Join(r.From, lockName), log} {
		release, err := lockExisting(path)
		if err != nil {
			return err
		}
		defer release()
	}
	id, err := identityIn(r.From)
	if errors.Is(err, ErrForeign) || errors.Is(err, ErrNewer) {
		return err
	} else if err != nil || !exists(log) {
		return nil // its identity or its log is lost
	}
	err = r.opensCopied(ctx, id)
	switch {
	case err == nil:
		return errOpens(r.From)
	case errors.Is(err, ErrDamaged), errors.Is(err, ErrForeign):
		r.Logger.Info("log does not open; recovering from receipts", "error", err)
		return nil
	}
	return err
}

// opensCopied opens a copy of the log of From and runs the checks that an owner of the store
// would run.
func (r *recovery) opensCopied(ctx context.Context, id identity) (err error) {
	log, temp := filepath.Join(r.From, "log"), filepath.Join(r.dir, durable.TempPrefix+"log")
	if err := plainLog(r.From); err != nil {
		return err
	}
	defer func() { err = errors.Join(damage(err), os.RemoveAll(temp)) }()
	if err := errors.Join(os.RemoveAll(temp), os.MkdirAll(temp, 0o700)); err != nil {
		return err
	}
	from := log
	if here, err := streamsOf(log); err == nil && len(here) == 0 && exists(filepath.Join(log, nextDir)) {
		from = filepath.Join(log, nextDir) // interrupted during a cut
	}
	if err := os.CopyFS(filepath.Join(temp, "jetstream"), os.DirFS(filepath.Join(from, "jetstream"))); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("copy the log of %s to see whether it opens: %w: choose a --store with room for it, or move that log away", r.From, err)
	}
	server, err := jetlog.StartServer(ctx, jetlog.ServerOptions{Dir: temp, Logger: serverLogger(r.Logger)})
	if err != nil {
		return err
	}
	defer server.Shutdown()
	owner := server.OwnerOptions()
	owner.Archive = archiveDir(r.From)
	l, err := jetlog.Connect(ctx, owner)
	if err != nil {
		return err
	}
	defer l.Close()
	if err := checkLog(ctx, l, id.Store); err != nil {
		return err
	}
	data, err := OpenData(r.From)
	if err != nil {
		return err
	}
	s := &Store{ID: id.Store, Location: r.From, top: filepath.Dir(r.data), Data: data, recovered: id.Recovered, opts: Options{Location: r.From, Logger: r.Logger}}
	_, err = recorded(ctx, s, l)
	return err
}

// openExisting opens a file or directory. It does not follow a link or wait for a pipe.
func openExisting(path string) (*os.File, error) {
	root := beneath.At(filepath.Dir(path))
	f, err := root.Open(path)
	if errors.Is(err, unix.EISDIR) {
		f, err = root.OpenDir(path)
	}
	return f, err
}

// lockExisting locks a file or directory of another store, if the path exists; it makes none.
// The lock is shared: it keeps an owner out and needs no write permission.
func lockExisting(path string) (release func(), err error) {
	f, err := openExisting(path)
	if errors.Is(err, os.ErrNotExist) {
		return func() {}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("check whether a process has %s open: %w", filepath.Dir(path), err)
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		err = fmt.Errorf("%w: another process holds %s: a store that is in use is not lost; end that process first", ErrLocked, path)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return func() { _ = f.Close() }, nil
}
