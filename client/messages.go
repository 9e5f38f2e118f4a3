package client

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/ckptstore/ckptstore/internal/rpc"
)

// Headers of send and recv. The body of both is the message, as raw bytes.
const (
	HeaderTo   = "Ckptstore-To"   // of send: a rank
	HeaderFrom = "Ckptstore-From" // of recv's reply: a rank
	HeaderGone = "Ckptstore-Gone" // 1, without a message: nothing more comes from this rank
)

// MaxMessage is the largest message in bytes: the default limit of a call's body
// plus the call's overhead.
const MaxMessage = rpc.DefaultMaxBytes + 128<<10

// Limits of the key-value store of an attempt, in bytes.
const (
	MaxKey    = 1 << 10
	MaxStored = 16 << 20 // all keys and values
)

// StoreSet sets a value for all ranks.
type StoreSet struct {
	Key   string `json:"key"`
	Value []byte `json:"value"`
}

// StoreGet requests a value and blocks until it is set.
type StoreGet struct {
	Key string `json:"key"`
}

// StoreValue is the reply to [StoreGet].
type StoreValue struct {
	Value []byte `json:"value"`
}

// goneTimeout bounds the request that announces that a rank is gone. The trainer
// notices it at the end of the process at the latest.
const goneTimeout = 10 * time.Second

// messages is the state of this rank's [Client.Messenger].
type messages struct {
	received atomic.Uint64
	closed   atomic.Bool
}

// Messenger moves messages among the ranks of this attempt, through the trainer;
// PROCESS_GROUP agents use it. An attempt has one messenger per rank, and Close is
// final. When a rank's process ends, the other ranks are notified at once. A message
// is at most [MaxMessage] bytes.
func (c *Client) Messenger() rpc.Messenger { return messenger{c} }

type messenger struct{ c *Client }

var _ rpc.Messenger = messenger{}

// Rank implements rpc.Messenger.
func (m messenger) Rank() int { return m.c.Rank }

// Size implements rpc.Messenger.
func (m messenger) Size() int { return m.c.WorldSize }

// Send implements rpc.Messenger.
func (m messenger) Send(ctx context.Context, to int, data []byte) error {
	switch {
	case m.c.messages.closed.Load():
		return fmt.Errorf("send to rank %d: %w", to, rpc.ErrClosed)
	case to < 0 || to >= m.Size():
		return fmt.Errorf("send to rank %d of %d: %w", to, m.Size(), rpc.ErrUnknownPeer)
	case len(data) > MaxMessage:
		return fmt.Errorf("send to rank %d: a message of %d bytes is larger than the limit of %d; send less in one call", to, len(data), MaxMessage)
	}
	_, err := m.c.post(ctx, "send", data, map[string]string{HeaderTo: strconv.Itoa(to)})
	return ofPeer(err)
}

// Recv implements rpc.Messenger. Requests are numbered: if ctx ends and the reply
// is lost, the next Recv gets the same message.
func (m messenger) Recv(ctx context.Context) (rpc.Message, error) {
	if m.c.messages.closed.Load() {
		return rpc.Message{}, fmt.Errorf("recv: %w", rpc.ErrClosed)
	}
	seq := m.c.messages.received.Load() + 1
	data, header, err := m.c.ask(ctx, "recv", []byte("{}"), map[string]string{HeaderSeq: strconv.FormatUint(seq, 10)})
	if err != nil {
		return rpc.Message{}, ofPeer(err)
	}
	from, err := strconv.Atoi(header.Get(HeaderFrom))
	if err != nil || from < 0 || from >= m.Size() {
		return rpc.Message{}, fmt.Errorf("recv: the trainer sent a message of rank %q in a group of %d", header.Get(HeaderFrom), m.Size())
	}
	m.c.messages.received.Store(seq)
	return rpc.Message{From: from, Data: data, Gone: header.Get(HeaderGone) != ""}, nil
}

// Close implements rpc.Messenger.
func (m messenger) Close() error {
	if m.c.messages.closed.Swap(true) {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), goneTimeout)
	defer cancel()
	_, err := m.c.post(ctx, "send", nil, map[string]string{HeaderGone: "1"})
	return err
}

// ofPeer wraps the trainer's refusals in the matching errors of package rpc.
func ofPeer(err error) error {
	var refused *Error
	if !errors.As(err, &refused) {
		return err
	}
	switch refused.Status {
	case http.StatusConflict:
		return fmt.Errorf("%w: %w", rpc.ErrGone, err)
	case http.StatusGone:
		return fmt.Errorf("%w: %w", rpc.ErrClosed, err)
	}
	return err
}

// Store returns the key-value store that the ranks of this attempt share in the
// trainer; TENSORPIPE agents exchange their addresses through it. It holds
// [MaxStored] bytes; above that, Set returns [ErrNoSpace]. The trainer's limit for
// collectives also bounds Get.
func (c *Client) Store() rpc.Store { return keys{c} }

type keys struct{ c *Client }

var _ rpc.Store = keys{}

// Set implements rpc.Store.
func (k keys) Set(ctx context.Context, key string, value []byte) error {
	return k.c.call(ctx, "set", StoreSet{key, value}, nil)
}

// Get implements rpc.Store.
func (k keys) Get(ctx context.Context, key string) ([]byte, error) {
	var reply StoreValue
	if err := k.c.call(ctx, "get", StoreGet{key}, &reply); err != nil {
		return nil, err
	}
	return reply.Value, nil
}
