// Package pulse keeps the signs of life of a group's ranks: their requests. They exist so that the
// process that started the ranks can tell which of them hangs.
package pulse

import (
	"slices"
	"sync"
	"time"
)

// Ranks are the pulses of a group's ranks. The methods may be called concurrently.
type Ranks struct {
	mu    sync.Mutex
	ranks []pulse
}

type pulse struct {
	last  time.Time // when its last request began or was answered; zero: it made none
	op    string    // of that request
	meets int       // unanswered requests that wait for other ranks
	busy  int       // all unanswered requests
}

// meetings are the requests that wait for all ranks.
var meetings = []string{"report", "gather", "broadcast", "load", "get"}

// besides are the requests that a rank makes in parallel with the training. Some
// of them wait all the time. They are no sign of life, and a rank with only such
// requests does not count as waiting for the trainer.
var besides = []string{"recv", "hold_signals", "release_signals", "signaled"}

// New returns the pulses of ranks that have made no request yet.
func New(world int) *Ranks { return &Ranks{ranks: make([]pulse, world)} }

// Begin records the start of a rank's request. The caller calls answered with the
// reply: until then, the rank waits for this process and is not silent.
func (p *Ranks) Begin(rank int, op string) (answered func()) {
	if slices.Contains(besides, op) {
		return func() {}
	}
	meets := 0
	if slices.Contains(meetings, op) {
		meets = 1
	}
	note := func(by int) {
		p.mu.Lock()
		defer p.mu.Unlock()
		r := &p.ranks[rank]
		r.last, r.op = time.Now(), op
		r.busy += by
		r.meets += by * meets
	}
	note(1)
	return func() { note(-1) }
}

// Silence describes a rank that makes no requests.
type Silence struct {
	Rank int
	Last string        // its last request
	Took time.Duration // time since that request
}

// Silent returns the live ranks that made no request since limit and have none
// unanswered, and the ranks that meanwhile wait for others. A rank that never
// made a request is in neither: its program may not use the trainer.
func (p *Ranks) Silent(limit time.Duration, now time.Time, lives func(rank int) bool) (silent []Silence, waiting []int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for rank, r := range p.ranks {
		switch {
		case r.last.IsZero() || !lives(rank):
		case r.meets > 0:
			waiting = append(waiting, rank)
		case r.busy == 0 && now.Sub(r.last) >= limit:
			silent = append(silent, Silence{rank, r.op, now.Sub(r.last)})
		}
	}
	return silent, waiting
}

// Shift discounts a period in which no rank could make a request, because this
// process was stopped.
func (p *Ranks) Shift(by time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.ranks {
		if !p.ranks[i].last.IsZero() {
			p.ranks[i].last = p.ranks[i].last.Add(by)
		}
	}
}
