// Package filesystem lets programs that write and read files save and load
// checkpoints: it answers the requests below /v1/store/fs/, with which the fsspec
// filesystem of the Python client is made.
//
//	path     RUN, RUN/NAME, RUN/NAME/FILE, or with a PART: RUN/PART/NAME[/FILE],
//	         which is the checkpoint PART~NAME of the run
//	pending  the files that are written under a name, by any number of processes,
//	         until .metadata.tmp is renamed to .metadata: that is the commit
//	stream   a file that is written: its bytes come through a ring of blocks in
//	         shared memory
//	reading  a committed file that is read: the client reads it by its path, after
//	         the blocks that it asked for were compared with their checksums
//
// What is pending is in nobody's way: paths lead to committed checkpoints of the
// run's line alone, until the commit, and then to the new one. A pending
// checkpoint whose writers were killed is written anew by the next ones, file by
// file, and ends with the process that serves it.
package filesystem

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"sync"
	"syscall"

	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/store"
	"github.com/ckptstore/ckptstore/worker"
)

// Prefix begins the paths of the requests.
const Prefix = worker.ServicePath + "fs/"

// maxBody bounds the body of a request, in bytes.
const maxBody = 1 << 20

// Handler answers the requests. Close ends what is pending.
type Handler struct {
	store *store.Store
	log   *slog.Logger
	job   func(ctx context.Context, save whole) (string, error)
	mux   *http.ServeMux
	rings rings

	mu      sync.Mutex
	closed  bool
	next    uint64 // number of the last stream or reading
	pending map[target]*pending
	streams map[uint64]*stream
	reads   map[uint64]*reading
	opened  opened
}

// New serves the checkpoints of a store. What earlier processes have left
// pending there is removed.
func New(ctx context.Context, s *store.Store, log *slog.Logger) *Handler {
	h := &Handler{
		store: s, log: log, mux: http.NewServeMux(),
		pending: map[target]*pending{}, streams: map[uint64]*stream{}, reads: map[uint64]*reading{},
	}
	h.job = (&jobs{store: s, log: log, runs: map[string]chan struct{}{}}).save
	if err := s.Data.SweepPending(ctx); err != nil {
		log.Warn("files of saves that were never committed stay on disk", "error", err)
	}
	handle(h, "stat", h.stat)
	handle(h, "list", h.list)
	handle(h, "create", h.create)
	handle(h, "write", h.write)
	handle(h, "close", h.finish)
	handle(h, "discard", h.discard)
	handle(h, "rename", h.rename)
	handle(h, "remove", h.remove)
	handle(h, "open", h.open)
	handle(h, "verify", h.verify)
	handle(h, "done", h.done)
	return h
}

// ServeHTTP implements [http.Handler].
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) { h.mux.ServeHTTP(w, r) }

// Close gives up what is pending, and ends every reading.
func (h *Handler) Close(ctx context.Context) error {
	h.mu.Lock()
	h.closed = true
	pending, reads, streams := h.pending, h.reads, h.streams
	h.pending, h.reads, h.streams = nil, nil, nil
	h.mu.Unlock()
	for _, r := range reads {
		r.close()
	}
	var problems []error
	for _, p := range pending {
		problems = append(problems, p.remove(ctx))
	}
	for _, s := range streams {
		s.end(h)
	}
	h.rings.close()
	return errors.Join(problems...)
}

// problem is an error with its HTTP status.
type problem struct {
	status int
	err    error
}

func (p *problem) Error() string { return p.err.Error() }
func (p *problem) Unwrap() error { return p.err }

func refused(format string, args ...any) error {
	return &problem{http.StatusBadRequest, fmt.Errorf(format, args...)}
}

func conflict(format string, args ...any) error {
	return &problem{http.StatusConflict, fmt.Errorf(format, args...)}
}

func missing(path string) error {
	return &problem{http.StatusNotFound, fmt.Errorf("%s%s: %w", scheme, path, fs.ErrNotExist)}
}

// handle answers one request in JSON.
func handle[In, Out any](h *Handler, name string, answer func(context.Context, In) (Out, error)) {
	h.mux.HandleFunc("POST "+Prefix+name, func(w http.ResponseWriter, r *http.Request) {
		var in In
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
		if err == nil {
			err = json.Unmarshal(body, &in)
		}
		if err != nil {
			reply(w, refused("decode request fs/%s: %w", name, err))
			return
		}
		out, err := answer(r.Context(), in)
		if err != nil {
			reply(w, err)
			return
		}
		data, err := json.Marshal(out)
		if err != nil {
			reply(w, err)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(data) // a client that is gone needs no reply
	})
}

func reply(w http.ResponseWriter, err error) {
	status := http.StatusInternalServerError
	var p *problem
	switch {
	case errors.As(err, &p):
		status = p.status
	case errors.Is(err, projections.ErrNotFound), errors.Is(err, fs.ErrNotExist):
		status = http.StatusNotFound
	case errors.Is(err, context.DeadlineExceeded):
		status = http.StatusGatewayTimeout
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		status = http.StatusInsufficientStorage
	}
	text, _ := json.Marshal(map[string]string{"error": err.Error()}) // a string always encodes
	w.WriteHeader(status)
	_, _ = w.Write(text)
}

// number is the next of streams and readings.
func (h *Handler) number() (uint64, error) {
	if h.closed {
		return 0, &problem{http.StatusServiceUnavailable, errors.New("the trainer or agent is ending")}
	}
	h.next++
	return h.next, nil
}
