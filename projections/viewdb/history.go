package viewdb

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2"

	"github.com/ckptstore/ckptstore/projections"
)

// History answers queries as of any event of the log. The views have the rows as of every so
// many events, their keyframes: see [keyframes]. A query folds the events behind the last
// keyframe before it. Reports, which are most of a log, are in no keyframe: they are taken from
// the present views, which have each with its sequence.
//
// [History.Keep] makes the keyframes ahead, in the background. A query makes those that it
// lacks itself. Keyframes outlive the process, and go with the views.
//
// On disk, a row has one version for each keyframe at which it had changed; there are at
// most 4,096 keyframes, whatever the length of the log. In memory, a query or a stretch of Keep
// holds the rows that its few thousand events changed, and results of a few queries are kept.
// All methods may be called concurrently; queries fold one at a time, while Keep continues.
type History struct {
	views current
	log   Source

	every uint64 // events between two keyframes of new views
	most  uint64 // keyframes

	building chan struct{} // held while keyframes are made
	folding  chan struct{} // held while a query folds
	wanted   atomic.Int64  // when a query last lacked keyframes, Unix nanoseconds

	mu     sync.Mutex
	recent []moment // results of queries, the newest last
}

// current is the present state of the views.
type current interface {
	// ViewAt calls read with one consistent state, that of the log at cursor. The reader must be
	// that of a [DB].
	ViewAt(read func(r projections.Reader, cursor uint64) error) error
	// Wait returns when the state has the event at seq.
	Wait(ctx context.Context, seq uint64) error
}

// moment holds the rows as of an event that differ from those of a keyframe, as an overlay has
// them. They do not change.
type moment struct {
	frame, at uint64
	rows      *projections.Memory
}

// Bounds of a history.
const (
	keyframeEvents = 1000 // events between two keyframes: a query folds half of them on average
	mostKeyframes  = 4096 // with more, the distance doubles
	mostRecent     = 8    // results of queries, for those a little later in the log
	// stretchFrames is how many keyframes are made with the views held.
	stretchFrames = 8
	// thinBatch is how many versions of rows are removed in one batch.
	thinBatch = 4096
	// readyFrames is how many keyframes may be missing for a query that is still quick.
	readyFrames = 8
)

// Times of making keyframes ahead.
const (
	wantedEvery = time.Second      // a pause ends within it when a query lacks keyframes
	wantedFor   = 30 * time.Second // without pauses, since a query lacked keyframes
)

// NewHistory returns the history of views and the log that they follow.
func NewHistory(views current, log Source) *History {
	return &History{
		views: views, log: log, every: keyframeEvents, most: mostKeyframes,
		building: make(chan struct{}, 1), folding: make(chan struct{}, 1),
	}
}

// At calls read with the rows as of the event at seq: those of a [Replay] up to it. The views
// must have that event. The reader is valid during the call.
func (h *History) At(ctx context.Context, seq uint64, read func(projections.Reader) error) error {
	if err := h.reach(ctx, seq); err != nil {
		return err
	}
	return h.views.ViewAt(func(live projections.Reader, cursor uint64) (err error) {
		if seq > cursor {
			return fmt.Errorf("%w: the state as of event %d: the views end at %d", projections.ErrNotFound, seq, cursor)
		}
		o, err := h.fold(ctx, live, seq)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, o.close()) }()
		return read(projections.NewThen(o, live, seq))
	})
}

// Progress returns up to which event there are keyframes, the last event of the views, and
// whether a query as of the event at seq folds few events. If it does not, [History.Keep]
// stops pausing for half a minute.
func (h *History) Progress(seq uint64) (at, end uint64, quick bool, err error) {
	err = h.views.ViewAt(func(live projections.Reader, cursor uint64) error {
		_, k, err := h.keyframes(live)
		at, end, quick = k.At, cursor, seq < k.At+readyFrames*k.Every
		return err
	})
	if err == nil && !quick {
		h.wanted.Store(time.Now().UnixNano())
	}
	return at, end, quick, err
}

// Keep makes the keyframes up to the present and then those of later events, until ctx ends,
// whose error it then returns. It uses at most half of the time of one processor, unless a
// query waits. Only one call works at a time. What it has made stays: another call continues.
func (h *History) Keep(ctx context.Context) error {
	for {
		began := time.Now()
		next, err := h.stretch(ctx, math.MaxUint64)
		if err != nil {
			return err
		}
		if next == 0 {
			if err := h.rest(ctx, time.Since(began)); err != nil {
				return err
			}
			continue
		}
		if err := h.views.Wait(ctx, next); err != nil {
			return err
		}
	}
}

