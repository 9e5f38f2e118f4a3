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
// Each opening has its own token, by which a write whose acknowledgement was
// lost is told from another subscriber's.
const Cursors = "CKPT_CURSORS"

const (
	cursorStream = "KV_" + Cursors
	cursorsAre   = "how far the subscribers of a checkpoint store have come"
)

// ErrCursorMoved says that another subscriber moved the cursor, or it was removed.
var ErrCursorMoved = problem.New(problem.Conflict, "the cursor was moved by somebody else")

type cursorValue struct {
	Name     string `json:"name"`
	Sequence uint64 `json:"sequence"`
	Token    string `json:"token"`
}

// CursorState is a cursor as it stands.
type CursorState struct {
	Name     string    `json:"name"`
	Sequence uint64    `json:"sequence"` // of the last event that was handled
	Moved    time.Time `json:"moved"`    // by the server's clock
	Damage   error     `json:"-"`        // why it cannot be read; then only Name is known
}

// Cursor is how far a subscriber has come, kept beside the log, so that it
// goes on from any machine. Its methods may be called concurrently.
type Cursor struct {
	l    *Log
	kv   jetstream.KeyValue
	name string

	mu       sync.Mutex
	token    string
	sequence uint64
	revision uint64 // 0: there is no such key yet

	unwitnessed bool // its witness is to be written after it
}

// Cursor opens the cursor called name. One that was never moved stands at 0
// and is not listed. Opening keeps nobody else from it: see [Log.Lease]. But
// of two that opened it, the second to move it is told so.
func (l *Log) Cursor(ctx context.Context, name string) (*Cursor, error) {
	if name == "" {
		return nil, errors.New("open a cursor: it needs a name")
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
	case !known: // its first move was cut, or knew nothing of witnesses
		if err := c.l.witness(ctx, c.name); err != nil {
			return err
		}
	}
	info, err := c.l.ours(ctx)
	if err != nil {
		return err
	}
	if last := info.State.LastSeq; value.Sequence > last {
		return fmt.Errorf("%w: it stands at event %d, and the log ends at %d, so the log was rolled back: restore log/ from a newer copy, or forget the cursor by `ckptstore events cursors rm NAME`", ErrCursorDamaged, value.Sequence, last)
	}
	return nil
}

// Sequence is the last event that was handled, 0 for none.
func (c *Cursor) Sequence() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.sequence
}

// Move says that all events up to sequence are handled. It is durable on
// return. [ErrCursorMoved] says that this subscriber is not the only one.
// Other errors are safe to retry.
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

// readCursor asks once; a cursor that is not there has the revision 0.
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

// ListCursors are all cursors by name, also the damaged ones.
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

// cursorState is the cursor of a key, without a name when it was removed.
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

// RemoveCursor forgets a cursor and reports whether there was one: also one that
// is gone or ahead of the log, and not one whose value the server cannot read.
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

// bucketKey spells a name in the characters that a key may have.
func bucketKey(name string) string {
	return strings.ReplaceAll(events.EncodeName(name), "%", "=")
}

// bucket opens a bucket and makes it, with as many replicas as the log has,
// when there is none.
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

// Witnesses is the bucket that knows which cursors there are, apart from them.
// A key is that of a cursor, a value is
//
//	{"name": "alerts"}
//
// A witness is written after its cursor and removed before it. So a witness
// without a cursor says that the cursor was lost: whoever took it for a new one
// would leave out the events since it stood somewhere.
//
//	         CKPT_CURSORS    CKPT_CURSOR_WITNESSES
//	move     1 alerts ────▶  2 alerts                acknowledged after both
//	remove   2 (mark)  ◀──── 1 (mark)
const Witnesses = "CKPT_CURSOR_WITNESSES"

const (
	witnessStream = "KV_" + Witnesses
	witnessesAre  = "which cursors a checkpoint store has"
)

// ErrCursorDamaged says that a cursor was moved and cannot be read any more, or
// is ahead of the log.
var ErrCursorDamaged = problem.New(problem.Damage, "damaged cursor")

