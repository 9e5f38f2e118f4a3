package jetlog

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/ckptstore/ckptstore/internal/problem"
)

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
