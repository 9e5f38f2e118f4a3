package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/archive"
	"github.com/ckptstore/ckptstore/internal/durable"
	"github.com/ckptstore/ckptstore/internal/share"
)

// The log of a directory is an archive and a live stream behind it, so that a
// server starts as fast over an old log as over a new one:
//
//	STORE/log/
//	  sealed/      the archive: see package archive
//	  jetstream/   the server's: the live stream, leases, cursors
//	  next/        while the stream is cut: the next one, then the old one
//
// While a process owns the store, it seals what the stream has into segments. When
// the stream is long and little of it is not sealed yet, the owner cuts it: with
// no server running it seals the rest, makes an empty stream that begins behind it,
// and puts that in the place of the old one:
//
//	          log/jetstream/…/streams/   log/next/
//	sealed    CKPT                       –             all of CKPT is in sealed/
//	made      CKPT                       CKPT_65537
//	moved     –                          CKPT_65537, CKPT
//	cut       CKPT_65537                 CKPT
//	tidied    CKPT_65537                 –
//
// Each state is durable before the next begins, and [settleCut] goes on from any:
// a stream in its place is the log, whatever is in next/; without one, the stream
// in next/ is moved to its place.
const (
	sealedDir = "sealed"
	nextDir   = "next"
)

// unsealedAtCut is how many segments a cut may have to seal itself.
const unsealedAtCut = 4

// cutting says when the live stream is long, and how it is sealed.
type cutting struct {
	events uint64         // in the stream
	bytes  uint64         // of it, before compression
	limits archive.Limits // of a segment
	every  time.Duration  // between two looks at the stream
}

// defaultCutting keeps the stream so short that a server recovers it in well under a
// second after it was killed.
var defaultCutting = cutting{events: 1 << 17, bytes: 256 << 20, limits: archive.DefaultLimits, every: 2 * time.Second}

func archiveDir(dir string) string { return filepath.Join(dir, "log", sealedDir) }

// streamsOf are the streams of events in a server's directory: one, or none while
// it is cut.
func streamsOf(serverDir string) (found []string, err error) {
	accounts, err := os.ReadDir(filepath.Join(serverDir, "jetstream"))
	for _, account := range accounts {
		dir := filepath.Join(serverDir, "jetstream", account.Name(), "streams")
		streams, serr := os.ReadDir(dir)
		if serr != nil && !errors.Is(serr, os.ErrNotExist) && !errors.Is(serr, syscall.ENOTDIR) {
			err = serr
		}
		for _, stream := range streams {
			if jetlog.IsTail(stream.Name()) {
				found = append(found, filepath.Join(dir, stream.Name()))
			}
		}
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("find the stream of the log: %w", err)
	}
	return found, nil
}

// keepSealed seals the stream in the background, and asks for it to be cut when that
// is due, until ctx ends.
func (w *ownership) keepSealed(ctx context.Context, s *Store) {
	c := s.cutting
	said := false
	for sleep(ctx, c.every) {
		due, err := w.sealSome(ctx, s, c)
		if ctx.Err() != nil {
			return
		}
		if err != nil && !said {
			said = true
			s.opts.Logger.Warn("the log is not archived; retrying", "error", err)
		}
		if due && time.Now().After(s.owner.cutAgain) {
			select {
			case s.owner.cut <- w:
			case <-ctx.Done():
			}
			return
		}
	}
}

// sealSome seals all full segments that the stream has, and reports whether it is
// due to be cut.
func (w *ownership) sealSome(ctx context.Context, s *Store, c cutting) (due bool, err error) {
	dir := archiveDir(w.dir)
	if err := share.MkdirAll(dir, 0o700); err != nil {
		return false, err
	}
	sealed, err := w.log.Sealed(ctx)
	if err != nil {
		return false, err
	}
	link, err := ahead(ctx, s, w.log, dir, sealed)
	if err != nil {
		return false, err
	}
	for {
		info, err := w.log.Info(ctx)
		if err != nil {
			return false, err
		}
		rest, all := info.Last-link.Last, info.Last-sealed.Last
		// How many segments are not sealed: by events, or by bytes when those are large.
		segments := float64(rest) / float64(c.limits.Messages)
		if all > 0 {
			segments = max(segments, float64(info.Bytes)*float64(rest)/float64(all)/float64(c.limits.Bytes))
		}
		// Who appends fast keeps some segments unsealed; few take little of the cut's time.
		if long := all >= c.events || info.Bytes >= c.bytes; segments < 1 || long && segments <= unsealedAtCut {
			if long {
				err = s.space.checkFor(unsealedAtCut * c.limits.Bytes)
			}
			return long && err == nil, err
		}
		if err := s.space.checkFor(c.limits.Bytes); err != nil {
			return false, err
		}
		begun := time.Now()
		next, err := archive.Seal(dir, s.ID, link, c.limits, w.log.Raw(ctx, link.Last+1, info.Last))
		if err == nil && next == link {
			err = fmt.Errorf("no event was read behind event %d of %d", link.Last, info.Last)
		}
		if err != nil {
			return false, err
		}
		link = next
		// At most two thirds of a core, for a log from before there were archives.
		if !sleep(ctx, time.Since(begun)/2) {
			return false, ctx.Err()
		}
	}
}