// rest pauses, until a query lacks keyframes.
func (h *History) rest(ctx context.Context, pause time.Duration) error {
	for end := time.Now().Add(pause); ; {
		left := time.Until(end)
		if left <= 0 || time.Since(time.Unix(0, h.wanted.Load())) < wantedFor {
			return ctx.Err()
		}
		select {
		case <-time.After(min(left, wantedEvery)):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// reach makes the keyframes up to a sequence, or up to the end of the views if that is before
// it.
func (h *History) reach(ctx context.Context, seq uint64) error {
	for {
		missing := false
		err := h.views.ViewAt(func(live projections.Reader, cursor uint64) error {
			_, k, err := h.keyframes(live)
			missing = min(seq, cursor) >= k.At+2*k.Every
			return err
		})
		if err != nil || !missing {
			return err
		}
		if next, err := h.stretch(ctx, seq); err != nil || next > 0 {
			return err
		}
	}
}

// keyframes returns the database of a reader of the views, and its keyframes.
func (h *History) keyframes(live projections.Reader) (reader, keyframes, error) {
	r, ok := live.(reader)
	if !ok || r.db == nil {
		return r, keyframes{}, fmt.Errorf("%T is not a reader of a view", live)
	}
	k, err := readKeyframes(r.from, h.every)
	return r, k, err
}

// take waits for a turn.
func take(ctx context.Context, turn chan struct{}) (done func(), err error) {
	select {
	case turn <- struct{}{}:
		return func() { <-turn }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// stretch makes the next few keyframes up to a sequence. It holds the views for the time of
// these. It returns the sequence of the keyframe after them if there is no event for it yet or
// it is behind until, and else 0.
func (h *History) stretch(ctx context.Context, until uint64) (next uint64, err error) {
	done, err := take(ctx, h.building)
	if err != nil {
		return 0, err
	}
	defer done()
	err = h.views.ViewAt(func(live projections.Reader, cursor uint64) (err error) {
		r, k, err := h.keyframes(live)
		if err != nil {
			return err
		}
		ctx, stop := r.db.during(ctx)
		defer stop()
		if k.Thinned < k.Every {
			if err := thin(r.db.pebble, r.from, k.Every, thinBatch, ctx.Err); err != nil {
				return fmt.Errorf("thin the keyframes: %w", err)
			}
			k.Thinned = k.Every
			return r.db.keep(nil, k)
		}
		most := min(until, cursor)
		end := min(most, k.At+stretchFrames*k.Every)
		if end < k.At+k.Every {
			next = k.At + k.Every
			return nil
		}
		end -= end % k.Every
		rows := newChanges(&frame{iterators{from: r.from}, k.At})
		defer func() { err = errors.Join(err, rows.close()) }()
		then := projections.NewThen(rows, live, k.At)
		err = h.each(ctx, then, k.At, end, func(at uint64) error {
			if at != k.At+k.Every {
				return nil
			}
			k.At = at
			if at/k.Every >= h.most && at%(2*k.Every) == 0 {
				k.Every *= 2
			}
			return r.db.keep(rows, k)
		})
		return err
	})
	return next, err
}

// each folds the events after one into a table, and calls then behind each.
func (h *History) each(ctx context.Context, table *projections.Then, after, until uint64, then func(at uint64) error) error {
	at := after
	if at == until {
		return nil
	}
	for r, err := range h.log.Read(ctx, at+1, until) {
		if err == nil {
			err = check(r, at, "")
		}
		if err == nil {
			err = table.Apply(r)
		}
		if err == nil {
			at = r.Sequence
			err = then(at)
		}
		if err != nil {
			return fmt.Errorf("fold the log up to event %d: %w", until, err)
		}
		if at == until {
			return nil
		}
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("fold the log up to event %d: stopped after %d: %w", until, at, err)
	}
	return fmt.Errorf("fold the log up to event %d: it was read up to %d only", until, at)
}

// keep writes a keyframe; without rows only the list of the keyframes.
func (db *DB) keep(rows *changes, k keyframes) (err error) {
	b := db.pebble.NewBatch()
	defer func() { err = errors.Join(err, b.Close()) }()
	if rows != nil {
		if err := rows.write(b, k.At); err != nil {
			return err
		}
	}
	if err := k.write(b); err != nil {
		return err
	}
	if err := b.Commit(pebble.NoSync); err != nil {
		return fmt.Errorf("write the keyframe at event %d: %w", k.At, err)
	}
	return nil
}

// during returns a context that ends with the view, too.
func (db *DB) during(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(db.life, cancel)
	return ctx, func() {
		stop()
		cancel()
	}
}

// fold returns the rows as of an event, without reports and rollups. They must not be changed,
// but for being closed.
func (h *History) fold(ctx context.Context, live projections.Reader, seq uint64) (_ *overlay, err error) {
	r, k, err := h.keyframes(live)
	if err != nil {
		return nil, err
	}
	done, err := take(ctx, h.folding)
	if err != nil {
		return nil, err
	}
	defer done()
	ctx, stop := r.db.during(ctx)
	defer stop()
	from := h.nearest(k, seq)
	o := &overlay{behind: &frame{iterators{from: r.from}, from.frame}, rows: from.rows}
	if from.at == seq {
		return o, nil
	}
	err = h.each(ctx, projections.NewThen(o, live, from.at), from.at, seq, func(uint64) error { return nil })
	if err != nil {
		return nil, errors.Join(err, o.close())
	}
	h.remember(moment{from.frame, seq, o.rows})
	return o, nil
}

// nearest returns the state to fold on from: the last one at or before a sequence. Its rows
// are the caller's if it is before the sequence.
func (h *History) nearest(k keyframes, seq uint64) moment {
	h.mu.Lock()
	defer h.mu.Unlock()
	best := moment{frame: k.before(seq), at: k.before(seq)}
	for _, m := range h.recent {
		if m.at <= seq && m.at > best.at && k.has(m.frame) {
			best = m
		}
	}
	switch {
	case best.rows == nil:
		best.rows = projections.NewMemory()
	case best.at < seq:
		best.rows = best.rows.Clone()
	}
	return best
}

// remember keeps the result of a query for those that come next.
func (h *History) remember(m moment) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.recent = append(h.recent, m)
	if n := len(h.recent) - mostRecent; n > 0 {
		h.recent = slices.Delete(h.recent, 0, n)
	}
}
