package api

import (
	"context"
	"errors"
	"time"
)

// Health is the state of what a store stands on.
type Health struct {
	Disk    *Disk    `json:"disk,omitempty"` // of the checkpoints; absent for a bucket, and as of a sequence
	Cursors []Cursor `json:"cursors"`        // of subscribers, by name
	Problem string   `json:"problem,omitempty"`
}

// Disk is the space where the checkpoints are, in bytes.
type Disk struct {
	Free uint64 `json:"free"` // available to the server
	Size uint64 `json:"size"` // free and used
}

// Cursor is the place of a subscriber in the log.
type Cursor struct {
	Name     string    `json:"name"`
	Sequence uint64    `json:"sequence"` // of the last event that it has handled
	Lag      uint64    `json:"lag"`      // events after it
	MovedAt  time.Time `json:"moved_at"`
}

// readHealth adds the read of the health of the store.
func (h *Handler) readHealth() {
	get(h, "/health", "get-health", "store", "Describe the disk and the subscribers",
		"As of a sequence, only the cursors are described, and as they are now.", h.health)
}

func (h *Handler) health(ctx context.Context, from *at, _ *OfStore) (Health, error) {
	out := Health{Cursors: []Cursor{}}
	from.files = true
	if !from.Past {
		within, cancel := context.WithTimeout(ctx, diskLimit)
		defer cancel()
		use, err := h.store.Data.Usage(within)
		switch {
		case err == nil:
			out.Disk = &Disk{use.Free, use.Size}
		case !errors.Is(err, errors.ErrUnsupported):
			out.Problem = err.Error()
		}
	}
	if h.store.Log == nil {
		return out, nil
	}
	list, err := h.store.Log.ListCursors(ctx)
	if err != nil {
		return out, err
	}
	last, err := h.last(ctx)
	for _, c := range list {
		if c.Damage != nil {
			out.Problem = "cursor " + c.Name + ": " + c.Damage.Error()
			continue
		}
		out.Cursors = append(out.Cursors, Cursor{Name: c.Name, Sequence: c.Sequence, Lag: last - min(last, c.Sequence), MovedAt: c.Moved.UTC()})
	}
	return out, err
}
