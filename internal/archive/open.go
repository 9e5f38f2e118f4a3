package archive

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"os"
	"slices"
	"sync"
	"time"
)

// Archive is the part of a log from message 1 to End. It never changes, and its methods
// may be called concurrently.
type Archive struct {
	dir      string
	store    string
	end      Link
	segments []Segment
	heads    *heads

	mu     sync.Mutex
	closed bool
	recent *file // the segment that was used last
	uses   map[*file]int
	frame  frameOf
}

// frameOf is the frame that [Archive.At] read last.
type frameOf struct {
	segment  uint64 // its first sequence
	at       int
	messages []Message
}

// Open opens the archive in dir of a store's log that ends at end. It checks that the
// names of the segments follow one another without a gap, and the digest of the last;
// [Archive.Verify] reads them all. It returns [ErrDamaged] or [ErrForeign]. Only
// segments that are being read stay open.
func Open(dir, store string, end Link) (*Archive, error) {
	bad := func(err error) (*Archive, error) {
		return nil, fmt.Errorf("open the archive %s of the log: %w", dir, err)
	}
	all, err := list(dir)
	if errors.Is(err, os.ErrNotExist) {
		err = fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	if err != nil {
		return bad(err)
	}
	a := &Archive{dir: dir, store: store, end: end, uses: map[*file]int{}}
	next := uint64(1)
	for _, s := range all {
		if next > end.Last {
			break
		}
		// Of two segments with the same start, one was sealed ahead and cut by a
		// shorter end.
		if s.First == next && s.Last <= end.Last {
			a.segments = append(a.segments, s)
			next = s.Last + 1
		}
	}
	if next != end.Last+1 {
		return bad(fmt.Errorf("%w: the segment with event %d is missing: it must hold all up to event %d", ErrDamaged, next, end.Last))
	}
	last, err := open(a.segments[len(a.segments)-1], store)
	if err != nil {
		return bad(err)
	}
	a.recent, a.uses[last] = last, 1
	if last.digest != end.Digest {
		return bad(errors.Join(fmt.Errorf("%w: %s is not the segment that the log follows", ErrDamaged, last.Path), last.close()))
	}
	if a.heads, err = openHeads(dir, end.Last); err != nil {
		// The heads are derived, so they are written again.
		if err = writeHeads(dir, store, 0, end.Last); err == nil {
			a.heads, err = openHeads(dir, end.Last)
		}
	}
	if err != nil {
		return bad(errors.Join(err, last.close()))
	}
	return a, nil
}

// Close closes the files. Readers under way end with an error.
func (a *Archive) Close() error {
	a.mu.Lock()
	recent := a.recent
	a.closed, a.recent = true, nil
	a.mu.Unlock()
	var err error
	if recent != nil {
		err = a.release(recent)
	}
	return errors.Join(err, a.heads.close())
}

// Segments returns the segments of the archive, in order.
func (a *Archive) Segments() []Segment { return slices.Clone(a.segments) }

// End returns the link of the last message, whose digest covers the whole archive.
func (a *Archive) End() Link { return a.end }

// use opens the segment that holds a sequence; release returns it.
func (a *Archive) use(sequence uint64) (*file, error) {
	i := a.position(sequence)
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return nil, os.ErrClosed
	}
	if a.recent != nil && a.recent.First == a.segments[i].First {
		a.uses[a.recent]++
		return a.recent, nil
	}
	f, err := open(a.segments[i], a.store)
	if err != nil {
		return nil, err
	}
	a.uses[f] = 2 // one use by the caller, one as the recent segment
	old := a.recent
	a.recent = f
	if old != nil {
		err = a.releaseLocked(old)
	}
	return f, err
}

// position returns the index of the segment with a sequence, which must be in the
// archive.
func (a *Archive) position(sequence uint64) int {
	i, ok := slices.BinarySearchFunc(a.segments, sequence, func(s Segment, seq uint64) int { return cmp.Compare(s.First, seq) })
	if !ok {
		i--
	}
	return i
}

func (a *Archive) release(f *file) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.releaseLocked(f)
}

func (a *Archive) releaseLocked(f *file) error {
	if a.uses[f]--; a.uses[f] > 0 {
		return nil
	}
	delete(a.uses, f)
	return f.close()
}

// Read yields the messages from from to until, both inclusive, in order. It ends with
// an error at the first unreadable message ([ErrDamaged]), and when ctx ends. The
// messages stay valid and must not be modified.
func (a *Archive) Read(ctx context.Context, from, until uint64) iter.Seq2[Message, error] {
	return func(yield func(Message, error) bool) {
		until = min(until, a.end.Last)
		for from = max(from, 1); from <= until; {
			next, more, err := a.readSegment(ctx, from, until, yield)
			if err != nil {
				yield(Message{}, fmt.Errorf("read event %d of the archive: %w", next, err))
				return
			}
			if !more {
				return
			}
			from = next
		}
	}
}

