// Package reading answers requests that look at checkpoints and read parts of
// them, from any process: no rank, no collective.
//
//	Server   answers /v1/store/list, describe, read and done; docs/reference/protocol.md
//	         has their bodies
//	Catalog  the checkpoints: those that the log of a store knows, or, where nothing
//	         may be written, those that have receipts
//	source   a checkpoint that is read: of the store, or at a path
//	read     bytes that were verified and copied into shared memory for one
//	         caller, which copies them out and says done
//	memory   the files of reads, in a directory of this process
//
//	SHARED/ckptstore-reads-<…>-n0/
//	  lock   flock(2) of the process that serves
//	  7      one file for each read that is not done, and some that are kept:
//	         memory that was touched before is far faster
//
// The memory of a read is given back by done, by the end of the process that
// asked, and by Close. What a killed server leaves is removed by the next one on
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

// Options say how a server works.
type Options struct {
	Shared string       // where shared memory is; default: that of this machine
	Logger *slog.Logger // default: discard
}

// Catalog says which checkpoints there are, and opens them. All of it may be called
// concurrently.
type Catalog interface {
	// List are those of a run, or of all runs, of each run the newest first: the
	// committed ones of the line, and with all the others too.
	List(ctx context.Context, run string, all bool) ([]projections.Checkpoint, error)
	// Committed is the one that a reference stands for.
	Committed(ctx context.Context, ref string) (projections.Checkpoint, error)
	// ReaderOf reads one that Committed has given.
	ReaderOf(c projections.Checkpoint) (*data.FileReader, error)
}

var _ Catalog = (*store.Receipts)(nil)

// Server answers the requests. Close gives all memory back.
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

// Of serves what a catalog has.
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

// Handle adds the requests to a mux. Whoever serves it checks the callers' tokens,
// and tells who they are by peer.Context.
func (s *Server) Handle(mux *http.ServeMux) {
	mux.Handle("POST /v1/store/list", httpkit.Handle(maxBody, s.onList))
	mux.Handle("POST /v1/store/describe", httpkit.Handle(maxBody, s.onDescribe))
	mux.Handle("POST /v1/store/read", http.HandlerFunc(s.serveRead))
	mux.Handle("POST /v1/store/done", httpkit.Handle(maxBody, s.onDone))
}

// notFound makes a missing file one that was asked for.
func notFound(path string, err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return problem.Errorf(problem.NotFound, "there is no checkpoint at %s: give the path of a DCP directory, of a .safetensors file or of a Hugging Face directory: %w", path, err)
	}
	return err
}

// Busy is what callers have not given back; empty for nothing.
func (s *Server) Busy() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := len(s.reads); n > 0 {
		return fmt.Sprintf("%d reads are not given back", n)
	}
	return ""
}
