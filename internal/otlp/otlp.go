// Package otlp sends the saves and loads of a store to a collector as traces, by the OpenTelemetry
// protocol over HTTP, in protobuf.
//
//	log ──▶ follow ──▶ queue (256) ──▶ send ──▶ collector
//	           ▲                         │
//	           └──── cursor "otlp" ◀─────┘
//
// A trace is made when the log has the end of its save or load, from the rows of the views. The
// cursor is the place in the log up to which all traces are delivered or dropped. A process that
// holds it is the only sender of its store; others wait for it, and continue where it stopped. After
// a crash, traces may be sent again: they have the same IDs. The first process of all begins at the
// end of the log.
//
// The log is only read, and nothing waits for a collector. While it does not answer, the queue
// holds the newest traces; older ones are dropped and counted. Each request has a deadline.
package otlp

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/ckptstore/ckptstore/internal/store"
)

// Cursor is the name of the cursor.
const Cursor = "otlp"

const (
	// queueSize is how many traces wait for the collector. Each is at most of 64 ranks.
	queueSize = 256
	// oldest is the age of a save or load that is not sent any more: backends refuse old spans.
	oldest = time.Hour
	// rowsTimeout bounds the reading of the rows of a save.
	rowsTimeout = 10 * time.Second
	// lastFlush bounds the sending of the last traces when the process ends.
	lastFlush = 3 * time.Second
	// comeback is the pause before the cursor is tried again. Another process may hold it.
	comeback = 5 * time.Second
)

// Options configure a [Tracer].
type Options struct {
	Version string       // of the program
	Logger  *slog.Logger // default: discard
}

// Tracer sends the traces of a store until [Tracer.Close].
type Tracer struct {
	store   *store.Store
	config  Config
	options Options
	client  *http.Client
	queue   *queue
	down    atomic.Bool // the last trace was not taken
	holds   atomic.Bool // this process has the cursor
	unread  bool        // the rows of the last save or load were not readable

	pause, comeback, flush, oldest time.Duration

	leave chan struct{} // closed when the process ends
	end   context.CancelFunc
	ended chan struct{}
}

var errLeaving = errors.New("the process ends")

// Start begins to send the traces of a store. It makes no connection and returns at once. Close
// the tracer before the store.
func Start(ctx context.Context, s *store.Store, c Config, o Options) *Tracer {
	t := newTracer(s, c, o)
	t.start(ctx)
	return t
}

func newTracer(s *store.Store, c Config, o Options) *Tracer {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return &Tracer{
		store: s, config: c, options: o, client: c.client(), queue: newQueue(queueSize),
		pause: firstPause, comeback: comeback, flush: lastFlush, oldest: oldest,
		leave: make(chan struct{}), ended: make(chan struct{}),
	}
}

func (t *Tracer) start(ctx context.Context) {
	life, end := context.WithCancel(context.WithoutCancel(ctx)) // the last traces are sent after ctx
	t.end = end
	go func() {
		defer close(t.ended)
		t.run(life)
	}()
}

// Counts returns the numbers of traces since the start of this process.
func (t *Tracer) Counts() Counts { return t.queue.counts() }

// Close sends the traces of saves that the log has, for three seconds at most, and ends. What is not sent
// by then is sent by the next process with traces.
func (t *Tracer) Close() {
	ctx, cancel := context.WithTimeout(context.Background(), t.flush)
	defer cancel()
	close(t.leave)
	if t.holds.Load() {
		if last, err := t.store.Log.Last(ctx); err == nil {
			err = t.queue.empty(ctx, last)
			if c := t.queue.counts(); err != nil && c.Waiting > 0 {
				t.options.Logger.Warn("traces not sent; the next process with --traces sends them", "waiting", c.Waiting, "collector", t.config.Endpoint.Redacted())
			}
		}
	}
	t.end()
	<-t.ended
	t.client.CloseIdleConnections()
}