// cutTail cuts the stream of a directory whose lock the caller holds and over whose
// log no server runs. step, which may be nil, is told of each state that is
// reached, for tests.
func cutTail(ctx context.Context, s *Store, dir string, step func(state string)) (err error) {
	if step == nil {
		step = func(string) {}
	}
	log := filepath.Join(dir, "log")
	had, link, like, err := sealRest(ctx, s, log)
	if err == nil && link == had {
		return nil // the stream is empty
	}
	if err == nil {
		step("sealed")
		err = archive.Extend(filepath.Join(log, sealedDir), s.ID, had, link)
	}
	if err != nil {
		return fmt.Errorf("cut the log: %w", err)
	}
	next := filepath.Join(log, nextDir)
	if err := makeTail(ctx, s, next, link, like); err != nil {
		return fmt.Errorf("cut the log: %w", errors.Join(err, os.RemoveAll(next)))
	}
	step("made")
	from, err := streamsOf(log)
	if err == nil && len(from) != 1 {
		err = fmt.Errorf("there are %d streams of events in %s, want one", len(from), log)
	}
	if err == nil {
		err = move(from[0], filepath.Join(next, filepath.Base(from[0])))
	}
	if err != nil {
		return fmt.Errorf("cut the log: %w", err)
	}
	step("moved")
	if err := settleCut(dir, step); err != nil {
		return err
	}
	return archive.Tidy(filepath.Join(log, sealedDir), link)
}

// sealRest seals all that the stream has.
func sealRest(ctx context.Context, s *Store, dir string) (had, link archive.Link, like jetlog.TailConfig, err error) {
	server, log, err := serveAlone(ctx, s, dir)
	if err != nil {
		return had, link, like, err
	}
	defer server.Shutdown()
	defer log.Close()
	if err := checkLog(ctx, log, s.ID); err != nil {
		return had, link, like, err
	}
	last, err := log.Last(ctx)
	if err != nil {
		return had, link, like, err
	}
	if had, err = log.Sealed(ctx); err != nil {
		return had, link, like, err
	}
	to := filepath.Join(dir, sealedDir)
	if err := share.MkdirAll(to, 0o700); err != nil {
		return had, link, like, err
	}
	if err := durable.SyncDir(dir); err != nil {
		return had, link, like, err
	}
	if link, err = ahead(ctx, s, log, to, had); err != nil {
		return had, link, like, err
	}
	// What was sealed earlier is read again: the stream is still there to seal it anew.
	if damaged := archive.VerifyAhead(to, s.ID, had, link); damaged != nil {
		s.opts.Logger.Warn("segments ahead of the archive are set aside: one is damaged", "error", damaged)
		if _, err = archive.SetAside(to, had.Last); err != nil {
			return had, link, like, err
		}
		link = had
	}
	for link.Last < last && err == nil {
		link, err = archive.Seal(to, s.ID, link, s.cutting.limits, log.Raw(ctx, link.Last+1, last))
	}
	if err == nil {
		like, err = log.TailConfig(ctx)
	}
	return had, link, like, err
}

// ahead is the last segment that was sealed ahead of the archive's end, if those
// segments are of the history that the log has now. Others are set aside: the log
// was put back from a copy since, and may have gone on otherwise.
func ahead(ctx context.Context, s *Store, log *jetlog.Log, dir string, had archive.Link) (archive.Link, error) {
	link, err := archive.Ahead(dir, s.ID, had)
	if err != nil || link == had {
		return link, err
	}
	last, err := log.Last(ctx)
	if err != nil {
		return had, err
	}
	same := errForeignSegments
	if link.Last <= last {
		same = sameEnd(ctx, log, dir, s.ID, link)
	}
	if errors.Is(same, errForeignSegments) || errors.Is(same, archive.ErrDamaged) {
		s.opts.Logger.Warn("segments ahead of the archive are set aside: they are not of this log", "dir", dir, "end", link.Last, "error", same)
		_, err := archive.SetAside(dir, had.Last)
		return had, err
	}
	return link, same
}

