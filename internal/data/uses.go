package data

import (
	"context"
	"sync"
)

// Uses is what the ranks of one save would use of the files of its bases. With
// it, whether half of a file would be live is judged for all of them together:
// where a save is shared out to other ranks than the one before, each uses only
// a part of every file. A rank that uses half of its files by itself waits for
// nobody.
type Uses struct {
	pause, resume func()

	mu      sync.Mutex
	open    map[int]bool // ranks that have not told what they use
	used    map[use]int64
	decided chan struct{} // closed when nobody is waited for
	closed  bool
}

// use is a chunk in a file of a base.
type use struct {
	from   string // the file, as [heldFile] has it
	offset int64
}

// NewUses is for a save of these ranks, which one process writes. A rank that
// waits for the others calls pause first, and resume before it goes on: in
// between it uses neither processor nor disk.
func NewUses(ranks []int, pause, resume func()) *Uses {
	u := &Uses{pause: pause, resume: resume, open: map[int]bool{}, used: map[use]int64{}, decided: make(chan struct{})}
	for _, rank := range ranks {
		u.open[rank] = true
	}
	return u
}

// Done says that a rank will tell nothing more: it is written, or will not be.
func (u *Uses) Done(rank int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.done(rank)
}

// Stop says that ranks which have told nothing never will. Who waits for them
// goes by what is known.
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

// live tells what a rank would use, and is the bytes of each file that all
// ranks would. It waits for the others only where that can change anything for
// this rank.
func (u *Uses) live(ctx context.Context, rank int, matches map[int]match) (map[string]int64, error) {
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

// usesOf are the chunks of bases that a rank's items match, with their sizes.
func usesOf(matches map[int]match) map[use]int64 {
	out := map[use]int64{}
	for _, m := range matches {
		if m.held != nil {
			out[use{m.held.file.from, m.held.entry.Offset}] = m.content.size
		}
	}
	return out
}

// liveOf is how many bytes of each file are used, each once.
func liveOf(uses map[use]int64) map[string]int64 {
	out := map[string]int64{}
	for at, size := range uses {
		out[at.from] += size
	}
	return out
}

// half reports whether enough of a file is live for it to be linked in.
func half(live map[string]int64, f heldFile) bool { return 2*live[f.from] >= f.size }

// undecided reports whether a file is matched of which less than half is live.
func undecided(live map[string]int64, matches map[int]match) bool {
	for _, m := range matches {
		if m.held != nil && !half(live, m.held.file) {
			return true
		}
	}
	return false
}
