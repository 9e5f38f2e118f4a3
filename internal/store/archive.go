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

// The log of a directory is an archive and a live stream behind it, so that a server
// starts as fast over an old log as over a new one:
//
//	STORE/log/
//	  sealed/      the archive: see package archive
//	  jetstream/   the server's: the live stream, leases, cursors
//	  next/        while the stream is cut: the next one, then the old one
//
// The owner seals the stream into segments. When the stream is long and little of it
// is unsealed, the owner cuts it. With no server running, it seals the rest, makes an
// empty stream that begins behind it, and replaces the old stream:
//
//	          log/jetstream/…/streams/   log/next/
//	sealed    CKPT                       –             all of CKPT is in sealed/
//	made      CKPT                       CKPT_65537
//	moved     –                          CKPT_65537, CKPT
//	cut       CKPT_65537                 CKPT
//	tidied    CKPT_65537                 –
//
// Each state is durable before the next begins, and [settleCut] continues from any of
// them. A stream in its place is the log, whatever is in next/. Without one, the stream
// in next/ is moved into place.
const (
	sealedDir = "sealed"
	nextDir   = "next"
)

// unsealedAtCut is the most segments that a cut may have to seal itself.
const unsealedAtCut = 4

// cutting configures when the live stream is cut and how it is sealed.
type cutting struct {
	events uint64         // in the stream
	bytes  uint64         // in the stream, before compression
	limits archive.Limits // of a segment
	every  time.Duration  // interval between checks of the stream
}

// defaultCutting keeps the stream so short that a server recovers it in well under a
// second after a kill.
var defaultCutting = cutting{events: 1 << 17, bytes: 256 << 20, limits: archive.DefaultLimits, every: 2 * time.Second}

func archiveDir(dir string) string { return filepath.Join(dir, "log", sealedDir) }

// streamsOf returns the event streams in a server's directory: one, or none during a
// cut.
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

// keepSealed seals the stream in the background and requests a cut when one is due,
// until ctx ends.
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
			s.opts.Logger.Warn("log not archived; retrying", "error", err)
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

// sealSome seals all full segments of the stream and reports whether a cut is due.
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
		// The number of unsealed segments: by events, or by bytes when those are large.
		segments := float64(rest) / float64(c.limits.Messages)
		if all > 0 {
			segments = max(segments, float64(info.Bytes)*float64(rest)/float64(all)/float64(c.limits.Bytes))
		}
		// With fast appenders some segments stay unsealed; a few add little to a cut's time.
		if long := all >= c.events || info.Bytes >= c.bytes; segments < 1 || long && segments <= unsealedAtCut {
			if long {
				err = s.space.CheckFor(unsealedAtCut * c.limits.Bytes)
			}
			return long && err == nil, err
		}
		if err := s.space.CheckFor(c.limits.Bytes); err != nil {
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

// cutTail cuts the stream of a directory. The caller holds the directory's lock, and
// no server runs over its log. Tests pass step, which is called with each state that is
// reached; it may be nil.
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

// sealRest seals the rest of the stream.
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
	// Verify what was sealed earlier: the stream can still replace a damaged segment.
	if damaged := archive.VerifyAhead(to, s.ID, had, link); damaged != nil {
		s.opts.Logger.Warn("damaged segments ahead of the archive set aside", "error", damaged)
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

// ahead returns the last segment sealed ahead of the archive's end, if those segments
// belong to the log's current history. It sets others aside: the log was restored from
// a copy since and may have continued differently.
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
		s.opts.Logger.Warn("foreign segments ahead of the archive set aside", "dir", dir, "end", link.Last, "error", same)
		_, err := archive.SetAside(dir, had.Last)
		return had, err
	}
	return link, same
}

// errForeignSegments reports segments of another history of the log.
var errForeignSegments = errors.New("the segments have other events than the log")

// sameEnd checks that the last sealed event is the event that the stream has at that
// sequence: segments ahead of the end were sealed earlier.
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

// makeTail makes a server's directory with a stream that begins behind link.
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

// serveAlone starts a server that no other process can connect to.
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

// settleCut finishes a cut that has moved the old stream away, and removes the
// leftovers of any other cut. Call it under the store's lock before starting a server
// over the log.
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
	// Some file systems keep the files of the old stream while a reader has them open.
	if os.RemoveAll(next) != nil {
		if err := os.Rename(next, filepath.Join(log, durable.TempPrefix+nextDir+"-"+NewID())); err != nil {
			return bad(err)
		}
	}
	step("tidied")
	return nil
}

// move renames a directory and syncs both parents.
func move(from, to string) error {
	if err := os.Rename(from, to); err != nil {
		return err
	}
	return errors.Join(durable.SyncDir(filepath.Dir(to)), durable.SyncDir(filepath.Dir(from)))
}

// envCut is the number of events at which the live stream is cut, for tests that
// want many cuts of a short log. It is not a setting: each cut makes the stream's
// clients wait.
const envCut = "CKPTSTORE_TEST_CUT_EVENTS"

// cuttingByEnv returns c, with the value of envCut if that is set.
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
