package session

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/rpc"
	"github.com/ckptstore/ckptstore/internal/session/mailbox"
)

// serveMessages registers the requests of messages and the store.
func (s *rankServer) serveMessages(mux *http.ServeMux) {
	mux.Handle("POST /v1/send", http.MaxBytesHandler(s.exactlyOnce(s.raw(s.onSend)), client.MaxMessage))
	mux.HandleFunc("POST /v1/recv", func(w http.ResponseWriter, r *http.Request) {
		s.raw(func(r *http.Request, _ []byte) ([]byte, error) {
			m, err := s.receive(r)
			if err != nil {
				return nil, err
			}
			w.Header().Set(client.HeaderFrom, strconv.Itoa(m.From))
			if m.Gone {
				w.Header().Set(client.HeaderGone, "1")
			}
			return m.Data, nil
		}).ServeHTTP(w, r)
	})
	mux.Handle("POST /v1/set", http.MaxBytesHandler(handle(s, s.onSet), 2*client.MaxStored))
	mux.Handle("POST /v1/get", handle(s, s.onGet))
}

// limited returns a request's context that also ends with the attempt and, unless
// limit is 0, after limit.
func (s *rankServer) limited(ctx context.Context, limit time.Duration) (context.Context, func()) {
	ctx, end := context.WithCancelCause(ctx)
	stop := context.AfterFunc(s.work, func() { end(errOver) })
	release := func() {
		stop()
		end(nil)
	}
	if limit == 0 {
		return ctx, release
	}
	ctx, cancel := s.store.calls.Timeout(ctx, limit)
	return ctx, func() {
		cancel()
		release()
	}
}

var errOver = errors.New("the attempt is over")

// over returns the refusal for a rank whose messages have ended.
func (s *rankServer) over() error {
	return problem.Errorf(problem.Gone, "rank %d of attempt %d can no longer send or receive messages: it has left, or the attempt is over", s.rank, s.Number)
}

func (s *rankServer) onSend(r *http.Request, body []byte) ([]byte, error) {
	boxes := s.mail.Open(s.cfg.World())
	own := boxes[s.rank]
	if r.Header.Get(client.HeaderGone) != "" {
		own.Close()
		return nil, nil
	}
	to, err := strconv.Atoi(r.Header.Get(client.HeaderTo))
	if err != nil || to < 0 || to >= s.cfg.World() {
		return nil, badRequest("header %s is %q, want a rank below %d", client.HeaderTo, r.Header.Get(client.HeaderTo), s.cfg.World())
	}
	ctx, cancel := s.limited(r.Context(), s.cfg.Collective)
	defer cancel()
	err = boxes[to].Put(ctx, own, body)
	switch {
	case err == nil:
		return nil, nil
	case own.Closed() || errors.Is(err, errOver):
		return nil, s.over()
	case errors.Is(err, rpc.ErrGone):
		return nil, problem.Errorf(problem.Conflict, "rank %d no longer receives messages: %w", to, err)
	}
	return nil, fmt.Errorf("rank %d does not receive its messages: %w", to, err)
}

func (s *rankServer) receive(r *http.Request) (rpc.Message, error) {
	seq, err := strconv.ParseUint(r.Header.Get(client.HeaderSeq), 10, 64)
	if err != nil {
		return rpc.Message{}, badRequest("header %s: %w", client.HeaderSeq, err)
	}
	ctx, cancel := s.limited(r.Context(), 0)
	defer cancel()
	got, err := s.mail.Open(s.cfg.World())[s.rank].Get(ctx, seq)
	switch {
	case errors.Is(err, mailbox.ErrOutOfTurn):
		return got, badRequest("%w", err)
	case errors.Is(err, rpc.ErrClosed) || errors.Is(err, errOver):
		return got, s.over()
	}
	return got, err
}

func (s *rankServer) onSet(ctx context.Context, r client.StoreSet) (struct{}, error) {
	return struct{}{}, s.keys.Set(ctx, r.Key, r.Value)
}

func (s *rankServer) onGet(ctx context.Context, r client.StoreGet) (client.StoreValue, error) {
	ctx, cancel := s.limited(ctx, s.cfg.Collective)
	defer cancel()
	value, err := s.keys.Get(ctx, r.Key)
	return client.StoreValue{Value: value}, err
}
