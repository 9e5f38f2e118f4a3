package session

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/rpc"
)

// messages holds the messages among the ranks of an attempt, and the ranks'
// key-value store. Nothing is allocated until a rank uses it.
type messages struct {
	mu    sync.Mutex
	ended []int      // ranks that were gone before there were boxes
	boxes []*mailbox // by rank
	store *rpc.MemoryStore
	sizes map[string]int // of each key with its value
	size  int            // the sum of them
}

// mailbox is one rank's part of the messages.
type mailbox struct {
	by   rpc.Messenger
	room *semaphore.Weighted // for the bytes of messages not yet received
	life context.Context     // ends when it is gone
	end  context.CancelCauseFunc
	turn chan struct{} // full while a request receives
	seq  uint64        // of the last message that was received
	last rpc.Message   // resent to a receiver that has not got it
}

// open returns the mailbox of each rank.
func (m *messages) open(world int) []*mailbox {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.boxes != nil {
		return m.boxes
	}
	meet := rpc.NewSwitch(world)
	for rank := range world {
		b := &mailbox{by: meet.Messenger(rank), room: semaphore.NewWeighted(client.MaxMessage), turn: make(chan struct{}, 1)}
		b.life, b.end = context.WithCancelCause(context.Background())
		m.boxes = append(m.boxes, b)
	}
	for _, rank := range m.ended {
		m.boxes[rank].close()
	}
	return m.boxes
}

// gone records that a rank's process has ended and sends nothing more.
func (m *messages) gone(rank int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.boxes == nil {
		m.ended = append(m.ended, rank)
		return
	}
	m.boxes[rank].close()
}

func (b *mailbox) close() {
	b.end(rpc.ErrGone)
	_ = b.by.Close() // closing a switch's messenger never fails
}

// put sends a message of another rank to this one. It waits for room.
func (b *mailbox) put(ctx context.Context, from *mailbox, body []byte) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(b.life, func() { cancel(rpc.ErrGone) })()
	if err := b.room.Acquire(ctx, int64(len(body))); err != nil {
		return context.Cause(ctx)
	}
	err := from.by.Send(ctx, b.by.Rank(), body)
	if err != nil {
		b.room.Release(int64(len(body)))
	}
	return err
}

// errOutOfTurn reports a request for a message that is neither the next nor the
// last one.
var errOutOfTurn = errors.New("is not the next one")

// get returns message seq of a rank, counted from 1: the next one, or the last
// one again.
func (b *mailbox) get(ctx context.Context, seq uint64) (rpc.Message, error) {
	select {
	case b.turn <- struct{}{}:
		defer func() { <-b.turn }()
	case <-ctx.Done():
		return rpc.Message{}, context.Cause(ctx)
	}
	if seq == b.seq && seq > 0 {
		return b.last, nil
	}
	if seq != b.seq+1 {
		return rpc.Message{}, fmt.Errorf("message %d %w: %d were received; one client of a rank receives", seq, errOutOfTurn, b.seq)
	}
	got, err := b.by.Recv(ctx)
	if err != nil {
		return rpc.Message{}, err
	}
	b.seq, b.last = seq, got
	b.room.Release(int64(len(got.Data)))
	return got, nil
}

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
	boxes := s.messages.open(s.cfg.World())
	own := boxes[s.rank]
	if r.Header.Get(client.HeaderGone) != "" {
		own.close()
		return nil, nil
	}
	to, err := strconv.Atoi(r.Header.Get(client.HeaderTo))
	if err != nil || to < 0 || to >= s.cfg.World() {
		return nil, badRequest("header %s is %q, want a rank below %d", client.HeaderTo, r.Header.Get(client.HeaderTo), s.cfg.World())
	}
	ctx, cancel := s.limited(r.Context(), s.cfg.Collective)
	defer cancel()
	err = boxes[to].put(ctx, own, body)
	switch {
	case err == nil:
		return nil, nil
	case own.life.Err() != nil || errors.Is(err, errOver):
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
	got, err := s.messages.open(s.cfg.World())[s.rank].get(ctx, seq)
	switch {
	case errors.Is(err, errOutOfTurn):
		return got, badRequest("%w", err)
	case errors.Is(err, rpc.ErrClosed) || errors.Is(err, errOver):
		return got, s.over()
	}
	return got, err
}

// keep accounts for the memory of a key with a value of n bytes; n is -1 for a
// key that a rank waits for.
func (m *messages) keep(key string, n int) (*rpc.MemoryStore, error) {
	if key == "" || len(key) > client.MaxKey {
		return nil, badRequest("a key of %d bytes: it has 1 to %d", len(key), client.MaxKey)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.store == nil {
		m.store, m.sizes = rpc.NewMemoryStore(), map[string]int{}
	}
	size := len(key) + n
	if n < 0 {
		size = max(len(key), m.sizes[key])
	}
	after := m.size - m.sizes[key] + size
	if after > client.MaxStored {
		return nil, problem.Errorf(problem.NoSpace, "key %.100q: the ranks' store would hold %d bytes, and holds %d at most: leave large values in files", key, after, client.MaxStored)
	}
	m.size, m.sizes[key] = after, size
	return m.store, nil
}

func (s *rankServer) onSet(ctx context.Context, r client.StoreSet) (struct{}, error) {
	store, err := s.messages.keep(r.Key, len(r.Value))
	if err != nil {
		return struct{}{}, err
	}
	return struct{}{}, store.Set(ctx, r.Key, r.Value)
}

func (s *rankServer) onGet(ctx context.Context, r client.StoreGet) (client.StoreValue, error) {
	store, err := s.messages.keep(r.Key, -1)
	if err != nil {
		return client.StoreValue{}, err
	}
	ctx, cancel := s.limited(ctx, s.cfg.Collective)
	defer cancel()
	value, err := store.Get(ctx, r.Key)
	return client.StoreValue{Value: value}, err
}
