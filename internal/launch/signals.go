package launch

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ckptstore/ckptstore/client"
)

// releaseLimit is how long workers may take to confirm that they no longer hold
// signals back, before they get SIGTERM all the same. A worker confirms in
// milliseconds, unless it is stopped or its interpreter is stuck.
const releaseLimit = time.Second

// heldSignals tracks the processes of an attempt that hold SIGTERM and SIGUSR1
// back, as the client libraries do. Schedulers signal every process of a step:
// only the trainer may take that as an order, or the workers die before they can
// save. When the trainer itself ends the workers, it first makes them release the
// signals, so that its SIGTERM acts at once.
type heldSignals struct {
	mu        sync.Mutex
	holding   map[int]int      // processes that have not confirmed their release, by rank
	names     map[int][]string // the signals that a rank has held, also after its end
	released  chan struct{}    // closed by release
	confirmed chan struct{}    // closed when released is, and nobody holds

	// stacks says that the trainer itself sends SIGUSR1, for the stacks of workers
	// that hang: it is no order to stop then.
	stacks atomic.Bool
}

func newHeldSignals() *heldSignals {
	return &heldSignals{holding: map[int]int{}, names: map[int][]string{}, released: make(chan struct{}), confirmed: make(chan struct{})}
}

// over reports whether the workers are being ended by signals.
func (h *heldSignals) over() bool {
	select {
	case <-h.released:
		return true
	default:
		return false
	}
}

// hold blocks until the process that calls is to release its signals, or ctx
// ends, which says that the process is gone.
func (h *heldSignals) hold(ctx context.Context, rank int, names []string) error {
	h.mu.Lock()
	h.names[rank] = names
	if h.over() {
		h.mu.Unlock()
		return nil
	}
	h.holding[rank]++
	h.mu.Unlock()
	select {
	case <-h.released:
		return nil
	case <-ctx.Done():
		h.confirm(rank)
		return context.Cause(ctx)
	}
}

// confirm says that one process of a rank holds nothing back any more.
func (h *heldSignals) confirm(rank int) { h.drop(rank, 1) }

// gone says that the process of a rank has ended.
func (h *heldSignals) gone(rank int) { h.drop(rank, math.MaxInt) }

func (h *heldSignals) drop(rank, most int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	n, held := h.holding[rank]
	if n -= min(n, most); n > 0 {
		h.holding[rank] = n
		return
	}
	delete(h.holding, rank)
	if held && len(h.holding) == 0 && h.over() {
		close(h.confirmed)
	}
}

// release makes all processes release their signals, and waits until they have
// confirmed that, up to a limit. It returns how many ranks have not, and must
// be called once.
func (h *heldSignals) release(limit time.Duration) (late int) {
	h.mu.Lock()
	close(h.released)
	if len(h.holding) == 0 {
		close(h.confirmed)
	}
	h.mu.Unlock()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-h.confirmed:
		return 0
	case <-timer.C:
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.holding)
}

// releaseSignals lets SIGTERM act on the workers. It returns what is left of the
// grace that they have after it.
func (w *watch) releaseSignals() (grace time.Duration) {
	began := time.Now()
	if late := w.group.signals.release(min(releaseLimit, w.cfg.Grace/2)); late > 0 {
		w.log.Warn("some workers do not answer and may hold SIGTERM back", "ranks", late, "waited", time.Since(began).Round(time.Millisecond))
	}
	return max(0, w.cfg.Grace-time.Since(began))
}

// replaced says that a rank does not hold some signals back any more.
func (h *heldSignals) replaced(rank int, names []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.names[rank] = slices.DeleteFunc(slices.Clone(h.names[rank]), func(name string) bool { return slices.Contains(names, name) })
}

// holds reports whether a rank holds a signal back, or did until its end.
func (h *heldSignals) holds(rank int, name string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Contains(h.names[rank], name)
}

// signaled takes note of a rank that ended well after a preemption. Schedulers
// signal the workers too, with SIGTERM after SIGUSR1, and at a walltime of their
// own: one that does not hold both back may have ended because of them, and not
// because its training is complete.
func (w *watch) signaled(rank int) {
	o, _ := w.orders.given()
	if o != nil && o.Preempt && !(w.group.signals.holds(rank, "SIGTERM") && w.group.signals.holds(rank, "SIGUSR1")) {
		w.group.stopState.told.Store(true)
	}
}

func (s *rankServer) onHoldSignals(ctx context.Context, r client.HoldSignals) (struct{}, error) {
	return struct{}{}, s.signals.hold(ctx, s.rank, r.Signals)
}

// onReleaseSignals takes the word of a worker that it holds some signals back no
// more, because its script has handlers of its own, or none, because it was asked.
func (s *rankServer) onReleaseSignals(_ context.Context, r client.HoldSignals) (struct{}, error) {
	if len(r.Signals) > 0 {
		s.signals.replaced(s.rank, r.Signals)
	} else {
		s.signals.confirm(s.rank)
	}
	return struct{}{}, nil
}

// onSignaled takes a signal that a worker held back as a request to stop, so
// that a scheduler or a person may signal any process of the job. The trainer
// mostly got the same signal, and its own request came first.
func (s *rankServer) onSignaled(_ context.Context, r client.Signaled) (client.SignaledReply, error) {
	if r.Signal != "SIGTERM" && r.Signal != "SIGUSR1" {
		return client.SignaledReply{}, badRequest("signal %q: want SIGTERM or SIGUSR1", r.Signal)
	}
	switch {
	case s.signals.over() || s.ask == nil: // a session's processes are nobody's to preempt
		return client.SignaledReply{End: true}, nil
	case s.signals.stacks.Load() && r.Signal == "SIGUSR1":
		return client.SignaledReply{Stacks: true}, nil
	}
	s.ask(StopRequest{Preempt: true, Signal: r.Signal, Reason: fmt.Sprintf("rank %d was told to stop by %s", s.rank, r.Signal)})
	return client.SignaledReply{}, nil
}
