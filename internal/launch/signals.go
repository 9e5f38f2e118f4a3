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
	"github.com/ckptstore/ckptstore/internal/session"
)

// releaseLimit is how long workers may take to confirm that they no longer hold
// signals back. After that they get SIGTERM anyway. A worker confirms in
// milliseconds, unless it is stopped or its interpreter is stuck.
const releaseLimit = time.Second

// heldSignals tracks the processes of an attempt that hold SIGTERM and SIGUSR1
// back, as the client libraries do. Schedulers signal every process of a step.
// Only the trainer may obey, or the workers would die before they can save. When
// the trainer itself ends the workers, it first makes them release the signals,
// so that its SIGTERM acts at once.
type heldSignals struct {
	mu        sync.Mutex
	holding   map[int]int      // processes that have not confirmed their release, by rank
	names     map[int][]string // the signals that a rank has held, also after its end
	released  chan struct{}    // closed by release
	confirmed chan struct{}    // closed when released is, and no process holds a signal

	// stacks is set when the trainer itself sends SIGUSR1, to get the stacks of
	// hanging workers: then the signal is not a stop request.
	stacks atomic.Bool

	ask func(StopRequest) // nil: this attempt cannot be asked to end
}

var _ session.Signals = (*heldSignals)(nil)

func newHeldSignals(ask func(StopRequest)) *heldSignals {
	return &heldSignals{ask: ask, holding: map[int]int{}, names: map[int][]string{}, released: make(chan struct{}), confirmed: make(chan struct{})}
}

// over reports whether signals are ending the workers.
func (h *heldSignals) over() bool {
	select {
	case <-h.released:
		return true
	default:
		return false
	}
}

// Hold implements [session.Signals].
func (h *heldSignals) Hold(ctx context.Context, rank int, names []string) error {
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
		h.Confirm(rank)
		return context.Cause(ctx)
	}
}

// Confirm implements [session.Signals].
func (h *heldSignals) Confirm(rank int) { h.drop(rank, 1) }

// gone records that the process of a rank has ended.
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
// confirmed it, up to a limit. It returns the number of ranks that have not. Call
// it only once.
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

// releaseSignals lets SIGTERM act on the workers. It returns the remaining grace
// after it.
func (w *watch) releaseSignals() (grace time.Duration) {
	began := time.Now()
	if late := w.signals.release(min(releaseLimit, w.cfg.Grace/2)); late > 0 {
		w.log.Warn("workers do not answer and may hold SIGTERM back", "ranks", late, "waited", time.Since(began).Round(time.Millisecond))
	}
	return max(0, w.cfg.Grace-time.Since(began))
}

// Replaced implements [session.Signals].
func (h *heldSignals) Replaced(rank int, names []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.names[rank] = slices.DeleteFunc(slices.Clone(h.names[rank]), func(name string) bool { return slices.Contains(names, name) })
}

// holds reports whether a rank holds a signal back, or held it until its end.
func (h *heldSignals) holds(rank int, name string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Contains(h.names[rank], name)
}

// signaled handles a rank that ended well after a preemption. Schedulers signal
// the workers too, with SIGTERM after SIGUSR1, and at their own walltime. A
// worker that does not hold both signals back may have ended because of them, not
// because its training is complete.
func (w *watch) signaled(rank int) {
	o, _ := w.orders.given()
	if o != nil && o.Preempt && !(w.signals.holds(rank, "SIGTERM") && w.signals.holds(rank, "SIGUSR1")) {
		w.stop.told.Store(true)
	}
}

// Signaled implements [session.Signals]. It treats a signal that a worker held
// back as a request to stop, so that a scheduler or a person may signal any
// process of the job. The trainer usually got the same signal, and its own
// request came first.
func (h *heldSignals) Signaled(rank int, name string) client.SignaledReply {
	switch {
	case h.over() || h.ask == nil: // only launched processes are preempted
		return client.SignaledReply{End: true}
	case h.stacks.Load() && name == "SIGUSR1":
		return client.SignaledReply{Stacks: true}
	}
	h.ask(StopRequest{Preempt: true, Signal: name, Reason: fmt.Sprintf("rank %d received %s", rank, name)})
	return client.SignaledReply{}
}
