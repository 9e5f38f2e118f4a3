package store

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
)

// openedLog is the log of a directory whose server runs in this process, after it passed
// all checks against the store's records.
type openedLog struct {
	server  *jetlog.Server
	log     *jetlog.Log
	settled uint64 // event up to which decisions are carried out; 0 if unknown
}

// openLog starts the server over the log of a directory, under the store's lock and within
// [guarded]. It checks that the log is the store's, is as long as it was, and has the events
// of the receipts. On an error the caller must close the result.
func openLog(ctx context.Context, s *Store, dir string, listen *jetlog.Listen) (o openedLog, err error) {
	// With a missing log, a server would make a new one and lose the events.
	if _, err = os.Stat(filepath.Join(dir, "log")); err != nil {
		return o, fmt.Errorf("%w: its log is missing: %w: `ckptstore restore` a backup, or run `ckptstore recover`; `ckptstore ls --offline` still lists the checkpoints", ErrDamaged, err)
	}
	if err = settleCut(dir, nil); err != nil {
		return o, err
	}
	if o.server, err = jetlog.StartServer(ctx, jetlog.ServerOptions{
		Dir: filepath.Join(dir, "log"), Logger: serverLogger(s.opts.Logger), Listen: listen,
		Archive: archiveDir(dir), Admit: s.space.Admit, Deciding: s.ballast().Release, Signed: s.signs.Admit,
	}); err != nil {
		return o, err
	}
	owner := o.server.OwnerOptions()
	owner.Archive, owner.Logger, owner.Sign = archiveDir(dir), s.opts.Logger, s.signs.Sign
	if o.log, err = jetlog.Connect(ctx, owner); err != nil {
		return o, err
	}
	if err = checkLog(ctx, o.log, s.ID); err != nil {
		return o, err
	}
	o.settled, err = recorded(ctx, s, o.log)
	return o, err
}

// close may be called after an error of openLog too.
func (o openedLog) close() {
	if o.log != nil {
		o.log.Close()
	}
	if o.server != nil {
		o.server.Shutdown()
	}
}

// aloneWithLog takes the lock of a store without an owner and opens its log for do; no
// other process can connect. If the store has an owner, it returns [ErrLocked].
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
	stop, err := s.shareFiles(ctx, s.Location)
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

// logFiles returns the files that hold the events of a directory's log; none for a
// server's.
func (s *Store) logFiles() ([]string, error) {
	if IsURL(s.opts.Location) {
		return nil, nil
	}
	streams, err := streamsOf(filepath.Join(s.Location, "log"))
	if err != nil {
		return nil, err
	}
	var files []string
	for _, stream := range streams {
		some, err := s.inside().Glob(filepath.Join(stream, "msgs"), "*.blk")
		if err != nil {
			return nil, fmt.Errorf("list the files of the log: %w", err)
		}
		files = append(files, some...)
	}
	return files, nil
}

// onDisk checks that the log is in its directory: after its files are deleted, a server
// still answers from memory and from open files. had are the files before the reading.
// Sizes are not checked: the server compresses a block when it begins the next one.
func (s *Store) onDisk(had []string) (findings []LogFinding, err error) {
	if IsURL(s.opts.Location) {
		return nil, nil
	}
	has, err := s.logFiles()
	if err != nil {
		return nil, err
	}
	const then = "its server continues from memory: save that by `ckptstore events --json` before that process ends, then restore log/ from a backup"
	if len(has) == 0 {
		return []LogFinding{{Problem: fmt.Sprintf("no file of the log is in %s; %s", filepath.Join(s.Location, "log"), then)}}, nil
	}
	gone, err := s.deleted()
	if err != nil {
		return nil, err
	}
	// The files of a stream that was cut meanwhile are gone as expected, with its
	// directory.
	for _, path := range had {
		if !slices.Contains(has, path) && !slices.Contains(gone, path) && exists(filepath.Dir(path)) {
			gone = append(gone, path)
		}
	}
	for _, path := range gone {
		if _, err := os.Stat(path); err == nil {
			findings = append(findings, LogFinding{Problem: fmt.Sprintf("its file %s is not the file that its server writes; %s", path, then)})
			continue
		}
		findings = append(findings, LogFinding{Problem: fmt.Sprintf("its file %s was deleted; %s", path, then)})
	}
	return findings, nil
}