// readSegment yields the messages of one segment, and returns where to continue.
func (a *Archive) readSegment(ctx context.Context, from, until uint64, yield func(Message, error) bool) (next uint64, more bool, err error) {
	f, err := a.use(from)
	if err != nil {
		return from, false, err
	}
	defer func() { err = errors.Join(err, a.release(f)) }()
	x, err := f.look()
	if err != nil {
		return from, false, err
	}
	for i := x.frame(from); i < len(x.frames); i++ {
		if ctx.Err() != nil {
			return from, false, context.Cause(ctx)
		}
		messages, err := f.frame(x, i)
		if err != nil {
			return from, false, err
		}
		for _, m := range messages {
			switch {
			case m.Sequence < from:
				continue
			case m.Sequence > until:
				return from, false, nil
			}
			if !yield(m, nil) {
				return from, false, nil
			}
			from = m.Sequence + 1
		}
	}
	return from, true, nil
}

// At returns the message with a sequence. It returns [ErrNone] if the archive ends
// before it.
func (a *Archive) At(sequence uint64) (m Message, err error) {
	if sequence == 0 || sequence > a.end.Last {
		return m, fmt.Errorf("event %d: %w", sequence, ErrNone)
	}
	f, err := a.use(sequence)
	if err != nil {
		return m, err
	}
	defer func() { err = errors.Join(err, a.release(f)) }()
	x, err := f.look()
	if err != nil {
		return m, err
	}
	i := x.frame(sequence)
	a.mu.Lock()
	had := a.frame
	a.mu.Unlock()
	if had.segment != f.First || had.at != i || had.messages == nil {
		messages, err := f.frame(x, i)
		if err != nil {
			return m, err
		}
		had = frameOf{segment: f.First, at: i, messages: messages}
		a.mu.Lock()
		a.frame = had
		a.mu.Unlock()
	}
	return had.messages[sequence-x.frames[i].first], nil
}

// Since returns a sequence before which no message was stored at or after t. It may be
// too early by up to one segment. It is 1 if all messages may be later.
func (a *Archive) Since(t time.Time) (uint64, error) {
	for _, s := range slices.Backward(a.segments) {
		m, err := a.At(s.First)
		if err != nil {
			return 0, err
		}
		if m.Time.Before(t) {
			return s.First, nil
		}
	}
	return 1, nil
}

// Head returns the sequence of the last decision of a lane; 0 if there is none.
func (a *Archive) Head(lane string) (uint64, error) {
	last, err := a.heads.find(lane)
	if err != nil {
		return 0, fmt.Errorf("last decision of %s in the archive: %w", lane, err)
	}
	return last, nil
}

// Next returns the sequence of the first decision of a lane at or after from; 0 if
// there is none.
func (a *Archive) Next(lane string, from uint64) (uint64, error) {
	head, err := a.Head(lane)
	if err != nil || head < from || head == 0 {
		return 0, err
	}
	for _, s := range a.segments[a.position(max(from, 1)):] {
		x, err := a.indexOf(s)
		if err != nil {
			return 0, err
		}
		sequences := x.lane(lane)
		if i, _ := slices.BinarySearch(sequences, from); i < len(sequences) {
			return sequences[i], nil
		}
	}
	return 0, fmt.Errorf("%w: decision %d of %s is in no segment", ErrDamaged, head, lane)
}

func (a *Archive) indexOf(s Segment) (x index, err error) {
	f, err := a.use(s.First)
	if err != nil {
		return x, err
	}
	x, err = f.look()
	return x, errors.Join(err, a.release(f))
}

// Latest returns the sequence of the last message under a filter; 0 if there is none.
// For a lane this is a look-up; for another filter it may read the index of every
// segment.
func (a *Archive) Latest(filter string) (uint64, error) {
	if isLane(filter) {
		return a.Head(filter)
	}
	for _, s := range slices.Backward(a.segments) {
		x, err := a.indexOf(s)
		if err != nil {
			return 0, err
		}
		last := uint64(0)
		for _, named := range x.subjects {
			if named.last > last && matches(filter, named.name) {
				last = named.last
			}
		}
		if last > 0 {
			return last, nil
		}
	}
	return 0, nil
}

// Has reports whether the segment of a sequence has a message under a filter. It also
// returns the segment's last sequence, so that a reader of few subjects can skip the
// segment.
func (a *Archive) Has(filter string, sequence uint64) (has bool, last uint64, err error) {
	s := a.segments[a.position(sequence)]
	x, err := a.indexOf(s)
	if err != nil {
		return false, 0, err
	}
	return slices.ContainsFunc(x.subjects, func(named subject) bool { return matches(filter, named.name) }), s.Last, nil
}

// Verify reads every byte of the archive and checks that each segment follows the one
// before it. pace, which may be nil, is called with the size in bytes of each segment
// read; it may block, and its error ends the check. Verify otherwise returns the first
// [ErrDamaged] or [ErrForeign].
func (a *Archive) Verify(ctx context.Context, pace func(ctx context.Context, bytes int64) error) error {
	var link Link
	for _, s := range a.segments {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		next, err := Verify(s.Path, a.store, link)
		if err != nil {
			return err
		}
		link = next
		if pace == nil {
			continue
		}
		info, err := inside(a.dir).Stat(s.Path)
		if err == nil {
			err = pace(ctx, info.Size())
		}
		if err != nil {
			return err
		}
	}
	if link != a.end {
		return fmt.Errorf("%w: it ends at event %d with digest %s, want event %d with %s", ErrDamaged, link.Last, link.Digest, a.end.Last, a.end.Digest)
	}
	return nil
}