// errForeignSegments says that segments are not of the history of the log.
var errForeignSegments = errors.New("the segments have other events than the log")

// sameEnd holds the end of what was sealed to be the event that the stream has
// there: segments ahead of the end were sealed earlier.
func sameEnd(ctx context.Context, log *jetlog.Log, dir, store string, link archive.Link) error {
	m, err := archive.At(dir, store, link)
	if err != nil {
		return err
	}
	event, err := log.At(ctx, link.Last)
	if err != nil {
		return err
	}
	same := string(m.Data) == string(event.Data)
	if event.Kind == (events.Void{}).Kind() {
		body, err := event.Body()
		if err != nil {
			return err
		}
		same = body.(*events.Void).Digest == events.VoidDigest(m.Subject, m.Data)
	}
	if !same || !m.Time.Equal(event.Stored) {
		return fmt.Errorf("%w: event %d", errForeignSegments, link.Last)
	}
	return nil
}

// makeTail makes a server's directory with the stream that begins behind link.
func makeTail(ctx context.Context, s *Store, dir string, link archive.Link, like jetlog.TailConfig) error {
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	server, log, err := serveAlone(ctx, s, dir)
	if err != nil {
		return err
	}
	err = log.CreateTail(ctx, s.ID, link, like)
	log.Close()
	server.Shutdown()
	if err != nil {
		return err
	}
	return errors.Join(syncTree(dir), durable.SyncDir(filepath.Dir(dir)))
}

// serveAlone starts a server that nobody else can connect to.
func serveAlone(ctx context.Context, s *Store, dir string) (*jetlog.Server, *jetlog.Log, error) {
	server, err := jetlog.StartServer(ctx, jetlog.ServerOptions{Dir: dir, Logger: serverLogger(s.opts.Logger)})
	if err != nil {
		return nil, nil, err
	}
	owner := server.OwnerOptions()
	owner.Archive, owner.Logger = filepath.Join(dir, sealedDir), s.opts.Logger
	log, err := jetlog.Connect(ctx, owner)
	if err != nil {
		server.Shutdown()
		return nil, nil, err
	}
	return server, log, nil
}

// settleCut finishes a cut that got as far as to move the old stream away, and
// removes what is left of any. It is called under the store's lock before a server
// is started over the log.
func settleCut(dir string, step func(string)) error {
	if step == nil {
		step = func(string) {}
	}
	log := filepath.Join(dir, "log")
	next := filepath.Join(log, nextDir)
	if !exists(next) {
		return nil
	}
	bad := func(err error) error { return fmt.Errorf("finish the cut of the log in %s: %w", next, err) }
	here, err := streamsOf(log)
	if err != nil {
		return bad(err)
	}
	if len(here) == 0 {
		made, err := streamsOf(next)
		if err != nil {
			return bad(err)
		}
		if len(made) != 1 {
			return bad(fmt.Errorf("%w: the log has no stream, and %s has %d of them: restore log/ from a backup, or run `ckptstore recover`", ErrDamaged, next, len(made)))
		}
		rel, err := filepath.Rel(next, made[0])
		if err == nil {
			err = move(made[0], filepath.Join(log, rel))
		}
		if err != nil {
			return bad(err)
		}
		step("cut")
	}
	// A reader of the old one's files may keep them, on some file systems.
	if os.RemoveAll(next) != nil {
		if err := os.Rename(next, filepath.Join(log, durable.TempPrefix+nextDir+"-"+NewID())); err != nil {
			return bad(err)
		}
	}
	step("tidied")
	return nil
}

// move renames a directory, and syncs those that lost and got its name.
func move(from, to string) error {
	if err := os.Rename(from, to); err != nil {
		return err
	}
	return errors.Join(durable.SyncDir(filepath.Dir(to)), durable.SyncDir(filepath.Dir(from)))
}

// envCut is the number of events at which the live stream is cut, for tests that
// want many cuts of a short log. It is no setting: a stream that is cut often makes
// its clients wait often.
const envCut = "CKPTSTORE_TEST_CUT_EVENTS"

// cuttingByEnv is c, or what envCut asks for.
func cuttingByEnv(c cutting) (cutting, error) {
	text := os.Getenv(envCut)
	if text == "" {
		return c, nil
	}
	n, err := strconv.ParseUint(text, 10, 32)
	if err != nil || n < 16 {
		return c, fmt.Errorf("open store: %s=%q: want a number of events, 16 or more", envCut, text)
	}
	c.events, c.every = n, 200*time.Millisecond
	c.limits = archive.Limits{Messages: int(n / 8), Bytes: c.limits.Bytes}
	return c, nil
}
