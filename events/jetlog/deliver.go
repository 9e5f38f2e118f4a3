package jetlog

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// readAhead is the number of events that a reader lets the server send ahead.
const readAhead = 4096

// deliver makes a consumer of a stream: of the events from a sequence on, and
// with a filter of those under it alone. It does not outlive its server's
// process. once bounds its making; end removes it.
func (l *Log) deliver(ctx, once context.Context, stream, filter string, from uint64) (_ jetstream.MessagesContext, end func(), err error) {
	name := rand.Text()
	consumer, err := l.js.CreateConsumer(once, stream, jetstream.ConsumerConfig{
		Name:              name,
		FilterSubject:     filter,
		DeliverPolicy:     jetstream.DeliverByStartSequencePolicy,
		OptStartSeq:       from,
		AckPolicy:         jetstream.AckNonePolicy,
		ReplayPolicy:      jetstream.ReplayInstantPolicy,
		InactiveThreshold: time.Minute,
		MemoryStorage:     true,
		Replicas:          1,
	})
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		err = l.suspect(err)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("consumer: %w", err)
	}
	remove := func() {
		// The server drops an unused consumer by itself; this is only sooner.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		if l.nc.IsConnected() {
			_ = l.js.DeleteConsumer(ctx, stream, name)
		}
	}
	messages, err := consumer.Messages(
		jetstream.PullMaxMessages(readAhead), jetstream.PullThresholdMessages(readAhead/2),
		jetstream.PullExpiry(30*time.Second), jetstream.PullHeartbeat(2*time.Second),
		jetstream.WithMessagesErrOnMissingHeartbeat(true))
	if err != nil {
		remove()
		return nil, nil, fmt.Errorf("consumer: %w", err)
	}
	return messages, func() { messages.Stop(); remove() }, nil
}
