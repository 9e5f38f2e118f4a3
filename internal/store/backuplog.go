package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/archive"
	"github.com/ckptstore/ckptstore/internal/durable"
)

// sealPatience is how long the log may be unavailable while it is copied: an owner may
// leave, or cut its stream, at any moment.
const sealPatience = time.Minute

// sealedTemp is where a backup's segments are made.
const sealedTemp = durable.TempPrefix + "sealed"

// writeLog makes the log of the backup: all events up to cut, sealed, with an empty live
// stream behind them. It returns the last event.
func (b *backup) writeLog(ctx context.Context, cut uint64) (last events.Recorded, err error) {
	log, temp := filepath.Join(b.to.dir, "log"), filepath.Join(b.to.dir, sealedTemp)
	if err := errors.Join(os.RemoveAll(log), os.RemoveAll(temp), os.Mkdir(temp, 0o700)); err != nil {
		return last, err
	}
	link, err := b.seal(ctx, temp, cut)
	if err != nil {
		return last, err
	}
	if err := archive.Extend(temp, b.store.ID, archive.Link{}, link); err != nil {
		return last, err
	}
	if err := b.opts.step("the log is sealed"); err != nil {
		return last, err
	}
	like, err := b.store.Log.TailConfig(ctx)
	if err != nil {
		return last, err
	}
	if err := makeTail(ctx, b.store, log, link, like); err != nil {
		return last, err
	}
	if err := os.Rename(temp, filepath.Join(log, sealedDir)); err != nil {
		return last, err
	}
	if err := b.opts.step("the log is made"); err != nil {
		return last, err
	}
	if last, err = b.finishLog(ctx, log, cut); err != nil {
		return last, err
	}
	return last, errors.Join(syncTree(log), durable.SyncDir(b.to.dir))
}

// seal makes segments in dir of all events up to cut. It copies the store's segments as
// far as they go and seals the rest from the stream.
func (b *backup) seal(ctx context.Context, dir string, cut uint64) (link archive.Link, err error) {
	give := time.Now().Add(sealPatience)
	for link.Last < cut {
		before := link.Last
		link, err = b.sealSome(ctx, dir, link, cut)
		switch {
		case ctx.Err() != nil:
			return link, context.Cause(ctx)
		case link.Last > before:
			give = time.Now().Add(sealPatience)
		case err == nil:
			err = fmt.Errorf("the log has no event %d", link.Last+1)
		}
		// Retrying does not help with a damaged segment.
		if err != nil && (errors.Is(err, archive.ErrDamaged) || errors.Is(err, archive.ErrForeign) || IsDamage(err) || time.Now().After(give)) {
			return link, fmt.Errorf("copy the log from event %d on: %w", link.Last+1, err)
		}
		if err != nil && !sleep(ctx, 100*time.Millisecond) {
			return link, context.Cause(ctx)
		}
	}
	return link, nil
}

// sealSome continues behind link until an error or the cut.
func (b *backup) sealSome(ctx context.Context, dir string, link archive.Link, cut uint64) (_ archive.Link, err error) {
	s := b.store
	sealed, err := s.Log.Sealed(ctx)
	if err != nil {
		return link, err
	}
	var old *archive.Archive
	if link.Last < sealed.Last {
		if old, err = archive.Open(archiveDir(s.Location), s.ID, sealed); err != nil {
			return link, err
		}
		defer func() { err = errors.Join(err, old.Close()) }()
		for _, segment := range old.Segments() {
			if segment.First != link.Last+1 || segment.Last > cut {
				continue
			}
			to := filepath.Join(dir, filepath.Base(segment.Path))
			if err := b.files.Files.File(ctx, segment.Path, to); err != nil {
				return link, err
			}
			next, err := archive.Verify(to, s.ID, link)
			if err != nil {
				return link, err
			}
			link = next
		}
	}
	for link.Last < cut {
		next, err := archive.Seal(dir, s.ID, link, s.cutting.limits, b.messages(ctx, old, sealed.Last, link.Last+1, cut))
		if err != nil || next == link {
			return link, err
		}
		link = next
	}
	return link, nil
}

// messages returns the messages from to until: those of the archive, which ends at
// sealed, then those of the stream.
func (b *backup) messages(ctx context.Context, old *archive.Archive, sealed, from, until uint64) iter.Seq2[archive.Message, error] {
	return func(yield func(archive.Message, error) bool) {
		if from <= sealed {
			for m, err := range old.Read(ctx, from, min(sealed, until)) {
				if !yield(m, err) || err != nil {
					return
				}
			}
			from = sealed + 1
		}
		for m, err := range b.store.Log.Raw(ctx, from, until) {
			if !yield(m, err) || err != nil {
				return
			}
		}
	}
}

// finishLog opens the new log, checks that it ends at cut, and writes its cursors.
func (b *backup) finishLog(ctx context.Context, dir string, cut uint64) (end events.Recorded, err error) {
	s := b.store
	cursors, err := s.Log.ListCursors(ctx)
	if err != nil {
		return end, err
	}
	server, log, err := serveAlone(ctx, s, dir)
	if err != nil {
		return end, err
	}
	defer server.Shutdown()
	defer log.Close()
	if err := checkLog(ctx, log, s.ID); err != nil {
		return end, err
	}
	if last, err := log.Last(ctx); err != nil || last != cut {
		return end, errors.Join(err, fmt.Errorf("%w: the copy of the log ends at event %d, want %d", ErrDamaged, last, cut))
	}
	if end, err = log.At(ctx, cut); err != nil {
		return end, err
	}
	for _, c := range cursors {
		if c.Damage != nil {
			s.opts.Logger.Warn("damaged cursor not in the backup", "cursor", c.Name, "error", c.Damage)
			continue
		}
		if err := copyCursor(ctx, log, c, cut); err != nil {
			return end, err
		}
	}
	return end, nil
}

// copyCursor copies a cursor of the store, bounded by the end of this log: the
// subscriber has handled every event up to there.
func copyCursor(ctx context.Context, log *jetlog.Log, c jetlog.CursorState, cut uint64) error {
	to, err := log.Cursor(ctx, c.Name)
	if err != nil {
		return err
	}
	return to.Move(ctx, min(c.Sequence, cut))
}

// writeEnd writes end.json for a log that ends with the event end.
func writeEnd(dir, store string, end events.Recorded) error {
	text, err := json.Marshal(logEnd{Store: store, Sequence: end.Sequence, Event: end.ID, At: time.Now().UTC()})
	if err != nil {
		return err
	}
	return durable.Write(filepath.Join(dir, endName), append(text, '\n'))
}
