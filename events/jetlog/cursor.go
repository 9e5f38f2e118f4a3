package jetlog

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// Cursors is the bucket of cursors. A key is a cursor's name, a value is
//
//	{"name": "alerts", "sequence": 1200, "token": "…"}
//
// Each opening has its own token. It distinguishes a write whose acknowledgement was
// lost from another subscriber's write.
const Cursors = "CKPT_CURSORS"

const (
	cursorStream = "KV_" + Cursors
	cursorsAre   = "how far the subscribers of a checkpoint store have come"
)

// ErrCursorMoved reports that another subscriber moved the cursor, or that it was
// removed.
var ErrCursorMoved = problem.New(problem.Conflict, "another subscriber moved the cursor")

type cursorValue struct {
	Name     string `json:"name"`
	Sequence uint64 `json:"sequence"`
	Token    string `json:"token"`
}

// CursorState is the state of a cursor.
type CursorState struct {
	Name     string    `json:"name"`
	Sequence uint64    `json:"sequence"` // of the last handled event
	Moved    time.Time `json:"moved"`    // by the server's clock
	Damage   error     `json:"-"`        // why it cannot be read; then only Name is set
}

// Cursor is a subscriber's position in the log, kept by the log's server, so that the
// subscriber can resume on any machine. Its methods may be called concurrently.
type Cursor struct {
	l    *Log
	kv   jetstream.KeyValue
	name string

	mu       sync.Mutex
	token    string
	sequence uint64
	revision uint64 // 0: the key does not exist yet

	unwitnessed bool // its witness must be written after it
}

// Cursor opens the cursor called name. A cursor that was never moved has the position 0
// and is not listed. Opening does not exclude others: use [Log.Lease] for that. If two
// subscribers have it open, the second to move it gets [ErrCursorMoved].
func (l *Log) Cursor(ctx context.Context, name string) (*Cursor, error) {
	if name == "" {
		return nil, errors.New("open a cursor: no name")
	}
	ctx, cancel := deadline(ctx, DefaultAppend)
	defer cancel()
	c := &Cursor{l: l, name: name, token: rand.Text()}
	err := l.retry(concerning(ctx, ofCursor(name)), func(ctx context.Context) (err error) {
		if err = l.known(ctx); err != nil {
			return err
		}
		if c.kv, err = l.bucket(ctx, Cursors, cursorsAre); err != nil {
			return err
		}
		return c.open(ctx)
	})
	if err != nil {
		return nil, fmt.Errorf("open cursor %q at %s: %w", name, l.opts.where(), err)
	}
	return c, nil
}

func (c *Cursor) open(ctx context.Context) error {
	value, m, err := c.l.readCursor(ctx, bucketKey(c.name))
	if err != nil {
		return err
	}
	c.sequence, c.revision = value.Sequence, m.Seq
	known, err := c.l.witnessed(ctx, bucketKey(c.name))
	switch {
	case err != nil:
		return err
	case m.Seq == 0 && known:
		return lostCursor()
	case m.Seq == 0:
		return nil
	case !known: // the first move was cut, or an older version made it without a witness
		if err := c.l.witness(ctx, c.name); err != nil {
			return err
		}
	}
	c.l.saw(value.Sequence)
	info, err := c.l.ours(ctx)
	if err != nil {
		return err
	}
	if last := info.State.LastSeq; value.Sequence > last {
		return fmt.Errorf("%w: it stands at event %d, and the log ends at %d, so the log was rolled back: restore log/ from a newer copy, or forget the cursor by `ckptstore events cursors rm NAME`", ErrCursorDamaged, value.Sequence, last)
	}
	return nil
}

// Sequence returns the sequence of the last handled event, 0 for none.
func (c *Cursor) Sequence() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.sequence
}

