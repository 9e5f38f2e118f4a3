package reuse

import (
	"context"
	"sync"
)

// Uses records which chunks of its bases' files the ranks of one save would use, so that a
// file counts as half live for all ranks together. If a save is distributed to other ranks
// than the one before, each rank uses only a part of every file. A rank that uses half of its
// files by itself does not wait for others.
type Uses struct {
	pause, resume func()

	mu      sync.Mutex
	open    map[int]bool // ranks that have not reported their uses
	used    map[use]int64
	decided chan struct{} // closed when all ranks have reported
	closed  bool
}

// use is a chunk in a file of a base.
type use struct {
	from   string // the file, as in [File]
	offset int64
}

// NewUses returns the Uses for a save of these ranks, which one process writes. A rank that
// waits for the others calls pause first, and resume before it continues: in between it uses
// neither processor nor disk.
func NewUses(ranks []int, pause, resume func()) *Uses {
	u := &Uses{pause: pause, resume: resume, open: map[int]bool{}, used: map[use]int64{}, decided: make(chan struct{})}
	for _, rank := range ranks {
		u.open[rank] = true
	}
	return u
}

// Done records that a rank will report nothing more: it is written, or will not be.
func (u *Uses) Done(rank int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.done(rank)
}

// Stop records that the remaining ranks will never report. Ranks that wait for them decide by
// the reports so far.
func (u *Uses) Stop() {
	u.mu.Lock()
	defer u.mu.Unlock()
	clear(u.open)
	u.done(-1)
}

func (u *Uses) done(rank int) {
	delete(u.open, rank)
	if len(u.open) == 0 && !u.closed {
		u.closed = true
		close(u.decided)
	}
}

// Live reports the uses of a rank, and returns the bytes of each file that all ranks would
// use. It waits for the others only if their uses can change the decision for this rank.
func (u *Uses) Live(ctx context.Context, rank int, matches map[int]Match) (map[string]int64, error) {
	own := usesOf(matches)
	u.mu.Lock()
	for at, size := range own {
		u.used[at] = size
	}
	u.done(rank)
	u.mu.Unlock()
	if !undecided(liveOf(own), matches) {
		return liveOf(own), ctx.Err()
	}
	u.pause()
	defer u.resume()
	select {
	case <-u.decided:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	return liveOf(u.used), nil
}

// Live returns the number of bytes of each file that a rank would use by itself.
func Live(matches map[int]Match) map[string]int64 { return liveOf(usesOf(matches)) }

// usesOf returns the chunks of bases that a rank's items match, with their sizes.
func usesOf(matches map[int]Match) map[use]int64 {
	out := map[use]int64{}
	for _, m := range matches {
		if m.Held != nil {
			out[use{m.Held.File.From, m.Held.Entry.Offset}] = m.Content.size
		}
	}
	return out
}

// liveOf returns the number of used bytes of each file, counting each chunk once.
func liveOf(uses map[use]int64) map[string]int64 {
	out := map[string]int64{}
	for at, size := range uses {
		out[at.from] += size
	}
	return out
}

// half reports whether enough of a file is live for it to be linked in.
func half(live map[string]int64, f File) bool { return 2*live[f.From] >= f.Size }

// undecided reports whether less than half of a matched file is live.
func undecided(live map[string]int64, matches map[int]Match) bool {
	for _, m := range matches {
		if m.Held != nil && !half(live, m.Held.File) {
			return true
		}
	}
	return false
}