// deleted returns the blocks that the owner has open, such as the current one, and whose
// names are gone. The system does not report this for an owner on another machine or of
// another user.
func (s *Store) deleted() (gone []string, err error) {
	process := "self"
	if s.owner != nil && !s.Owns() {
		c, err := readCard(s.Location)
		if err != nil {
			return nil, err
		}
		if host, err := os.Hostname(); err != nil || host != c.Host {
			return nil, err
		}
		process = strconv.Itoa(c.PID)
	}
	dir := filepath.Join("/proc", process, "fd")
	open, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrPermission) || errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look at the files that the log's server has open: %w", err)
	}
	for _, e := range open {
		path, err := os.Readlink(filepath.Join(dir, e.Name()))
		if err != nil {
			continue // closed since
		}
		path, is := strings.CutSuffix(path, " (deleted)")
		// A client of a network's filesystem forgets the name of an open file when it
		// looks at its directory again: the link's text proves nothing.
		is = is && !sameFile(filepath.Join(dir, e.Name()), path)
		if is && filepath.Ext(path) == ".blk" && strings.HasPrefix(path, filepath.Join(s.Location, "log")+"/") && !slices.Contains(gone, path) {
			gone = append(gone, path)
		}
	}
	return gone, nil
}

// sameFile reports whether two names are those of one file.
func sameFile(a, b string) bool {
	one, err := os.Stat(a)
	if err != nil {
		return false
	}
	other, err := os.Stat(b)
	return err == nil && os.SameFile(one, other)
}

// inside returns the store's directory, below which no symbolic link is followed.
func (s *Store) inside() beneath.Root { return beneath.At(s.Location) }

// insideData returns the directory that holds data/, on any kind of store.
func (s *Store) insideData() beneath.Root { return beneath.At(s.top) }

// dataDir returns the directory of the checkpoints, of a store whose data is in no bucket.
func (s *Store) dataDir() string { return filepath.Join(s.top, "data") }

// hasFiles reports whether a checkpoint, committed or not, has files. One of a directory whose
// name leads elsewhere has an error of type [*beneath.TypeError].
func (s *Store) hasFiles(ctx context.Context, ref checkpoint.Ref) (bool, error) {
	if _, local := s.Data.Local(); !local {
		bytes, err := s.Data.Bytes(ctx, ref, nil)
		return bytes >= 0, err
	}
	_, err := s.insideData().Lstat(filepath.Join(s.dataDir(), ref.String()))
	if errors.As(err, new(*beneath.TypeError)) {
		return true, err
	}
	return err == nil, nil
}

// readFile returns the content of a small file in the directory of a store. It does not
// follow a symbolic link or wait for a pipe.
func readFile(path string) ([]byte, error) { return beneath.At(filepath.Dir(path)).ReadFile(path) }

// plainLog returns an error if a log contains symbolic links, pipes or devices, before a
// server opens its files.
func plainLog(dir string) error {
	return beneath.At(dir).Plain(filepath.Join(dir, "log"))
}

// ErrKnownDamage reports that a reading of the log has found damage, and no later reading
// was clean. It comes with [ErrDamaged].
var ErrKnownDamage = errors.New("its log was read and is damaged")

// sound returns an error if damage of the log is recorded: an owner that continued with it
// would build on lost events. A missing or invented blob concerns only its event's save,
// and a cursor only its subscriber.
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

// warnOfDamage warns a process that continues next to a running owner, which may finish
// the jobs that run there.
func (s *Store) warnOfDamage() {
	if err := sound(s.Location); err != nil && !s.Owns() {
		s.opts.Logger.Warn("store damaged: its owner continues, the next owner will refuse; end all trainings and keep the directory as it is", "error", err)
	}
}

// VerifyKnownDamage is [Store.VerifyLog] for a store that does not open because of
// [ErrKnownDamage]. It reads the log under the store's lock; no other process can connect
// meanwhile. If the store has an owner, it returns [ErrLocked].
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
		s.useLog(log)
		out, err = s.VerifyLog(ctx, progress)
		return err
	})
	if err != nil {
		err = fmt.Errorf("verify the log: %w", err)
	}
	return s.ID, out, err
}
