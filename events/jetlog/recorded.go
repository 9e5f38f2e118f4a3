package jetlog

import (
	"fmt"
	"strconv"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// recorded is the event that a message of the log is. A message that is none is an
// [events.Void], by rules that need the message and its sequence alone: no message
// may stop the readers of the log.
func recorded(subject string, header nats.Header, data []byte, seq uint64, at time.Time) events.Recorded {
	m := events.Message{Subject: subject, Header: header, Data: data}
	e, err := events.Decode(m)
	if err == nil {
		err = inPlace(e, header, seq)
	}
	if err != nil {
		e = events.NewVoid(m, seq, at, err)
	}
	return events.Recorded{Event: e, Sequence: seq, Stored: at}
}

// inPlace holds an event to what the log asks of it beside its envelope: no other ID
// by which the server knows duplicates, a beginning that is the only one, and of a
// decision a condition.
func inPlace(e events.Event, header nats.Header, seq uint64) error {
	if id := header.Get(events.HeaderMsgID); id != "" && id != e.ID {
		return fmt.Errorf("header %s is %q, want the event's ID %s", events.HeaderMsgID, id, e.ID)
	}
	switch {
	case seq == 1:
		return nil // nothing is before it
	case e.Kind == events.StoreCreated{}.Kind():
		return fmt.Errorf("%s is event 1 and no other", e.Kind)
	case !e.Kind.Decides() || e.Scope.Actor != events.Server:
		return nil
	}
	lane := events.Aggregate{Run: e.Scope.Run, Trial: e.Scope.Trial}.Lane()
	text, of := header.Get(jetstream.ExpectedLastSubjSeqHeader), header.Get(jetstream.ExpectedLastSubjSeqSubjHeader)
	if _, err := strconv.ParseUint(text, 10, 64); err != nil || of != lane {
		return fmt.Errorf("%s is a decision, and was appended without the condition of its lane: %q of %q", e.Kind, text, of)
	}
	return nil
}
