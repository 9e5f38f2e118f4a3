// Package services answers the requests about a store itself, below /v1/store/,
// for whoever serves sockets to the processes that ask: a trainer for its ranks,
// and an agent.
//
//	Services   an http.Handler for all of them
//
// The caller checks tokens, and tells who is at the other end by peer.Context.
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

// Services are the requests about one store.
type Services struct {
	*http.ServeMux
	reading    *reading.Server
	filesystem *filesystem.Handler // nil where only receipts are read
}

var _ http.Handler = (*Services)(nil)

// New serves a store, which must stay open until Close.
func New(st *store.Store, log *slog.Logger) *Services {
	s := &Services{ServeMux: http.NewServeMux(), reading: reading.New(st, reading.Options{Logger: log}), filesystem: filesystem.New(st, log)}
	s.reading.Handle(s.ServeMux)
	s.filesystem.Handle(s.ServeMux)
	s.HandleFunc("/v1/store/", unknown)
	return s
}

// Reading serves what the receipts of a store name, to who may not write there.
func Reading(r *store.Receipts, log *slog.Logger) *Services {
	s := &Services{ServeMux: http.NewServeMux(), reading: reading.Of(r, reading.Options{Logger: log})}
	s.reading.Handle(s.ServeMux)
	s.HandleFunc("/v1/store/fs/", func(w http.ResponseWriter, _ *http.Request) {
		httpkit.Refuse(w, problem.Errorf(problem.Denied, "this store cannot be written here, and its files are served with its log alone: read the checkpoint by ckptstore.open, or ckptstore.dcp.StorageReader"))
	})
	s.HandleFunc("/v1/store/", unknown)
	return s
}

// unknown answers what is no request of this version.
func unknown(w http.ResponseWriter, r *http.Request) {
	httpkit.Refuse(w, problem.Errorf(problem.NotFound, "there is no request %s %s: this program is too old for it, or the path is wrong", r.Method, r.URL.Path))
}

// Busy is what of the requests is not over, though it was answered; empty for
// nothing.
func (s *Services) Busy() string {
	if s.filesystem == nil {
		return s.reading.Busy()
	}
	return cmp.Or(s.reading.Busy(), s.filesystem.Busy())
}

// Close gives back what the requests hold. None of them may be under way.
func (s *Services) Close() error {
	if s.filesystem == nil {
		return s.reading.Close()
	}
	return errors.Join(s.reading.Close(), s.filesystem.Close())
}
