package session

import (
	"slices"
	"sync"
	"time"
)

// Pulses are the signs of life of a group's ranks: their requests. They exist so
// that the process that started the ranks can tell which of them hangs.
type Pulses struct {
	mu    sync.Mutex
	ranks []pulse
}

type pulse struct {
	last  time.Time // when its last request began or was answered; zero: it never made one
	op    string    // of that request
	meets int       // requests of it that wait for other ranks
	busy  int       // all requests of it that are not answered
}

// meetings are the requests that wait for all ranks.
var meetings = []string{"report", "gather", "broadcast", "load", "get"}

// besides are the requests that a rank makes beside the training, some of which
// wait all the time: they are no sign of life, and a rank does not wait for the
// trainer by them.
var besides = []string{"recv", "hold_signals", "release_signals", "signaled"}

// NewPulses returns the pulses of ranks that have made no request yet.
func NewPulses(world int) *Pulses { return &Pulses{ranks: make([]pulse, world)} }

// Begin notes a request of a rank. The caller calls answered when it is answered:
// until then, the rank waits for this process and is not silent.
func (p *Pulses) Begin(rank int, op string) (answered func()) {
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

// Silence is a rank that makes no request.
type Silence struct {
	Rank int
	Last string        // its last request
	Took time.Duration // since then
}

// Silent returns the ranks of those that live which made no request since the
// limit, and none is being answered, and the ranks that meanwhile wait for others.
// A rank that never made a request is neither: its program may know of no trainer.
func (p *Pulses) Silent(limit time.Duration, now time.Time, lives func(rank int) bool) (silent []Silence, waiting []int) {
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

// Shift leaves out a time in which no rank could make a request, because this
// process was stopped.
func (p *Pulses) Shift(by time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.ranks {
		if !p.ranks[i].last.IsZero() {
			p.ranks[i].last = p.ranks[i].last.Add(by)
		}
	}
}
