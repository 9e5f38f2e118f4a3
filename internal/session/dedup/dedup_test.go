package dedup

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
)

// A relayed request is served once, however often it comes, and every repetition gets the
// same answer, also when the connection of the first one broke while it was being served.
func TestRelayedRequestRepeated(t *testing.T) {
	t.Parallel()
	served := atomic.Int32{}
	began, proceed := make(chan struct{}, 1), make(chan struct{})
	var a Answers
	h := a.Once(t.Context(), 1, 1<<20, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		served.Add(1)
		began <- struct{}{}
		<-proceed
		text, err := io.ReadAll(r.Body)
		if err != nil || r.Context().Err() != nil {
			t.Errorf("%v, %v", err, r.Context().Err())
		}
		w.Header().Set("Kept", "yes")
		w.WriteHeader(http.StatusConflict)
		_, _ = w.Write(append(text, '!'))
	}))
	ask := func(ctx context.Context, number string) *httptest.ResponseRecorder {
		r := httptest.NewRequestWithContext(ctx, http.MethodPost, "/v1/send", strings.NewReader("text"))
		r.Header.Set(Header, number)
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		return w
	}
	broken, breaks := context.WithCancel(t.Context())
	go func() {
		<-began
		breaks()
	}()
	ask(broken, "1 1")
	close(proceed)
	for range 2 {
		got := ask(t.Context(), "1 1")
		if got.Code != http.StatusConflict || got.Body.String() != "text!" || got.Header().Get("Kept") != "yes" {
			t.Errorf("answer %+v", got)
		}
	}
	if n := served.Load(); n != 1 {
		t.Errorf("served %d times", n)
	}
	ask(t.Context(), "2 2")
	if of := a.all[1]; served.Load() != 2 || len(of) != 1 {
		t.Errorf("served %d times, %d answers are kept", served.Load(), len(of))
	}
	if got := ask(t.Context(), "x"); got.Code != http.StatusBadRequest {
		t.Errorf("status %d without a number", got.Code)
	}
}

// A copy of a request that a broken connection delivers late is not served again: a paused
// coordinator may have the first one unread in one socket and the second in another.
func TestLateCopyOfRelayedRequest(t *testing.T) {
	served := 0
	var a Answers
	h := a.Once(t.Context(), 1, 1<<20, http.HandlerFunc(func(http.ResponseWriter, *http.Request) { served++ }))
	ask := func(number string) {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/send", strings.NewReader("text"))
		r.Header.Set(Header, number)
		h.ServeHTTP(httptest.NewRecorder(), r)
	}
	ask("1 1")
	ask("2 2") // the rank has the answer of 1
	ask("1 1") // the first copy of 1, late
	if served != 2 {
		t.Errorf("2 requests were served %d times", served)
	}
}
