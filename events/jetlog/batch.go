package jetlog

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"

	"github.com/ckptstore/ckptstore/events"
	"github.com/nats-io/nats.go/jetstream"
)

// Headers of an atomic batch.
const (
	headerBatchID       = "Nats-Batch-Id"
	headerBatchSequence = "Nats-Batch-Sequence"
	headerBatchCommit   = "Nats-Batch-Commit"
)

// sendAtomically appends all events or none, with one sync of the disk, and
// returns the sequence of the first; the others follow it. Every attempt is a
// batch of its own: what is left of one that was cut is dropped by the server.
func (l *Log) sendAtomically(ctx context.Context, all []events.Event) (uint64, error) {
	id := rand.Text()
	for i, e := range all {
		m := message(e)
		m.Header[headerBatchID] = []string{id}
		m.Header[headerBatchSequence] = []string{strconv.Itoa(i + 1)}
		if i < len(all)-1 {
			// The server answers only the last message: it refuses the whole
			// batch there if any other did not arrive.
			if err := l.nc.PublishMsg(m); err != nil {
				return 0, fmt.Errorf("batch of %d: %w", len(all), err)
			}
			continue
		}
		m.Header[headerBatchCommit] = []string{"1"}
		reply, err := l.nc.RequestMsgWithContext(ctx, m)
		if err != nil {
			return 0, fmt.Errorf("batch of %d: %w", len(all), err)
		}
		var ack struct {
			Error    *jetstream.APIError `json:"error"`
			Stream   string              `json:"stream"`
			Sequence uint64              `json:"seq"`
			Batch    string              `json:"batch"`
			Count    int                 `json:"count"`
		}
		if err := json.Unmarshal(reply.Data, &ack); err != nil {
			return 0, fmt.Errorf("batch of %d: acknowledgement: %w", len(all), err)
		}
		if ack.Error != nil {
			return 0, fmt.Errorf("batch of %d: %w", len(all), ack.Error)
		}
		if !IsTail(ack.Stream) || ack.Batch != id || ack.Count != len(all) || ack.Sequence < uint64(len(all)) {
			return 0, fmt.Errorf("batch of %d: the server acknowledged something else: %s", len(all), reply.Data)
		}
		return ack.Sequence - uint64(len(all)) + 1, nil
	}
	return 0, errors.New("batch of no events")
}
