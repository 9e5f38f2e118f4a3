package session

import (
	"context"
	"maps"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/data"
	"golang.org/x/sync/errgroup"
)

// uploads are the uploads to an object store that have begun in the log, and that have neither
// become files nor been discarded.
type uploads struct {
	mu   sync.Mutex
	open map[rankSave][]data.Upload
}

// begin records an upload.
func (u *uploads) begin(b *events.WriteStarted) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.open == nil {
		u.open = map[rankSave][]data.Upload{}
	}
	of := rankSave{b.Checkpoint, b.Rank}
	u.open[of] = append(u.open[of], data.Upload{File: b.File, ID: b.Upload, Token: b.Token, Piece: b.PartSize})
}

// last returns the newest upload of a rank.
func (u *uploads) last(of rankSave) (data.Upload, bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if begun := u.open[of]; len(begun) > 0 {
		return begun[len(begun)-1], true
	}
	return data.Upload{}, false
}

// end forgets the uploads of ranks whose files are in place.
func (u *uploads) end(checkpoint string, ranks ...int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, rank := range ranks {
		delete(u.open, rankSave{checkpoint, rank})
	}
}

// remove forgets and returns the uploads of a save.
func (u *uploads) remove(checkpoint string) (left []data.Upload) {
	u.mu.Lock()
	defer u.mu.Unlock()
	maps.DeleteFunc(u.open, func(of rankSave, begun []data.Upload) bool {
		if of.checkpoint == checkpoint {
			left = append(left, begun...)
		}
		return of.checkpoint == checkpoint
	})
	return left
}

// uploadsOf is the [data.Uploads] of one save.
type uploadsOf struct {
	saver      *saver
	checkpoint string
}

// Began implements [data.Uploads].
func (o uploadsOf) Began(ctx context.Context, rank int, u data.Upload) error {
	s := o.saver
	return s.decisions.record(ctx, &events.WriteStarted{
		Attempt: s.decisions.attempt, Checkpoint: o.checkpoint, Rank: rank,
		File: u.File, Upload: u.ID, Token: u.Token, PartSize: u.Piece,
	})
}

// Left implements [data.Uploads].
func (o uploadsOf) Left(rank int) (data.Upload, bool) {
	return o.saver.uploads.last(rankSave{o.checkpoint, rank})
}

// discard removes what the object store has of the uploads of a save that is aborted. A
// failure costs space until a collection, or the bucket's rule for unfinished uploads, removes
// them.
func (s *saver) discard(ctx context.Context, checkpoint string) {
	ctx, cancel := context.WithTimeout(ctx, discardTimeout)
	defer cancel()
	var g errgroup.Group
	g.SetLimit(defaultWorkers())
	for _, u := range s.uploads.remove(checkpoint) {
		g.Go(func() error {
			if err := s.store.Data.Discard(ctx, s.ref(checkpoint), u); err != nil {
				s.log.Warn("upload of an aborted save not discarded; run `ckptstore gc --apply`", "checkpoint", checkpoint, "file", u.File, "error", err)
			}
			return nil
		})
	}
	_ = g.Wait() // no error
}

// discardTimeout bounds the requests for uploads that are no longer needed.
const discardTimeout = 10 * time.Second
