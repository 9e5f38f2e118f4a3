// Package reading serves the contents of checkpoints to any process: no rank, no
// collective.
//
//	Server   answers /v1/store/list, describe, read and done; docs/reference/protocol.md
//	         has their bodies
//	Catalog  the checkpoints: those in the log of a store, or, if nothing may be
//	         written, those with receipts
//	source   a checkpoint that is read: of the store, or at a path
//	read     bytes that were verified and copied into shared memory for one
//	         caller, which copies them out and then requests done
//	memory   the files of reads, in a directory of this process
//
//	SHARED/ckptstore-reads-<…>-n0/
//	  lock   flock(2) of the process that serves
//	  7      one file for each read that is not done, and some that are kept:
//	         memory that was touched before is far faster
//
// The memory of a read is released by done, by the end of the calling process,
// and by Close. The memory of a killed server is removed by the next server on
// this machine, and by `ckptstore gc --staging --all-stores`.
package reading

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/http"
	"sync"

	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/httpkit"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/session/shm"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// maxBody bounds the body of a request, in bytes.
const maxBody = 1 << 30

// Options configure a server.
type Options struct {
	Shared string       // directory of shared memory; default: the machine's
	Logger *slog.Logger // default: discard
}

// Catalog lists and opens checkpoints. Its methods may be called concurrently.
type Catalog interface {
	// List returns the checkpoints of a run, or of all runs, of each run the
	// newest first: the committed ones of the line, or with all every one.
	List(ctx context.Context, run string, all bool) ([]projections.Checkpoint, error)
	// Committed returns the checkpoint that a reference names.
	Committed(ctx context.Context, ref string) (projections.Checkpoint, error)
	// ReaderOf opens a checkpoint that Committed has returned.
	ReaderOf(c projections.Checkpoint) (*data.FileReader, error)
}

var _ Catalog = (*store.Receipts)(nil)

// Server answers the requests. Close releases all memory.
type Server struct {
	catalog Catalog
	log     *slog.Logger
	memory  *memory
	sources sources

	mu     sync.Mutex
	reads  map[uint64]*read
	next   uint64
	owners map[int]*owner // by process
	closed bool
}

// New serves a store, which must stay open until Close.
func New(st *store.Store, o Options) *Server { return Of(logged{st}, o) }

// Of serves the checkpoints of a catalog.
func Of(c Catalog, o Options) *Server {
	if o.Shared == "" {
		o.Shared, _ = shm.Dir()
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return &Server{
		catalog: c, log: o.Logger, memory: newMemory(o.Shared, o.Logger),
		reads: map[uint64]*read{}, owners: map[int]*owner{},
	}
}

// Handle adds the requests to a mux. The server of the mux checks the callers'
// tokens, and identifies them by peer.Context.
func (s *Server) Handle(mux *http.ServeMux) {
	mux.Handle("POST /v1/store/list", httpkit.Handle(maxBody, s.onList))
	mux.Handle("POST /v1/store/describe", httpkit.Handle(maxBody, s.onDescribe))
	mux.Handle("POST /v1/store/read", http.HandlerFunc(s.serveRead))
	mux.Handle("POST /v1/store/done", httpkit.Handle(maxBody, s.onDone))
}

// notFound turns the error of a missing file into one about the requested path.
func notFound(path string, err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return problem.Errorf(problem.NotFound, "there is no checkpoint at %s: give the path of a DCP directory, of a .safetensors file or of a Hugging Face directory: %w", path, err)
	}
	return err
}

// Busy describes the reads that callers have not released; "" if there are none.
func (s *Server) Busy() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := len(s.reads); n > 0 {
		return fmt.Sprintf("%d reads are not given back", n)
	}
	return ""
}
