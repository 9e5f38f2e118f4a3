package store

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/audit/ledger"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/durable"
	"github.com/ckptstore/ckptstore/internal/store/views"
	"github.com/ckptstore/ckptstore/projections/viewdb"
)

// logEnd is end.json: an event that the log has had, at or near its end. A log that was
// truncated behind the last receipt looks complete. An owner that continued with it would
// assign acknowledged sequences again.
//
//	STORE/end.json   {"store", "sequence", "event", "at", "settled"}
//
// An owner that ends in order writes it after the last append, so it is the log's end.
// Before that, the owner writes it every second in which the end moved. So after a kill
// there is no record of the last second.
type logEnd struct {
	Store    string    `json:"store"`
	Sequence uint64    `json:"sequence"`
	Event    string    `json:"event"` // its ID
	At       time.Time `json:"at"`    // when it was the last event
	// Settled is the event up to which every decision about a checkpoint has been carried
	// out in the data; 0 if unknown.
	Settled uint64 `json:"settled,omitempty"`
}

const (
	endName  = "end.json"
	endEvery = time.Second
	// endTimeout bounds the last write of an owner that ends.
	endTimeout = 5 * time.Second
)

func readEnd(dir string) (e logEnd, err error) {
	path := filepath.Join(dir, endName)
	text, err := readFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return e, nil // a new store, or one from before end.json
	}
	if err == nil {
		err = json.Unmarshal(text, &e)
	}
	if err != nil {
		err = fmt.Errorf("%w: the recorded end of the log cannot be read: %s: %w: compare log/ with a backup, then delete that file: it is written again", ErrDamaged, path, err)
	}
	return e, err
}

// hadEnd checks that the log has the event that its owner last recorded as its end, and
// returns how much of the log was settled then.
func hadEnd(ctx context.Context, s *Store, log *jetlog.Log, last uint64) (settled uint64, err error) {
	if IsURL(s.opts.Location) {
		return 0, nil
	}
	end, err := readEnd(s.Location)
	if err != nil || end.Sequence == 0 {
		return 0, err
	}
	if end.Store != s.ID {
		return 0, fmt.Errorf("%w: %s is that of store %s: the directory was put together from two; delete that file if log/ is the right one", ErrForeign, filepath.Join(s.Location, endName), end.Store)
	}
	has := fmt.Sprintf("it ends at event %d", last)
	if end.Sequence <= last {
		event, err := log.At(ctx, end.Sequence)
		switch {
		case err == nil && event.ID == end.Event:
			return end.Settled, nil
		case err == nil:
			has = fmt.Sprintf("event %d is %s, %s", end.Sequence, event.ID, event.Kind)
		case errors.Is(err, jetlog.ErrEnd), errors.Is(err, jetlog.ErrGap):
			has = err.Error()
		default:
			return 0, err
		}
	}
	return 0, fmt.Errorf("%w: the log was rolled back: %s, and on %s it ended at event %d, %s: restore log/ from a backup, or, to continue without the lost events, delete %s",
		ErrDamaged, has, end.At.Local().Format(time.DateTime), end.Sequence, end.Event, filepath.Join(s.Location, endName))
}

// noteEnd records the log's end and how much of it is settled, if that differs from the
// record.
func noteEnd(ctx context.Context, dir, store string, log *jetlog.Log, settled uint64) error {
	last, err := log.Last(ctx)
	if err != nil {
		return err
	}
	if had, err := readEnd(dir); err == nil && had.Sequence == last && had.Store == store && had.Settled == settled {
		return nil
	}
	event, err := log.At(ctx, last)
	if err != nil {
		return err
	}
	text, err := json.Marshal(logEnd{Store: store, Sequence: last, Event: event.ID, At: time.Now().UTC(), Settled: min(settled, last)})
	if err != nil {
		return err
	}
	return durable.Write(filepath.Join(dir, endName), append(text, '\n'))
}

// keepEnd records the log's end until ctx ends.
func (w *ownership) keepEnd(ctx context.Context, s *Store) {
	said := false
	for sleep(ctx, endEvery) {
		err := noteEnd(ctx, w.dir, s.ID, w.log, w.settler.settled.Load())
		if ctx.Err() == nil && err != nil && !said {
			said = true
			s.opts.Logger.Warn("log end not recorded: a truncation after the last commit would go unnoticed", "error", err)
		}
	}
}

