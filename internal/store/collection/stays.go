package collection

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/refs"
	"github.com/ckptstore/ckptstore/projections"
)

// references are the files of checkpoints that others name, in a store whose files have no
// links.
type references struct {
	mu     sync.Mutex
	ledger *refs.Ledger
}

// references returns those of the store for a collection; nil where files have links. A dry run
// has its own, because it supposes deletions.
func (s Store) references(dry bool) *references {
	switch {
	case s.Data.HasLinks():
		return nil
	case dry:
		return &references{}
	}
	return &s.Memory.named
}

// fold reads the log up to its present end.
func (r *references) fold(ctx context.Context, log *jetlog.Log) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ledger == nil {
		r.ledger = refs.New()
	}
	last, err := log.Last(ctx)
	if err != nil || last <= r.ledger.Sequence() {
		return err
	}
	for e, err := range log.Read(ctx, r.ledger.Sequence()+1, last) {
		if err == nil {
			err = r.ledger.Apply(e)
		}
		if err != nil {
			return fmt.Errorf("read which checkpoints name files of others: %w", err)
		}
	}
	return nil
}

// suppose changes the state as deletions would.
func (r *references) suppose(deleted []Collected) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, x := range deleted {
		r.ledger.Suppose(refNameOf(x.row))
	}
}

// kept returns the files of a checkpoint that must stay. The log was read before.
func (r *references) kept(c projections.Checkpoint) refs.Kept {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.ledger.Kept(refNameOf(c))
}

// refNameOf returns the name of a checkpoint in events.
func refNameOf(c projections.Checkpoint) refs.Ref {
	return refs.Ref{Run: c.Run, Trial: c.Trial, Checkpoint: c.ID}
}

// stays returns why files of a checkpoint stay, or "".
func stays(k refs.Kept) string {
	switch {
	case k.All:
		return "an open save may name them; collect again when it has ended"
	case len(k.By) == 1:
		return "kept for 1 later checkpoint"
	case len(k.Names) > 0:
		return fmt.Sprintf("kept for %d later checkpoints", len(k.By))
	}
	return ""
}

// whyLeft returns why files of a checkpoint stay: they are locked, or others name them.
func whyLeft(locked *object.LockedError, kept refs.Kept) string {
	switch named := stays(kept); {
	case locked == nil:
		return named
	case named == "":
		return locked.Error()
	default:
		return locked.Error() + "; " + named
	}
}

// lockedFiles are the checkpoints of which this process could remove no more, because a bucket locks
// the rest until a time. A trainer that collects after each commit would otherwise ask the bucket
// for each file of each of them, again and again. A legal hold has no time, nor has a refusal.
type lockedFiles struct {
	mu    sync.Mutex
	until map[checkpoint.Ref]time.Time
}

// lockedAtMost is how long a checkpoint is left alone: locks of some of its files may end earlier.
const lockedAtMost = time.Hour

func (l *lockedFiles) add(ref checkpoint.Ref, locked *object.LockedError) {
	if locked.Hold || locked.Refused != nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.until == nil {
		l.until = map[checkpoint.Ref]time.Time{}
	}
	l.until[ref] = locked.Until
	if soon := time.Now().Add(lockedAtMost); soon.Before(locked.Until) {
		l.until[ref] = soon
	}
}

// has reports whether a checkpoint is still left alone.
func (l *lockedFiles) has(ref checkpoint.Ref) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	until, is := l.until[ref]
	if is && !time.Now().Before(until) {
		delete(l.until, ref)
		is = false
	}
	return is
}
