package jetlog

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
)

// ErrBroken is an embedded server that cannot write its files.
var ErrBroken = errors.New("the log's server cannot write")

// healthEvery is how often [Server.Watch] looks.
const healthEvery = 200 * time.Millisecond

// Watch returns when the server cannot write any more, with an error that is
// [ErrBroken] and says why, or when ctx ends, with its cause.
//
// After one write that failed, as on a full disk, the server takes nothing more
// into that stream for as long as it lives, and does not answer: who appends
// waits for the deadline. What it acknowledged is on the disk, and a server that
// is started again goes on behind it.
func (s *Server) Watch(ctx context.Context) error {
	tick := time.NewTicker(healthEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
		if why := s.broken(); why != "" {
			return fmt.Errorf("%w: %s", ErrBroken, why)
		}
	}
}

// broken says what cannot be written, or nothing.
func (s *Server) broken() string {
	if !s.ns.JetStreamEnabled() {
		return "it has stopped its streams"
	}
	// Everything else that it says of its health may be over soon: on a busy
	// machine it is now and then not ready within a millisecond.
	if h := s.ns.Healthz(nil); strings.Contains(h.Error, "write error") {
		return strings.TrimSpace(h.Error)
	}
	return ""
}