// Move records that all events up to sequence are handled. The position is durable on
// return. It returns [ErrCursorMoved] if another subscriber uses the cursor too. Other
// errors are safe to retry.
func (c *Cursor) Move(ctx context.Context, sequence uint64) error {
	if c.l.opts.ReadOnly != nil {
		return fmt.Errorf("move cursor %q: %w", c.name, c.l.opts.ReadOnly)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	ctx, cancel := deadline(ctx, DefaultAppend)
	defer cancel()
	text, err := json.Marshal(cursorValue{Name: c.name, Sequence: sequence, Token: c.token})
	if err != nil {
		return fmt.Errorf("encode cursor %q: %w", c.name, err)
	}
	c.unwitnessed = c.unwitnessed || c.revision == 0
	err = c.l.retry(concerning(ctx, ofCursor(c.name)), func(ctx context.Context) error {
		if err := c.l.known(ctx); err != nil {
			return err
		}
		next, err := c.write(ctx, text)
		if moved(err) {
			if err = c.reread(ctx); err == nil {
				next, err = c.write(ctx, text)
			}
		}
		if err != nil {
			return err
		}
		c.revision, c.sequence = next, sequence
		if c.unwitnessed {
			if err := c.l.witness(ctx, c.name); err != nil {
				return err
			}
			c.unwitnessed = false
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("move cursor %q to %d at %s: %w", c.name, sequence, c.l.opts.where(), err)
	}
	return nil
}

func (c *Cursor) write(ctx context.Context, text []byte) (revision uint64, err error) {
	if c.revision == 0 {
		return c.kv.Create(ctx, bucketKey(c.name), text)
	}
	return c.kv.Update(ctx, bucketKey(c.name), text, c.revision)
}

// reread finds the revision of a write whose acknowledgement was lost.
func (c *Cursor) reread(ctx context.Context) error {
	now, m, err := c.l.readCursor(ctx, bucketKey(c.name))
	switch {
	case err != nil:
		return err
	case m.Seq == 0:
		return fmt.Errorf("%w: it was removed", ErrCursorMoved)
	case now.Token != c.token:
		return fmt.Errorf("%w, to %d", ErrCursorMoved, now.Sequence)
	}
	c.revision = m.Seq
	return nil
}

// readCursor asks once; a missing cursor has the revision 0.
func (l *Log) readCursor(ctx context.Context, key string) (cursorValue, stored, error) {
	var value cursorValue
	m, err := l.entry(ctx, Cursors, key)
	if errors.Is(err, errUnreadable) {
		return value, stored{}, unreadableCursor(err)
	}
	if err != nil || m.Seq == 0 {
		return value, m, err
	}
	if err := json.Unmarshal(m.Data, &value); err != nil {
		return value, stored{}, unreadableCursor(fmt.Errorf("value of key %q: %w", key, err))
	}
	return value, m, nil
}

// ListCursors returns all cursors by name, including damaged ones.
func (l *Log) ListCursors(ctx context.Context) ([]CursorState, error) {
	ctx, cancel := deadline(ctx, DefaultAppend)
	defer cancel()
	var found []CursorState
	err := l.retry(concerning(ctx, ofCursor("")), func(ctx context.Context) error {
		found = nil
		if err := l.known(ctx); err != nil {
			return err
		}
		keys, _, err := l.keys(ctx, Cursors)
		if err != nil {
			return err
		}
		known, _, err := l.keys(ctx, Witnesses)
		if err != nil {
			return err
		}
		for _, key := range append(keys, known...) {
			c, err := l.cursorState(ctx, key)
			if err != nil {
				return err
			}
			if c.Name != "" && !slices.ContainsFunc(found, func(o CursorState) bool { return o.Name == c.Name }) {
				found = append(found, c)
			}
		}
		return ctx.Err()
	})
	if err != nil {
		return nil, fmt.Errorf("list the cursors at %s: %w", l.opts.where(), err)
	}
	slices.SortFunc(found, func(a, b CursorState) int { return cmp.Compare(a.Name, b.Name) })
	return found, nil
}

// cursorState returns the cursor of a key. Its name is empty if it was removed.
func (l *Log) cursorState(ctx context.Context, key string) (CursorState, error) {
	value, m, err := l.readCursor(ctx, key)
	if err == nil && m.Seq == 0 {
		known, kerr := l.witnessed(ctx, key)
		if !known {
			return CursorState{}, kerr
		}
		err = lostCursor()
	}
	if errors.Is(err, ErrCursorDamaged) {
		name, derr := events.DecodeName(strings.ReplaceAll(key, "=", "%"))
		if derr != nil {
			return CursorState{}, fmt.Errorf("key %q of bucket %s: %w", key, Cursors, derr)
		}
		return CursorState{Name: name, Damage: err}, nil
	}
	return CursorState{Name: value.Name, Sequence: value.Sequence, Moved: m.Time}, err
}

// RemoveCursor removes a cursor and reports whether there was one. It also removes a
// cursor that is lost or ahead of the log, but not one whose value the server cannot
// read.
func (l *Log) RemoveCursor(ctx context.Context, name string) (found bool, err error) {
	c, err := l.Cursor(ctx, name)
	if err != nil && !errors.Is(err, ErrCursorDamaged) || err == nil && c.revision == 0 {
		return false, err
	}
	ctx, cancel := deadline(ctx, DefaultAppend)
	defer cancel()
	err = l.retry(concerning(ctx, ofCursor(name)), func(ctx context.Context) error {
		if err := l.known(ctx); err != nil {
			return err
		}
		_, m, err := l.readCursor(ctx, bucketKey(name))
		if err != nil {
			return err
		}
		if err := l.forgetWitness(ctx, name); err != nil || m.Seq == 0 {
			return err
		}
		kv, err := l.bucket(ctx, Cursors, cursorsAre)
		if err != nil {
			return err
		}
		return again(kv.Delete(ctx, bucketKey(name), jetstream.LastRevision(m.Seq)))
	})
	if err != nil {
		return false, fmt.Errorf("remove cursor %q at %s: %w", name, l.opts.where(), err)
	}
	return true, nil
}

// bucketKey encodes a name in the characters that a key may have.
func bucketKey(name string) string {
	return strings.ReplaceAll(events.EncodeName(name), "%", "=")
}

// bucket opens a bucket. It creates a missing bucket with as many replicas as the log.
func (l *Log) bucket(ctx context.Context, name, description string) (jetstream.KeyValue, error) {
	kv, err := l.js.KeyValue(ctx, name)
	if !errors.Is(err, jetstream.ErrBucketNotFound) {
		return kv, err
	}
	info, err := l.ours(ctx)
	if err != nil {
		return nil, err
	}
	return l.js.CreateKeyValue(ctx, jetstream.KeyValueConfig{
		Bucket:      name,
		Description: description,
		History:     1,
		Storage:     jetstream.FileStorage,
		Replicas:    info.Config.Replicas,
	})
}

// Witnesses is the bucket that records, apart from the cursors, which cursors exist. A
// key is that of a cursor, a value is
//
//	{"name": "alerts"}
//
// A witness is written after its cursor and removed before it. A witness without a
// cursor therefore proves that the cursor was lost. Treating it as new would skip the
// events after its position.
//
//	         CKPT_CURSORS    CKPT_CURSOR_WITNESSES
//	move     1 alerts ────▶  2 alerts                acknowledged after both
//	remove   2 (mark)  ◀──── 1 (mark)
const Witnesses = "CKPT_CURSOR_WITNESSES"

const (
	witnessStream = "KV_" + Witnesses
	witnessesAre  = "which cursors a checkpoint store has"
)

// ErrCursorDamaged reports that a cursor was moved and is now unreadable, or is ahead
// of the log.
var ErrCursorDamaged = problem.New(problem.Damage, "damaged cursor")

type witnessValue struct {
	Name string `json:"name"`
}

// lostCursor returns the error of a cursor that is missing although it was moved. It
// can be removed.
func lostCursor() error {
	return fmt.Errorf("%w: it was moved, and is gone: restore log/ from a copy, or forget it by `ckptstore events cursors rm NAME` and follow again, with --from at the event to resume from", ErrCursorDamaged)
}

// unreadableCursor returns the error of a cursor that blocks its key: the server
// acknowledges no write over a value that it cannot read.
func unreadableCursor(why error) error {
	return fmt.Errorf("%w: %w: restore log/ from a copy; or stop the log's server, delete its directory %s, which loses all cursors, and forget each by `ckptstore events cursors rm NAME`", ErrCursorDamaged, why, cursorStream)
}

// entry reads the value of a key of a bucket once. A missing or removed key has the
// sequence 0. A key that the bucket counts but cannot return is damage: the server
// skips values whose checksums do not match.
func (l *Log) entry(ctx context.Context, bucket, key string) (stored, error) {
	subject := "$KV." + bucket + "." + key
	m, err := l.getStored(ctx, "KV_"+bucket, msgGet{LastFor: subject})
	if hasCode(err, codeNoStream) {
		return stored{}, nil
	}
	if errors.Is(err, errNoMessage) {
		state, serr := l.bucketState(ctx, bucket, subject)
		if serr == nil && len(state.Subjects) > 0 {
			// It may have been written in between.
			m, err = l.getStored(ctx, "KV_"+bucket, msgGet{LastFor: subject})
		}
		switch {
		case serr != nil:
			return stored{}, serr
		case err == nil:
		case !errors.Is(err, errNoMessage):
			return stored{}, err
		case len(state.Subjects) > 0:
			return stored{}, fmt.Errorf("%w: bucket %s has the key %s, and its value cannot be read", errUnreadable, bucket, key)
		default:
			return stored{}, nil
		}
	}
	if err != nil {
		return stored{}, err
	}
	header, err := m.header()
	if err != nil {
		return stored{}, fmt.Errorf("%w: headers of key %s of bucket %s: %w", errUnreadable, key, bucket, err)
	}
	if header.Get("KV-Operation") != "" { // a mark of its removal
		return stored{}, nil
	}
	return m, nil
}

// errUnreadable reports a key of a bucket whose value cannot be read.
var errUnreadable = errors.New("damaged bucket")

// bucketState returns the state of a bucket and its matching subjects. A bucket that
// was never created has an empty state.
func (l *Log) bucketState(ctx context.Context, bucket, subjects string) (state jetstream.StreamState, err error) {
	s, err := l.js.Stream(ctx, "KV_"+bucket)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return state, nil
	}
	if err != nil {
		return state, err
	}
	info, err := s.Info(ctx, jetstream.WithSubjectFilter(subjects))
	if err != nil {
		return state, err
	}
	return info.State, nil
}

// keys returns the keys that a bucket counts, including those of removed and damaged
// values.
func (l *Log) keys(ctx context.Context, bucket string) ([]string, jetstream.StreamState, error) {
	state, err := l.bucketState(ctx, bucket, "$KV."+bucket+".>")
	keys := make([]string, 0, len(state.Subjects))
	for subject := range state.Subjects {
		keys = append(keys, strings.TrimPrefix(subject, "$KV."+bucket+"."))
	}
	return keys, state, err
}

// witnessed reports whether a cursor is known to have been moved. An unreadable witness
// counts.
func (l *Log) witnessed(ctx context.Context, key string) (bool, error) {
	m, err := l.entry(ctx, Witnesses, key)
	if errors.Is(err, errUnreadable) {
		return true, nil // a check reports the details
	}
	return m.Seq != 0, err
}

// witness records that a cursor of this name exists.
func (l *Log) witness(ctx context.Context, name string) error {
	kv, err := l.bucket(ctx, Witnesses, witnessesAre)
	if err != nil {
		return err
	}
	text, err := json.Marshal(witnessValue{Name: name})
	if err == nil {
		_, err = kv.Create(ctx, bucketKey(name), text)
	}
	if moved(err) {
		return nil // it exists already
	}
	return err
}

// forgetWitness removes the record that witness wrote.
func (l *Log) forgetWitness(ctx context.Context, name string) error {
	m, err := l.entry(ctx, Witnesses, bucketKey(name))
	if errors.Is(err, errUnreadable) {
		return fmt.Errorf("%w: stop the log's server and delete its directory %s: each witness is written again when its cursor is next followed", err, witnessStream)
	}
	if err != nil || m.Seq == 0 {
		return err
	}
	kv, err := l.bucket(ctx, Witnesses, witnessesAre)
	if err != nil {
		return err
	}
	return again(kv.Delete(ctx, bucketKey(name), jetstream.LastRevision(m.Seq)))
}

// again turns the refusal of a write to a moved entry into an error that makes the
// caller look again.
func again(err error) error {
	if moved(err) {
		return fmt.Errorf("%w: %w", errAgain, err)
	}
	return err
}

// CreateBuckets creates the missing buckets of leases and cursors, each with as many
// copies as the log has, so that clients need no permission to create streams. It
// returns [ErrUnsafe] for an existing bucket with another number of copies. The log
// must be open.
func (l *Log) CreateBuckets(ctx context.Context) error {
	ctx, cancel := deadline(ctx, DefaultAppend)
	defer cancel()
	all := func(subject string) bool {
		return subject == apiAccount || strings.HasPrefix(subject, "$JS.API.") && strings.Contains(subject, ".KV_CKPT_")
	}
	patience := newPeerPatience()
	err := l.retry(concerning(ctx, all), func(ctx context.Context) error {
		info, err := l.ours(ctx)
		if err != nil {
			return err
		}
		for _, b := range []struct{ name, is string }{{Leases, leasesAre}, {Cursors, cursorsAre}, {Witnesses, witnessesAre}} {
			kv, err := l.bucket(ctx, b.name, b.is)
			if patience.again(err) {
				return fmt.Errorf("%w: %w", errAgain, err)
			}
			if err != nil {
				return err
			}
			status, err := kv.Status(ctx)
			if err != nil {
				return err
			}
			got, ok := status.(*jetstream.KeyValueBucketStatus)
			if ok && got.StreamInfo().Config.Replicas != info.Config.Replicas {
				return fmt.Errorf("%w: bucket %s has %d copies and the log has %d: run `nats stream edit KV_%s --replicas %d`",
					ErrUnsafe, b.name, got.StreamInfo().Config.Replicas, info.Config.Replicas, b.name, info.Config.Replicas)
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("make the buckets of the log at %s: %w", l.opts.where(), err)
	}
	return nil
}
