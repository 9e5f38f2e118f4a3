package jetlog

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/events"
	"github.com/nats-io/nats.go/jetstream"
)

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
