package viewdb

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sync"

	"github.com/ckptstore/ckptstore/projections"
)

// History answers queries as of any event of the log. It keeps the rows as of every so many
// events, its keyframes, and folds the few events behind the last keyframe. Reports, which
// are most of a log, are not kept: they are taken from the present views, which have each
// with its sequence.
//
// Keyframes share the rows that do not change between them. Their memory is that of all rows
// but reports, once, and what changed between them. The first query folds the log up to its
// sequence, and each later one at most the events between two keyframes. All methods may be
// called concurrently; they fold one at a time.
type History struct {
	views current
	log   Source

	turn   chan struct{}
	mu     sync.Mutex
	every  uint64  // events between two keyframes
	most   int     // keyframes
	frames []frame // ascending; the first is the empty one at 0
	recent []frame // results of queries, the newest last
	behind uint64  // sequence of the newest keyframe
}

// current is the present state of the views.
type current interface {
	// ViewAt calls read with one consistent state, that of the log at cursor.
	ViewAt(read func(r projections.Reader, cursor uint64) error) error
}

// frame holds the rows as of an event, without reports and rollups. They do not change.
type frame struct {
	at   uint64
	rows *projections.Memory
}

// Bounds of a history.
const (
	keyframeEvents = 2500 // events between two keyframes: a query folds half of them on average
	mostKeyframes  = 1024 // with more, every second one is dropped, and the distance doubles
	mostRecent     = 8    // results of queries, for those a little later in the log
)

// NewHistory returns the history of views and the log that they follow.
func NewHistory(views current, log Source) *History {
	return &History{
		views: views, log: log, turn: make(chan struct{}, 1), every: keyframeEvents, most: mostKeyframes,
		frames: []frame{{0, projections.NewMemory()}},
	}
}

// At calls read with the rows as of the event at seq: those of a [Replay] up to it. The views
// must have that event. The reader is valid during the call.
func (h *History) At(ctx context.Context, seq uint64, read func(projections.Reader) error) error {
	if err := h.reach(ctx, seq); err != nil {
		return err
	}
	return h.views.ViewAt(func(live projections.Reader, cursor uint64) error {
		if seq > cursor {
			return fmt.Errorf("%w: the state as of event %d: the views end at %d", projections.ErrNotFound, seq, cursor)
		}
		rows, err := h.fold(ctx, live, seq)
		if err != nil {
			return err
		}
		return read(projections.NewThen(rows, live, seq))
	})
}

// Build makes the keyframes up to the present, so that no query has to.
func (h *History) Build(ctx context.Context) error { return h.reach(ctx, math.MaxUint64) }

// reach makes the keyframes up to a sequence, or up to the end of the views if that is before
// it. It holds the views only for the time of a few keyframes.
func (h *History) reach(ctx context.Context, seq uint64) error {
	for more := true; more; {
		err := h.views.ViewAt(func(live projections.Reader, cursor uint64) error {
			h.mu.Lock()
			next := h.behind + h.every
			h.mu.Unlock()
			if more = next <= min(seq, cursor); !more {
				return nil
			}
			_, err := h.fold(ctx, live, next)
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// fold returns the rows as of an event. They must not be changed.
func (h *History) fold(ctx context.Context, live projections.Reader, seq uint64) (*projections.Memory, error) {
	select {
	case h.turn <- struct{}{}:
		defer func() { <-h.turn }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	from := h.nearest(seq)
	if from.at == seq {
		return from.rows, nil
	}
	then := projections.NewThen(from.rows.Clone(), live, from.at)
	at := from.at
	for r, err := range h.log.Read(ctx, from.at+1, seq) {
		if err == nil {
			err = check(r, at, "")
		}
		if err == nil {
			err = then.Apply(r)
		}
		if err != nil {
			return nil, fmt.Errorf("fold the log up to event %d: %w", seq, err)
		}
		if at = r.Sequence; h.due(at) {
			h.keep(frame{at, then.Rows().Clone()})
		}
		if at == seq {
			h.remember(frame{at, then.Rows()})
			return then.Rows(), nil
		}
	}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("fold the log up to event %d: stopped after %d: %w", seq, at, err)
	}
	return nil, fmt.Errorf("fold the log up to event %d: it was read up to %d only", seq, at)
}

// nearest returns the last frame at or before a sequence. Its rows are not written to.
func (h *History) nearest(seq uint64) (best frame) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, f := range slices.Concat(h.frames, h.recent) {
		if f.at <= seq && (f.at >= best.at || best.rows == nil) {
			best = f
		}
	}
	return best
}

// due reports whether a sequence is that of the next keyframe.
func (h *History) due(at uint64) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return at == h.behind+h.every
}

// keep adds a keyframe.
func (h *History) keep(f frame) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.frames, h.behind = append(h.frames, f), f.at
	if len(h.frames) <= h.most {
		return
	}
	h.every *= 2
	kept := h.frames[:0]
	for i, f := range h.frames {
		if i%2 == 0 {
			kept = append(kept, f)
		}
	}
	clear(h.frames[len(kept):])
	h.frames = kept
}

// remember keeps the result of a query for those that come next.
func (h *History) remember(f frame) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.recent = append(h.recent, f)
	if n := len(h.recent) - mostRecent; n > 0 {
		h.recent = slices.Delete(h.recent, 0, n)
	}
}