// settle ends the use of the store by other processes, folds the rest of the log, and
// records its end. Nothing is appended after it.
func (w *ownership) settle() {
	ctx, cancel := context.WithTimeout(context.Background(), endTimeout)
	defer cancel()
	w.server.Disconnect()
	if err := noteEnd(ctx, w.dir, w.store.ID, w.log, w.settler.settled.Load()); err != nil {
		w.store.opts.Logger.Warn("log end not recorded", "error", err)
	}
	last, err := w.log.Last(ctx)
	if err != nil || w.views.Cursor() >= last {
		return // the views are a cache
	}
	if err := w.views.Finish(ctx); err != nil {
		w.store.opts.Logger.Warn("views behind the log; the next open of the store catches up", "error", err)
	}
}

// On open, the owner compares the receipts that are likely to reveal a rolled-back log:
// those with the highest sequences, which such a log does not reach, and a sample of the
// latest saves of other trials, for a log that has continued since. The background scrub
// and `ckptstore verify --log` compare all receipts.
const (
	compareTrials = 64 // with the latest saves and removals
	compareEach   = 4  // receipts of each
	compareLast   = 16 // with the highest sequences, and
	compareOthers = 8  // of the others
)

// recorded checks that the log is the log that this store has had: its end, and the events
// that receipts name. A log that lacks a receipt's event was rolled back or truncated, even
// if it looks complete. Continuing with it would save again under the names of existing
// checkpoints and reuse the sequences of their events. recorded returns how much of the log
// is settled.
func recorded(ctx context.Context, s *Store, log *jetlog.Log) (settled uint64, err error) {
	receipts, damaged, err := s.Data.Newest(ctx, compareTrials, compareEach)
	if err != nil && s.bucket != nil && ctx.Err() == nil {
		s.opts.Logger.Warn("the log was not compared with the receipts in the bucket: a log that was rolled back goes unnoticed until they can be read", "bucket", s.Data.Dir(), "error", err)
		err = nil
	}
	if err != nil {
		return 0, fmt.Errorf("list receipts: %w", err)
	}
	for _, d := range damaged {
		if d.Link() {
			s.opts.Logger.Warn("symbolic link in the data not followed", "path", d.File, "error", d.Err)
			continue
		}
		s.opts.Logger.Warn("damaged receipt; rewritten if the log has its checkpoint", "path", d.File, "error", d.Err)
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

// wasRead checks that the log is as long as when it was last read. If the views are gone
// and no receipt is about the log's end, this is the only check.
func wasRead(s *Store, last uint64) error {
	if IsURL(s.opts.Location) {
		return nil
	}
	read, _, err := lastFullRead(s.Location)
	if err != nil {
		s.opts.Logger.Warn("record of the last read not usable: a shorter log would go unnoticed", "error", err)
		return nil
	}
	if last < read.Sequence {
		return fmt.Errorf("%w: the log was rolled back: it ends at event %d, and on %s it was read up to event %d: restore log/ from a backup, or run `ckptstore recover`, which makes a log of the receipts; to continue without the lost events, delete %s",
			ErrDamaged, last, read.At.Local().Format(time.DateTime), read.Sequence, filepath.Join(s.Location, readName))
	}
	return nil
}

// toCompare returns the receipts to compare, the newest first: the newest receipts, and
// recent ones of other trials, from all over the log.
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
		where, offline = "the server's stream "+jetlog.Stream, cmp.Or(s.top, s.Data.Dir())
	}
	return fmt.Errorf("%w: the log was rolled back: by %s, event %d is %s, which commits %s@%s; %s: restore %s from a backup, or run `ckptstore recover`, which makes a log of the receipts; a copy that was not made by `ckptstore backup` looks like this too; to continue without that checkpoint, move its directory away; `ckptstore ls --offline --store %s` reads the checkpoints",
		ErrDamaged, s.Data.Path(r.Ref, checkpoint.ReceiptFile), r.Sequence, r.Event, r.Run, r.Checkpoint, has, where, offline)
}

