package session

import (
	"context"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/session/dedup"
	"github.com/ckptstore/ckptstore/internal/session/handoff"
	"github.com/ckptstore/ckptstore/internal/session/pulse"
)

// growing asks the ranks to make room for more nodes.
type growing struct{}

// Listens implements [Orders].
func (growing) Listens() {}

// Tell implements [Orders].
func (growing) Tell() string { return Grow }

// Ranks that are asked to make room for nodes get the request to save and end, by a report and by a
// question. The processes of their nodes learn what for: a coordinator that takes over asks them.
func TestRequestToGrow(t *testing.T) {
	t.Parallel()
	h := handoff.New(handoff.Config{
		Attempt: 1, World: 1, Limit: time.Minute, Now: time.Now, Log: slog.New(slog.DiscardHandler),
		Record: func(context.Context, ...events.Body) error { return nil }, Stop: growing{}.Tell,
	})
	ended := make(chan error, 1)
	go func() {
		_, err := h.Run(t.Context())
		ended <- err
	}()
	s := &rankServer{Group: &Group{
		Attempt: Attempt{Number: 1, Orders: growing{}}, cfg: Config{Nodes: Nodes{{0}}}, work: t.Context(), pulses: pulse.New(1), handoff: h,
	}, relayed: true}
	mux := http.NewServeMux()
	s.meet(mux)
	ask := func(op, body string) *httptest.ResponseRecorder {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/"+op, strings.NewReader(body))
		r.Header.Set(dedup.Header, "1 1")
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, r)
		if w.Code != http.StatusOK || !strings.Contains(w.Body.String(), `"stop":"preempt"`) {
			t.Errorf("%s: the rank gets status %d, %s", op, w.Code, w.Body)
		}
		return w
	}
	if got := ask("should_stop", `{}`).Header().Get(RequestHeader); got != Grow {
		t.Errorf("its node learns %q of the question", got)
	}
	of, err := handoff.ParseReported(ask("report", `{"step":1,"metrics":{}}`).Header().Get(ReportedHeader))
	if err != nil || of.Stop != Grow {
		t.Errorf("its node learns %+v of the report: %v", of, err)
	}
	h.Ended(0)
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
