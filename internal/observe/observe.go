// Package observe serves the state of a store to a monitoring system.
//
//	GET /metrics   metrics in the format of OpenMetrics, or Prometheus's older text format
//	GET /healthz   200 while the process serves
//	GET /readyz    200 if the views have caught up, the log accepts events and the disk has room;
//	               503 otherwise; a line for each, with the reason
//
// The metrics are a fold of the log: they are read from the views, so a trainer is seen although
// it is dead, and a scrape needs no connection to it. Totals survive a restart of the owner. The
// owner of a store serves them; a process that stands by serves what it knows of itself.
//
// A series has a run at most, never a rank, a step or a checkpoint. The runs are those that are
// live, or were in the last hour; if there are too many for [MaxRuns] or [MaxSeries], the others are
// counted.
package observe

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/ckptstore/ckptstore/internal/otlp"
	"github.com/ckptstore/ckptstore/internal/store"
)

// Limits of a scrape.
const (
	MaxRuns   = 200  // listed with metrics of their own
	MaxSeries = 5000 // of all metrics
	// recent is how long an ended run is listed.
	recent = time.Hour
	// fresh is how long an answer is given again: several servers may scrape one process.
	fresh = time.Second
	// scrapeTimeout bounds the reading of the store for one answer.
	scrapeTimeout = 10 * time.Second
	// maxLag is how many events the views of a ready store may be behind.
	maxLag = 10_000
	// maxCursors bounds the listed cursors.
	maxCursors = 200
)

// Options configure [Handler].
type Options struct {
	Version string           // of the program
	Logger  *slog.Logger     // default: discard
	Now     func() time.Time // default: time.Now
	Traces  *otlp.Tracer     // nil: this process sends no traces
}

// Handler serves /metrics, /healthz and /readyz of a store. It asks for no token, as the
// server around it may: the metrics have the names of runs and cursors, and nothing that a run has
// computed.
func Handler(s *store.Store, o Options) http.Handler {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	c := &collector{store: s, options: o, live: map[string]checked{}}
	c.liveJob = func(ctx context.Context, run string) (string, error) {
		live, err := s.LiveJob(ctx, run)
		if err != nil || live == nil {
			return "", err
		}
		return live.Job, nil
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /metrics", c.serve)
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		text(w, http.StatusOK, "ok\n")
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), scrapeTimeout)
		defer cancel()
		lines, ready := readiness(s.Health(ctx))
		status := http.StatusOK
		if !ready {
			status = http.StatusServiceUnavailable
		}
		text(w, status, lines)
	})
	return mux
}

func text(w http.ResponseWriter, status int, lines string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_, _ = w.Write([]byte(lines)) // a disconnected client needs no answer
}

// readiness returns a line for each condition, and whether all hold.
func readiness(h store.Health) (lines string, ready bool) {
	var b strings.Builder
	ready = true
	condition := func(name string, problem error, fine string) {
		if problem != nil {
			ready = false
			fmt.Fprintf(&b, "%s: not ready: %s\n", name, oneLine(problem.Error()))
			return
		}
		fmt.Fprintf(&b, "%s: ready: %s\n", name, fine)
	}
	lag := h.Log - min(h.Log, h.Views)
	views, where := error(nil), fmt.Sprintf("%d events behind the log", lag)
	switch {
	case h.Halted != nil:
		views = fmt.Errorf("they halted at event %d: %w; run `ckptstore verify`, then start the owner again", h.Views, h.Halted)
	case !h.Owns:
		where = "another process owns the store and answers for it"
	case h.LogErr == nil && lag > maxLag:
		views = fmt.Errorf("they are %d events behind the log, more than %d", lag, maxLag)
	case h.Memory:
		where += ", in memory, because their directory fails"
	}
	condition("log", h.LogErr, fmt.Sprintf("ends at event %d", h.Log))
	condition("views", views, where)
	condition("disk", h.Room, "facts are accepted")
	return b.String(), ready
}

// oneLine keeps a message from starting a line of its own.
func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }

// collector answers scrapes of one store.
type collector struct {
	store   *store.Store
	options Options
	liveJob func(ctx context.Context, run string) (job string, err error) // by its lease

	mu   sync.Mutex // held while the store is read: one reading answers all scrapes of that time
	at   time.Time
	last []prometheus.Metric
	live map[string]checked // by run
}

// serve answers a scrape.
func (c *collector) serve(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), scrapeTimeout)
	defer cancel()
	metrics, err := c.collect(ctx)
	if err != nil {
		c.options.Logger.Warn("metrics not collected", "error", err)
		text(w, http.StatusServiceUnavailable, fmt.Sprintf("read the store: %s; see /readyz\n", oneLine(err.Error())))
		return
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(gathered(metrics))
	promhttp.HandlerFor(registry, promhttp.HandlerOpts{EnableOpenMetrics: true}).ServeHTTP(w, r)
}

// gathered are the metrics of one scrape.
type gathered []prometheus.Metric

var _ prometheus.Collector = gathered(nil)

// Describe implements [prometheus.Collector].
func (gathered) Describe(to chan<- *prometheus.Desc) {
	for _, f := range families() {
		to <- f.desc()
	}
}

// Collect implements [prometheus.Collector].
func (g gathered) Collect(to chan<- prometheus.Metric) {
	for _, m := range g {
		to <- m
	}
}