// damage converts the damage errors of the log and the views to [ErrDamaged].
func damage(err error) error {
	if err == nil || errors.Is(err, ErrDamaged) || errors.Is(err, ErrForeign) {
		return err
	}
	for _, is := range []error{
		jetlog.ErrGap, jetlog.ErrUnsafe, jetlog.ErrUnrecovered, jetlog.ErrCursorDamaged,
		viewdb.ErrForeign, viewdb.ErrRolledBack, viewdb.ErrGap, ledger.ErrDamaged, ledger.ErrRolledBack,
	} {
		if errors.Is(err, is) {
			return fmt.Errorf("%w: %w", ErrDamaged, err)
		}
	}
	if errors.As(err, new(views.DamageError)) {
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return err
}

// IsDamage reports whether err means damage of a log or of views: the [ErrDamaged] of
// [Open], or an error of the log or the views found later.
func IsDamage(err error) bool { return errors.Is(damage(err), ErrDamaged) }

// maxReceiptFindings limits the receipts named that contradict the log.
const maxReceiptFindings = 100

// allReceipts checks that every receipt of a store is about an event of its log, while the
// log is read from its start. It keeps 16 bytes for each receipt.
type allReceipts struct {
	said  []saidCommit // sorted by sequence
	at    int          // index of the first receipt not yet reached
	wrong []uint64     // sequences where the log has another event
}

// saidCommit is the commit that a receipt records.
type saidCommit struct {
	sequence uint64
	event    [8]byte // of the digest of its ID
}

// listReceipts reads the receipts. Read the log's end after it: then the log has the events
// of all of them.
func listReceipts(ctx context.Context, s *Store, pace func(context.Context, int64) error) (*allReceipts, error) {
	const each = 512 // bytes of a receipt, about
	a := &allReceipts{}
	err := s.Data.EachReceipt(ctx, func(r checkpoint.Receipt) error {
		if r.Store == s.ID {
			a.said = append(a.said, saidCommit{r.Sequence, eventMark(r.Event)})
		}
		return pace(ctx, each)
	})
	slices.SortFunc(a.said, func(x, y saidCommit) int {
		return cmp.Or(cmp.Compare(x.sequence, y.sequence), bytes.Compare(x.event[:], y.event[:]))
	})
	a.said = slices.Compact(a.said) // copies of a checkpoint
	return a, err
}

func eventMark(id string) [8]byte {
	sum := sha256.Sum256([]byte(id))
	return [8]byte(sum[:8])
}

// see compares the next event of the log. It skips an unreadable event, which is a finding
// already.
func (a *allReceipts) see(e events.Recorded) {
	for ; a.at < len(a.said) && a.said[a.at].sequence <= e.Sequence; a.at++ {
		if said := a.said[a.at]; said.sequence == e.Sequence && said.event != eventMark(e.ID) {
			a.wrong = append(a.wrong, e.Sequence)
		}
	}
}

// findings returns the receipts that the log, which ends at last, contradicts.
func (a *allReceipts) findings(ctx context.Context, s *Store, last uint64) (found []LogFinding, err error) {
	beyond := slices.ContainsFunc(a.said[a.at:], func(c saidCommit) bool { return c.sequence > last })
	if len(a.wrong) == 0 && !beyond {
		return nil, nil
	}
	errEnough := errors.New("enough")
	err = s.Data.EachReceipt(ctx, func(r checkpoint.Receipt) error {
		_, wrong := slices.BinarySearch(a.wrong, r.Sequence)
		if r.Store != s.ID || !wrong && r.Sequence <= last {
			return nil
		}
		has := fmt.Sprintf("the log ends at event %d", last)
		if r.Sequence <= last {
			e, err := s.Log.At(ctx, r.Sequence)
			if err == nil && e.ID == r.Event {
				return nil // the other receipt with that sequence is wrong
			}
			if has = fmt.Sprintf("in the log that is %s, %s", e.ID, e.Kind); err != nil {
				has = err.Error()
			}
		}
		found = append(found, LogFinding{Sequence: r.Sequence, Problem: fmt.Sprintf("by %s it is %s, which commits %s@%s; %s: the log was rolled back",
			s.Data.Path(r.Ref, checkpoint.ReceiptFile), r.Event, r.Run, r.Checkpoint, has)})
		if len(found) == maxReceiptFindings {
			return errEnough
		}
		return nil
	})
	if errors.Is(err, errEnough) {
		err = nil
	}
	return found, err
}
