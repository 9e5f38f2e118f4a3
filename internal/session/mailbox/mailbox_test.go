package mailbox

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/rpc"
)

// A sender waits while the other rank's mailbox is full, until that rank
// receives, is gone, or the sender's context ends.
func TestSenderWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var m Boxes
		boxes := m.Open(2)
		large := make([]byte, client.MaxMessage-1)
		if err := boxes[1].Put(t.Context(), boxes[0], large); err != nil {
			t.Fatal(err)
		}
		begin := func(ctx context.Context) <-chan error {
			done := make(chan error, 1)
			go func() { done <- boxes[1].Put(ctx, boxes[0], []byte("two")) }()
			synctest.Wait()
			select {
			case err := <-done:
				t.Fatalf("it does not wait: %v", err)
			default:
			}
			return done
		}
		why := errors.New("given up")
		ctx, giveUp := context.WithCancelCause(t.Context())
		done := begin(ctx)
		giveUp(why)
		if err := <-done; !errors.Is(err, why) {
			t.Errorf("error %v", err)
		}
		done = begin(t.Context())
		if got, err := boxes[1].Get(t.Context(), 1); err != nil || len(got.Data) != len(large) {
			t.Fatal(len(got.Data), err)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
		if got, err := boxes[1].Get(t.Context(), 2); err != nil || string(got.Data) != "two" {
			t.Fatal(got, err)
		}
		if err := boxes[1].Put(t.Context(), boxes[0], large); err != nil {
			t.Fatal(err)
		}
		done = begin(t.Context())
		m.Gone(1)
		if err := <-done; !errors.Is(err, rpc.ErrGone) {
			t.Errorf("error %v", err)
		}
	})
}

// A rank that was gone before the first message is gone for it too.
func TestGoneBeforeMessages(t *testing.T) {
	var m Boxes
	m.Gone(1)
	boxes := m.Open(2)
	if err := boxes[1].Put(t.Context(), boxes[0], nil); !errors.Is(err, rpc.ErrGone) {
		t.Errorf("error %v", err)
	}
	if got, err := boxes[0].Get(t.Context(), 1); err != nil || !got.Gone || got.From != 1 {
		t.Errorf("%+v, %v", got, err)
	}
}
