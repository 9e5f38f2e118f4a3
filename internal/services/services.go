// Package services answers the requests about a store itself, below /v1/store/,
// for servers with sockets: a trainer, for its ranks, and an agent.
//
//	Services   an http.Handler for all of them
//
// The caller checks tokens, and identifies the client by peer.Context.
package services

import (
	"cmp"
	"errors"
	"log/slog"
	"net/http"

	"github.com/ckptstore/ckptstore/internal/httpkit"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/services/filesystem"
	"github.com/ckptstore/ckptstore/internal/services/reading"
	"github.com/ckptstore/ckptstore/internal/store"
)

// Services serves the requests about one store.
type Services struct {
	*http.ServeMux
	reading    *reading.Server
	filesystem *filesystem.Handler // nil if only receipts are read
}

var _ http.Handler = (*Services)(nil)

// New serves a store, which must stay open until Close.
func New(st *store.Store, log *slog.Logger) *Services {
	return serving(reading.New(st, reading.Options{Logger: log}), filesystem.New(st, log))
}

func serving(r *reading.Server, f *filesystem.Handler) *Services {
	s := &Services{ServeMux: http.NewServeMux(), reading: r, filesystem: f}
	s.reading.Handle(s.ServeMux)
	s.filesystem.Handle(s.ServeMux)
	s.HandleFunc("/v1/store/", unknown)
	return s
}

// Following is New for a machine whose ranks another machine's process coordinates: see
// [filesystem.Following].
func Following(st *store.Store, log *slog.Logger, up filesystem.Upstream) *Services {
	return serving(reading.New(st, reading.Options{Logger: log}), filesystem.Following(st, log, up))
}

// Reading serves the checkpoints in a store's receipts, to users who may not
// write there.
func Reading(r *store.Receipts, log *slog.Logger) *Services {
	s := &Services{ServeMux: http.NewServeMux(), reading: reading.Of(r, reading.Options{Logger: log})}
	s.reading.Handle(s.ServeMux)
	s.HandleFunc("/v1/store/fs/", func(w http.ResponseWriter, _ *http.Request) {
		httpkit.Refuse(w, problem.Errorf(problem.Denied, "this store cannot be written here, and its files are served with its log alone: read the checkpoint by ckptstore.open, or ckptstore.dcp.StorageReader"))
	})
	s.HandleFunc("/v1/store/", unknown)
	return s
}

// unknown answers requests that this version does not have.
func unknown(w http.ResponseWriter, r *http.Request) {
	httpkit.Refuse(w, problem.Errorf(problem.NotFound, "there is no request %s %s: this program is too old for it, or the path is wrong", r.Method, r.URL.Path))
}

// Busy describes the work that continues after requests were answered; "" if
// there is none.
func (s *Services) Busy() string {
	if s.filesystem == nil {
		return s.reading.Busy()
	}
	return cmp.Or(s.reading.Busy(), s.filesystem.Busy())
}

// Close releases everything that the requests hold. No request may be running.
func (s *Services) Close() error {
	if s.filesystem == nil {
		return s.reading.Close()
	}
	return errors.Join(s.reading.Close(), s.filesystem.Close())
}
