// Package api is the HTTP API of a store, below /api/v1/: what commands print with --json, the
// events as they come, and the decisions that people make.
//
//	Handler     serves one open store; New makes it
//	document    OpenAPI 3.1, at /api/v1/openapi.json; this package alone imports huma
//	moment      every GET takes as_of and at_least, and answers with Ckpt-Sequence
//	page        a list of at most 1,000 rows, and the token of the next one
//	stream      events as server-sent events, with resume: one reader for all clients
//	decision    POST, PUT and DELETE, with If-Match and Idempotency-Key
//	guard       what comes before every request: host, origin, token, right
//	role        a set of rights; roster is a file of users with their roles
//	Server      a Handler on a listener, with its record for `ckptstore ui`
//
// Answers come from packages answer and insight, so they are those of the command line. Errors
// are problem details (RFC 9457) with the same hint.
package api

import (
	"cmp"
	"context"
	"io"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/ckptstore/ckptstore/internal/httpkit"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/store"
)

// Prefix is the path of the API.
const Prefix = "/api/v1"

// Options configure [New].
type Options struct {
	// Users may ask; required.
	Users Known
	// Hosts are the names, without port, by which clients may call the server. The names and
	// addresses of loopback are always among them.
	Hosts []string
	// Logs are directories that may have workers' output, besides that of the store.
	Logs []string
	// Page serves everything outside of /api/; nil: one line of text. It needs no token: the
	// page asks the API with the user's.
	Page http.Handler
	// Observe serves /metrics, to users, and /healthz and /readyz, to all; nil: they are not
	// served.
	Observe http.Handler
	// Version of the program.
	Version string
	Logger  *slog.Logger // default: discard

	writeLimit time.Duration // for a write to a stream; default writeLimit
	comments   time.Duration // between comments of a stream; default commentEvery
	ring       int           // events in the ring of the stream; default ringSize
	streams    int           // at once; default mostStreams
}

// Handler serves a store. It must be closed before the store.
type Handler struct {
	http.Handler
	store  *store.Store
	o      Options
	pasts  pasts
	hub    *hub
	census *census
	once   *answers
	mux    *routes
	api    huma.API
	end    func()        // of what runs in the background
	heavy  chan struct{} // held while an answer reads much
	output chan struct{} // held while an answer reads files of output, which may be large

	streams chan struct{} // a stream holds a place
}

// heavyAnswers is how many answers that read much are made at once.
const heavyAnswers = 2

// answerLimit bounds the time of an answer that is not a stream.
const answerLimit = 2 * time.Minute

// New returns a handler for a store with a log, or for a store that is read by its receipts.
func New(st *store.Store, o Options) *Handler {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	h := &Handler{store: st, o: o, once: newAnswers(), heavy: make(chan struct{}, heavyAnswers), output: make(chan struct{}, 1)}
	h.pasts.turn = make(chan struct{}, 1)
	h.streams = make(chan struct{}, cmp.Or(o.streams, mostStreams))
	h.end = h.prepare()
	h.hub = newHub(h)
	h.census = newCensus()
	h.mux = newRoutes()
	h.api = newDocument(h.mux, o.Version)
	h.readStore()
	h.readRuns()
	h.readCheckpoints()
	h.readEvents()
	h.readHealth()
	h.readAccess()
	h.decide()
	h.mux.HandleFunc("GET "+Prefix+"/openapi.json", h.serveDocument)
	h.mux.HandleFunc("GET "+Prefix+"/stream", h.stream)
	h.mux.HandleFunc("GET "+Prefix+"/audit/", h.evidence)
	h.mux.HandleFunc("/api/", h.mux.refuse)
	page := o.Page
	if page == nil {
		page = http.HandlerFunc(noPage)
	}
	top := http.NewServeMux()
	top.Handle("/api/", h.authorized(validated(dotted(h.mux))))
	top.Handle("/", page)
	h.Handler = h.guarded(top)
	if o.Observe != nil {
		top.Handle("/metrics", h.authorized(o.Observe))
		h.Handler = h.probed(h.Handler)
	}
	return h
}

// Close ends the streams, of which no new ones begin, and what runs in the background.
func (h *Handler) Close() {
	h.hub.close()
	h.end()
}

// prepare keeps the past of the log ready until end is called.
func (h *Handler) prepare() (end func()) {
	if h.store.Log == nil {
		return func() {} // there are only receipts
	}
	life, cancel := context.WithCancel(context.Background())
	var kept sync.WaitGroup
	kept.Go(func() { h.store.Past.Keep(life) })
	return func() {
		cancel()
		kept.Wait()
	}
}

// probed answers the probes of process supervisors before the guard: they call a server by its
// address and have no token.
func (h *Handler) probed(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/healthz" || r.URL.Path == "/readyz" {
			h.o.Observe.ServeHTTP(w, r)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// noPage answers requests outside of the API.
func noPage(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path != "/" {
		httpkit.Refuse(w, problem.Errorf(problem.NotFound, "there is nothing at %s: the API is described at %s/openapi.json", r.URL.Path, Prefix))
		return
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	_, _ = io.WriteString(w, "This is the HTTP API of a checkpoint store; "+Prefix+"/openapi.json describes it.\n")
}

// last returns the sequence of the log's end.
func (h *Handler) last(ctx context.Context) (uint64, error) {
	if h.store.Log == nil {
		return h.receiptsEnd(), nil
	}
	return h.store.Log.Last(ctx)
}

// needsLog returns an error in a store that is read by its receipts.
func (h *Handler) needsLog() error {
	if h.store.Log != nil {
		return nil
	}
	return problem.Errorf(problem.Denied, "this store cannot be written here, so its log is not read, only its receipts: ask a server that runs as the owner of %s", h.store.Location)
}

// reading waits for the turn of an answer that reads much.
func (h *Handler) reading(ctx context.Context) (done func(), err error) { return take(ctx, h.heavy) }

// take takes a place, and returns the function that gives it back.
func take(ctx context.Context, places chan struct{}) (done func(), err error) {
	select {
	case places <- struct{}{}:
		return func() { <-places }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}
