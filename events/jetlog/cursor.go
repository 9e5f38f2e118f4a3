package jetlog

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nuid"
)

// Cursors is the bucket of cursors. A key is a cursor's name, a value is
//
//	{"name": "alerts", "sequence": 1200, "token": "…"}
//
// Each opening has its own token, by which a write whose acknowledgement was
// lost is told from another subscriber's.
const Cursors = "CKPT_CURSORS"

const cursorStream = "KV_" + Cursors

// ErrCursorMoved says that another subscriber moved the cursor, or it was removed.
var ErrCursorMoved = errors.New("the cursor was moved by somebody else")

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
	c := &Cursor{l: l, name: name, token: nuid.Next()}
	err := l.retry(ctx, func(ctx context.Context) (err error) {
		if err = l.known(ctx); err != nil {
			return err
		}
		if c.kv, err = l.bucket(ctx, Cursors, "how far the subscribers of a checkpoint store have come"); err != nil {
			return err
		}
		value, m, err := l.readCursor(ctx, bucketKey(name))
		c.sequence, c.revision = value.Sequence, m.Seq
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open cursor %q at %s: %w", name, l.opts.where(), err)
	}
	return c, nil
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
	c.mu.Lock()
	defer c.mu.Unlock()
	ctx, cancel := deadline(ctx, DefaultAppend)
	defer cancel()
	text, err := json.Marshal(cursorValue{Name: c.name, Sequence: sequence, Token: c.token})
	if err != nil {
		return fmt.Errorf("encode cursor %q: %w", c.name, err)
	}
	err = c.l.retry(ctx, func(ctx context.Context) error {
		if err := c.l.known(ctx); err != nil {
			return err
		}
		next, err := c.write(ctx, text)
		if moved(err) {
			if err = c.reread(ctx); err == nil {
				next, err = c.write(ctx, text)
			}
		}
		if err == nil {
			c.revision, c.sequence = next, sequence
		}
		return err
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
	m, err := l.getStored(ctx, cursorStream, msgGet{LastFor: "$KV." + Cursors + "." + key})
	if errors.Is(err, errNoMessage) {
		return value, stored{}, nil
	}
	if err != nil {
		return value, stored{}, err
	}
	header, err := m.header()
	if err != nil {
		return value, stored{}, fmt.Errorf("headers of cursor %q: %w", key, err)
	}
	if header.Get("KV-Operation") != "" { // a mark that it was removed
		return value, stored{}, nil
	}
	if err := json.Unmarshal(m.Data, &value); err != nil {
		return value, stored{}, fmt.Errorf("value of cursor %q: %w", key, err)
	}
	return value, m, nil
}

// ListCursors are all cursors by name.
func (l *Log) ListCursors(ctx context.Context) ([]CursorState, error) {
	ctx, cancel := deadline(ctx, DefaultAppend)
	defer cancel()
	var found []CursorState
	err := l.retry(ctx, func(ctx context.Context) error {
		found = nil
		if err := l.known(ctx); err != nil {
			return err
		}
		kv, err := l.js.KeyValue(ctx, Cursors)
		if errors.Is(err, jetstream.ErrBucketNotFound) {
			return nil
		}
		if err != nil {
			return err
		}
		keys, err := kv.ListKeys(ctx)
		if err != nil {
			return err
		}
		defer func() { _ = keys.Stop() }()
		for key := range keys.Keys() {
			value, m, err := l.readCursor(ctx, key)
			if err != nil {
				return err
			}
			if m.Seq != 0 {
				found = append(found, CursorState{Name: value.Name, Sequence: value.Sequence, Moved: m.Time})
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

// RemoveCursor forgets a cursor and reports whether there was one.
func (l *Log) RemoveCursor(ctx context.Context, name string) (found bool, err error) {
	c, err := l.Cursor(ctx, name)
	if err != nil || c.revision == 0 {
		return false, err
	}
	ctx, cancel := deadline(ctx, DefaultAppend)
	defer cancel()
	if err := l.retry(ctx, func(ctx context.Context) error { return c.kv.Delete(ctx, bucketKey(name)) }); err != nil {
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
