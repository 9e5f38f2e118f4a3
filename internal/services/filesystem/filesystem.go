// Package filesystem lets programs that write and read files save and load
// checkpoints: it answers the requests below /v1/store/fs/, with which the fsspec
// filesystem of the Python client is made.
//
//	path     RUN, RUN/NAME, RUN/NAME/FILE, or with a PART: RUN/PART/NAME[/FILE],
//	         which is the checkpoint PART~NAME of the run
//	pending  the files that are written under a name, by any number of processes,
//	         until .metadata.tmp is renamed to .metadata: that is the commit
//	stream   a file that is written: the client fills blocks of shared memory, and
//	         says so; behind that they are digested, and brought to the disk
//	ring     the blocks of one stream; memory, those of all:
//	         SHARED/ckptstore-writes-<…>-n0/N
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
	"time"

	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/session/shm"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// Prefix begins the paths of the requests.
const Prefix = session.ServicePath + "fs/"

// maxBody bounds the body of a request, in bytes.
const maxBody = 1 << 20

// Handler answers the requests. Close ends what is pending.
type Handler struct {
	store *store.Store
	log   *slog.Logger
	job   func(ctx context.Context, save whole) (string, error)
	// memory is what clients write into.
	memory *memory

	mu      sync.Mutex
	closed  bool
	next    uint64 // number of the last stream or reading
	pending map[target]*pending
	streams map[uint64]*stream
	reads   map[uint64]*reading
	clients map[int]*client
	opened  opened
}

// sweepTimeout bounds the removal of what others have left.
const sweepTimeout = time.Minute

// New serves the checkpoints of a store. What processes that are gone have left
// pending there is removed.
func New(s *store.Store, log *slog.Logger) *Handler {
	shared, _ := shm.Dir()
	h := &Handler{
		store: s, log: log, memory: newMemory(shared, log), clients: map[int]*client{},
		pending: map[target]*pending{}, streams: map[uint64]*stream{}, reads: map[uint64]*reading{},
	}
	h.job = (&jobs{store: s, log: log, runs: map[string]chan struct{}{}}).save
	ctx, cancel := context.WithTimeout(context.Background(), sweepTimeout)
	defer cancel()
	if err := s.Data.SweepPending(ctx); err != nil {
		log.Warn("files of saves that were never committed stay on disk", "error", err)
	}
	return h
}

// Handle adds the requests to those that a server answers.
func (h *Handler) Handle(mux *http.ServeMux) {
	handle(mux, "stat", h.stat)
	handle(mux, "list", h.list)
	handle(mux, "create", h.create)
	handle(mux, "write", h.write)
	handle(mux, "close", h.finish)
	handle(mux, "discard", h.discard)
	handle(mux, "rename", h.rename)
	handle(mux, "remove", h.remove)
	handle(mux, "open", h.open)
	handle(mux, "verify", h.verify)
	handle(mux, "done", h.done)
}

// Close gives up what is pending, and ends every reading.
func (h *Handler) Close() error {
	h.mu.Lock()
	h.closed = true
	pending, reads, streams, clients := h.pending, h.reads, h.streams, h.clients
	h.pending, h.reads, h.streams, h.clients = nil, nil, nil, nil
	h.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), sweepTimeout)
	defer cancel()
	for _, c := range clients {
		c.stop()
	}
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
	return errors.Join(append(problems, h.memory.close())...)
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

// handle answers one request in JSON.
func handle[In, Out any](mux *http.ServeMux, name string, answer func(context.Context, In) (Out, error)) {
	mux.HandleFunc("POST "+Prefix+name, func(w http.ResponseWriter, r *http.Request) {
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
