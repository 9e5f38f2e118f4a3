package jetlog

import (
	"fmt"
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
// by which the server knows duplicates, a beginning that is the only one, the lane of
// its kind, and of a decision a condition. What a newer version asks is not known.
func inPlace(e events.Event, header nats.Header, seq uint64) error {
	if id := header.Get(events.HeaderMsgID); id != "" && id != e.ID {
		return fmt.Errorf("header %s is %q, want the event's ID %s", events.HeaderMsgID, id, e.ID)
	}
	switch {
	case seq == 1:
		return nil // nothing is before it
	case e.Kind == events.StoreCreated{}.Kind():
		return fmt.Errorf("%s is event 1 and no other", e.Kind)
	case !e.Kind.Known() || e.Version != 1:
		return nil
	case e.Kind.Decides() != (e.Scope.Actor == events.Server):
		return fmt.Errorf("%s cannot have the actor %s: decisions have %s, and facts do not", e.Kind, e.Scope.Actor, events.Server)
	case !e.Kind.Decides():
		return nil
	}
	lane := events.Aggregate{Run: e.Scope.Run, Trial: e.Scope.Trial}.Lane()
	text, of := header.Get(jetstream.ExpectedLastSubjSeqHeader), header.Get(jetstream.ExpectedLastSubjSeqSubjHeader)
	if _, err := events.ParseSequence(text); err != nil || of != lane {
		return fmt.Errorf("%s is a decision, and was appended without the condition of its lane: %q of %q", e.Kind, text, of)
	}
	return nil
}
