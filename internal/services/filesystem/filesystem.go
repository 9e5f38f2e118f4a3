// Package filesystem lets programs that write and read files save and load
// checkpoints: it answers the requests below /v1/store/fs/, on which the fsspec
// filesystem of the Python client is built.
//
//	path     RUN, RUN/NAME, RUN/NAME/FILE, or with a PART: RUN/PART/NAME[/FILE],
//	         which is the checkpoint PART~NAME of the run
//	pending  the files that are written under a name, by any number of processes,
//	         until .metadata.tmp is renamed to .metadata: that is the commit
//	stream   a file that is written: the client fills blocks of shared memory, and
//	         reports each; in the background they are digested and written to disk
//	ring     the blocks of one stream; memory, those of all:
//	         SHARED/ckptstore-writes-<…>-n0/N
//	reading  a committed file that is read: the client reads it by its path, after
//	         the requested blocks were compared with their checksums
//	copied   what was read of a file in a bucket, in shared memory: its client's path
//
// Pending files are invisible: until the commit, paths lead only to committed
// checkpoints of the run's line, and afterwards to the new one. The files of a
// pending checkpoint whose writers were killed are replaced one by one by the
// next writers. A pending checkpoint ends with the process that serves it.
package filesystem

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/internal/httpkit"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/session/shm"
	"github.com/ckptstore/ckptstore/internal/store"
)

// Prefix is the path prefix of the requests.
const Prefix = session.ServicePath + "fs/"

// maxBody bounds the body of a request, in bytes. maxDescription bounds that of a file's
// description, which has its bytes between tensors.
const maxBody, maxDescription = 1 << 20, 256 << 20

// Handler answers the requests. Close abandons pending saves.
type Handler struct {
	store *store.Store
	log   *slog.Logger
	job   func(ctx context.Context, save whole) (string, error)
	// memory is the shared memory that clients write to.
	memory *memory

	up Upstream // leads to the process that commits what no rank writes; nil: this one

	mu      sync.Mutex
	closed  bool
	next    uint64 // number of the last stream or reading
	pending map[target]*pending
	streams map[uint64]*stream
	reads   map[uint64]*reading
	clients map[int]*client
	placed  map[uint64]*placed // files that other machines write
	opened  opened
}

// sweepTimeout bounds the removal of other processes' leftovers.
const sweepTimeout = time.Minute

// New serves the checkpoints of a store. It removes the pending files of
// processes that are gone.
func New(s *store.Store, log *slog.Logger) *Handler {
	h := Following(s, log, nil)
	ctx, cancel := context.WithTimeout(context.Background(), sweepTimeout)
	defer cancel()
	if err := s.Data.SweepPending(ctx); err != nil {
		log.Warn("files of uncommitted saves not removed", "error", err)
	}
	return h
}

// Following is New for a machine whose ranks another machine's process coordinates: up
// leads there for callers that are no ranks of a group; it may be nil. It removes no
// pending files: whether they are in use is known on the machine of their process.
func Following(s *store.Store, log *slog.Logger, up Upstream) *Handler {
	shared, _ := shm.Dir()
	h := &Handler{
		store: s, log: log, memory: newMemory(shared, log), clients: map[int]*client{},
		pending: map[target]*pending{}, streams: map[uint64]*stream{}, reads: map[uint64]*reading{}, placed: map[uint64]*placed{}, up: up,
	}
	h.job = (&jobs{store: s, log: log, runs: map[string]chan struct{}{}}).save
	return h
}

// Handle adds the requests to a mux.
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
	handle(mux, "place", h.onPlace)
	handleUpTo(mux, "placed", maxDescription, h.onPlaced)
	handle(mux, "unplaced", h.onUnplaced)
}

// Close abandons pending saves, and ends every reading.
func (h *Handler) Close() error {
	h.mu.Lock()
	h.closed = true
	pending, reads, streams, clients, placed := h.pending, h.reads, h.streams, h.clients, h.placed
	h.pending, h.reads, h.streams, h.clients, h.placed = nil, nil, nil, nil, nil
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
	for _, f := range placed {
		if f.own != nil {
			problems = append(problems, f.own.Remove(ctx))
		}
	}
	return errors.Join(append(problems, h.memory.close())...)
}

func refused(format string, args ...any) error {
	return problem.Errorf(problem.Invalid, format, args...)
}

func conflict(format string, args ...any) error {
	return problem.Errorf(problem.Conflict, format, args...)
}

// handle answers one request in JSON. A missing file is the requested one: its
// checkpoint was deleted meanwhile.
func handle[In, Out any](mux *http.ServeMux, name string, answer func(context.Context, In) (Out, error)) {
	handleUpTo(mux, name, maxBody, answer)
}

// handleUpTo is handle for bodies of at most limit bytes.
func handleUpTo[In, Out any](mux *http.ServeMux, name string, limit int64, answer func(context.Context, In) (Out, error)) {
	mux.Handle("POST "+Prefix+name, httpkit.Handle(limit, func(ctx context.Context, in In) (Out, error) {
		out, err := answer(ctx, in)
		if !problem.Given(err) && errors.Is(err, fs.ErrNotExist) {
			err = problem.Wrap(problem.NotFound, err)
		}
		return out, err
	}))
}
