package session

import (
	"errors"
	"net/http"
	"path"
)

// ServicePath begins the paths of requests that [Config.Services] answers.
const ServicePath = "/v1/store/"

// service passes what a worker asks of the store itself to whoever answers that.
func (s *rankServer) service() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := s.authorized(r); err != nil {
			refuse(w, err)
			return
		}
		if s.cfg.Services == nil {
			refuse(w, &problem{http.StatusNotFound, errors.New("this trainer has no requests about the store: upgrade it")})
			return
		}
		defer s.pulses.Begin(s.rank, path.Base(r.URL.Path))()
		s.cfg.Services.ServeHTTP(w, s.called(r))
	})
}
