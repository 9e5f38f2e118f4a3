package jetlog

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

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