type witnessValue struct {
	Name string `json:"name"`
}

// lostCursor is the error of a cursor that is gone: it can be removed.
func lostCursor() error {
	return fmt.Errorf("%w: it was moved, and is gone: restore log/ from a copy, or forget it by `ckptstore events cursors rm NAME` and follow again, with --from where it should go on", ErrCursorDamaged)
}

// unreadableCursor is the error of a cursor that is in the way: the server
// acknowledges no write over a value that it cannot read.
func unreadableCursor(why error) error {
	return fmt.Errorf("%w: %w: restore log/ from a copy; or stop the log's server, delete its directory %s, which loses all cursors, and forget each by `ckptstore events cursors rm NAME`", ErrCursorDamaged, why, cursorStream)
}

// entry asks once for the value of a key of a bucket. A key that is not there,
// or was removed, has the sequence 0. One that the bucket counts and cannot
// show is damage: the server jumps over what its checksums do not fit.
func (l *Log) entry(ctx context.Context, bucket, key string) (stored, error) {
	subject := "$KV." + bucket + "." + key
	m, err := l.getStored(ctx, "KV_"+bucket, msgGet{LastFor: subject})
	if hasCode(err, codeNoStream) {
		return stored{}, nil
	}
	if errors.Is(err, errNoMessage) {
		state, serr := l.bucketState(ctx, bucket, subject)
		if serr == nil && len(state.Subjects) > 0 {
			// It may have come in between.
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
	if header.Get("KV-Operation") != "" { // a mark that it was removed
		return stored{}, nil
	}
	return m, nil
}

// errUnreadable: a bucket has a key whose value cannot be read.
var errUnreadable = errors.New("damaged bucket")

// bucketState is the state of a bucket, with its subjects that match. There is
// no state of a bucket that was never made.
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

// keys are those that a bucket counts, also of removed values and of damaged ones.
func (l *Log) keys(ctx context.Context, bucket string) ([]string, jetstream.StreamState, error) {
	state, err := l.bucketState(ctx, bucket, "$KV."+bucket+".>")
	keys := make([]string, 0, len(state.Subjects))
	for subject := range state.Subjects {
		keys = append(keys, strings.TrimPrefix(subject, "$KV."+bucket+"."))
	}
	return keys, state, err
}

// witnessed reports whether a cursor is known to have been moved: also by a
// witness that cannot be read.
func (l *Log) witnessed(ctx context.Context, key string) (bool, error) {
	m, err := l.entry(ctx, Witnesses, key)
	if errors.Is(err, errUnreadable) {
		return true, nil // a check says more
	}
	return m.Seq != 0, err
}

// witness notes that there is a cursor of this name.
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
		return nil // it is there
	}
	return err
}

// forgetWitness removes what witness wrote.
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

// again makes the refusal of a write to an entry that has moved a reason to look
// at it again.
func again(err error) error {
	if moved(err) {
		return fmt.Errorf("%w: %w", errAgain, err)
	}
	return err
}

// CreateBuckets makes the buckets of leases and cursors that are not there, each
// with as many copies as the log has, so that clients need no permission to
// make streams. A bucket that is there with other copies is [ErrUnsafe]. The log
// must be open.
func (l *Log) CreateBuckets(ctx context.Context) error {
	ctx, cancel := deadline(ctx, DefaultAppend)
	defer cancel()
	all := func(subject string) bool {
		return subject == apiAccount || strings.HasPrefix(subject, "$JS.API.") && strings.Contains(subject, ".KV_CKPT_")
	}
	err := l.retry(concerning(ctx, all), func(ctx context.Context) error {
		info, err := l.ours(ctx)
		if err != nil {
			return err
		}
		for _, b := range []struct{ name, is string }{{Leases, leasesAre}, {Cursors, cursorsAre}, {Witnesses, witnessesAre}} {
			kv, err := l.bucket(ctx, b.name, b.is)
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
