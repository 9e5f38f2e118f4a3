package launch

import (
	"slices"
	"sync"
	"time"
)

// pulses are the signs of life of an attempt's ranks: their requests.
type pulses struct {
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

func newPulses(world int) *pulses { return &pulses{ranks: make([]pulse, world)} }

// begin notes a request of a rank; what it gives is called when it is answered.
// While it is not, the rank waits for the trainer and is not silent.
func (p *pulses) begin(rank int, op string) (answered func()) {
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

// silence is a rank that makes no request.
type silence struct {
	rank int
	last string        // its last request
	took time.Duration // since then
}

// silent are the ranks of those that live which made no request since the limit,
// and none is being answered; waiting are those that meanwhile wait for others. A
// rank that never made one is neither: its program may know of no trainer.
func (p *pulses) silent(limit time.Duration, now time.Time, lives func(rank int) bool) (silent []silence, waiting []int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for rank, r := range p.ranks {
		switch {
		case r.last.IsZero() || !lives(rank):
		case r.meets > 0:
			waiting = append(waiting, rank)
		case r.busy == 0 && now.Sub(r.last) >= limit:
			silent = append(silent, silence{rank, r.op, now.Sub(r.last)})
		}
	}
	return silent, waiting
}

// shift is for a time in which nobody could make a request, because the trainer
// was stopped: it does not count as silence.
func (p *pulses) shift(by time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.ranks {
		if !p.ranks[i].last.IsZero() {
			p.ranks[i].last = p.ranks[i].last.Add(by)
		}
	}
}
