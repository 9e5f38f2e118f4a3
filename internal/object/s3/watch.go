package s3

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"
)

// patience is how long a request waits for a connection that is silent or slow.
type patience struct {
	first  time.Duration // until an answer begins
	commit time.Duration // the same, for the completion of an upload
	window time.Duration // in which a body moves by quantum bytes
	// quantum is counted in the time that a body waits for the network, not for its reader. Bodies
	// that move in the same direction at the same time share it, as they share the link: each moves
	// by its part, but by least bytes at least.
	quantum, least int64
}

// patient is less than 1 MiB/s of all bodies, or 64 KiB/s of one, for 10 s.
var patient = patience{first: 10 * time.Second, commit: 10 * time.Minute, window: 10 * time.Second, quantum: 10 << 20, least: 640 << 10}

// of returns the patience with an attempt. Each accepts half the speed of the one before: on
// a slow link no attempt would succeed otherwise.
func (p patience) of(try int) patience {
	halved := min(max(try-1, 0), 6)
	p.quantum >>= halved
	p.least >>= halved
	return p
}

// share returns the bytes by which each of some bodies moves in a window.
func (p patience) share(bodies int64) int64 {
	return min(p.quantum, max(p.quantum/max(bodies, 1), p.least))
}

// errStalled ends a request whose connection is silent or slow. A new connection may not be.
var errStalled = errors.New("the connection has stalled")

// watch ends a request that makes no progress.
type watch struct {
	patience patience
	cancel   context.CancelCauseFunc

	mu    sync.Mutex
	timer *time.Timer
	fired error
	phase phase
}

// phase is the part of a request that is under way.
type phase int

const (
	sendingRequest phase = iota
	awaitingAnswer
	receivingAnswer
	ended
)

// newWatch returns the watch of a request that waits for a connection first.
func newWatch(p patience, cancel context.CancelCauseFunc) *watch {
	w := &watch{patience: p, cancel: cancel}
	w.arm(sendingRequest, connectTime+tlsTime+p.first, "no connection")
	return w
}

// arm makes the request end after a time, if it is in the given phase.
func (w *watch) arm(in phase, after time.Duration, what string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.phase != in {
		return
	}
	w.stop()
	reason := fmt.Errorf("%w: %s for %v", errStalled, what, after.Round(time.Millisecond))
	w.timer = time.AfterFunc(after, func() { w.fire(reason) })
}

func (w *watch) stop() {
	if w.timer != nil {
		w.timer.Stop()
		w.timer = nil
	}
}

// disarm stops the time in a phase.
func (w *watch) disarm(in phase) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.phase == in {
		w.stop()
	}
}

func (w *watch) fire(reason error) {
	w.mu.Lock()
	w.fired = reason
	w.mu.Unlock()
	w.cancel(reason)
}

// cause returns why the watch has ended the request, or nil.
func (w *watch) cause() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.fired
}

// enter begins a phase, unless a later one has begun.
func (w *watch) enter(p phase) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.phase < p {
		w.phase = p
		w.stop()
	}
}

// sent begins the wait for an answer.
func (w *watch) sent(first time.Duration) {
	w.enter(awaitingAnswer)
	w.arm(awaitingAnswer, first, "no answer")
}

// answered ends it.
func (w *watch) answered() { w.enter(receivingAnswer) }

func (w *watch) end() { w.enter(ended) }

// pace is the progress of a body since it last moved by its share.
type pace struct {
	blocked time.Duration
	moved   int64
	share   int64 // of the time when most bodies moved since then; 0: not known yet
}

func (p *pace) add(d time.Duration, n int, share int64) {
	if p.share == 0 || share < p.share {
		p.share = share
	}
	p.blocked += d
	if p.moved += int64(n); p.moved >= p.share {
		*p = pace{share: share}
	}
}

// rate is the limit that a body has to keep, for errors.
func (p *pace) rate(window time.Duration) string {
	return fmt.Sprintf("less than %d bytes in %v", p.share, window)
}

// flow counts the bodies that move in one direction at the same time.
type flow struct{ bodies atomic.Int64 }

// enter counts a body until leave is called, once or more often.
func (f *flow) enter() (leave func()) {
	f.bodies.Add(1)
	return sync.OnceFunc(func() { f.bodies.Add(-1) })
}

// sending is the body of a request. Between two reads of it the connection takes bytes.
type sending struct {
	body   io.ReadCloser
	watch  *watch
	counts *counts
	flow   *flow
	leave  func() // the flow
	pace   pace
	since  time.Time
}

// Read implements [io.Reader].
func (s *sending) Read(p []byte) (int, error) {
	s.watch.disarm(sendingRequest)
	share := s.watch.patience.share(s.flow.bodies.Load())
	if !s.since.IsZero() {
		s.pace.add(time.Since(s.since), 0, share)
	}
	n, err := s.body.Read(p)
	s.pace.add(0, n, share)
	s.counts.sent.Add(int64(n))
	s.since = time.Now()
	s.watch.arm(sendingRequest, max(s.watch.patience.window-s.pace.blocked, time.Millisecond), "it takes "+s.pace.rate(s.watch.patience.window))
	return n, err
}

// Close implements [io.Closer].
func (s *sending) Close() error {
	s.leave()
	return s.body.Close()
}

// receiving is the body of an answer.
type receiving struct {
	body   io.ReadCloser
	watch  *watch
	cancel context.CancelCauseFunc
	counts *counts
	flow   *flow
	leave  func() // the flow
	window time.Duration
	pace   pace
}

// Read implements [io.Reader].
func (r *receiving) Read(p []byte) (int, error) {
	share := r.watch.patience.share(r.flow.bodies.Load())
	r.pace.add(0, 0, share)
	r.watch.arm(receivingAnswer, max(r.window-r.pace.blocked, time.Millisecond), "it brings "+r.pace.rate(r.window))
	began := time.Now()
	n, err := r.body.Read(p)
	r.watch.disarm(receivingAnswer)
	r.pace.add(time.Since(began), n, share)
	r.counts.received.Add(int64(n))
	if err != nil && !errors.Is(err, io.EOF) {
		if cause := r.watch.cause(); cause != nil {
			err = cause
		}
	}
	return n, err
}

// Close implements [io.Closer].
func (r *receiving) Close() error {
	r.watch.end()
	r.leave()
	err := r.body.Close()
	r.cancel(nil)
	return err
}
