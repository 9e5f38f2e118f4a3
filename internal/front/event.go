package front

import (
	"github.com/ckptstore/ckptstore/events"
)

// Headers in addition to those of the envelope.
const (
	// HeaderSession is the public name of the session that wrote an entry.
	HeaderSession = "ckpt-session"

	headerFollows     = "ckpt-follows"
	headerStream      = "Nats-Expected-Stream"
	headerAfter       = "Nats-Expected-Last-Subject-Sequence"
	headerAfterLane   = "Nats-Expected-Last-Subject-Sequence-Subject"
	headerBatch       = "Nats-Batch-Id"
	headerBatchNumber = "Nats-Batch-Sequence"
	headerBatchCommit = "Nats-Batch-Commit"
)

// eventHeaders are the headers that an event may have.
var eventHeaders = map[string]bool{
	events.HeaderID: true, events.HeaderType: true, events.HeaderSource: true, events.HeaderTime: true,
	events.HeaderSpec: true, events.HeaderContentType: true, events.HeaderMsgID: true, events.HeaderActor: true, events.HeaderSignature: true,
	headerFollows: true, headerStream: true, headerAfter: true, headerAfterLane: true,
	headerBatch: true, headerBatchNumber: true, headerBatchCommit: true,
}

// jetStreamAdds is the size that the server adds to a stored message, in bytes.
const jetStreamAdds = 256

// longID is the maximum length of an event's ID in bytes.
const longID = 128

// event passes on a publication to a subject of the log, if it is an event. It
// adds the sender's principal.
func (s *session) event(f frame, h header) error {
	var why *Refusal
	claimed := h.get(events.HeaderActor)
	if other, ok := h.only(eventHeaders); ok {
		h = h.set(events.HeaderActor, s.principal.Name)
	} else {
		why = refuse(CodeDenied, "the owner of the store does not let clients send the header %s", other)
	}
	if h.get(headerBatch) != "" {
		return s.batched(f, h, why)
	}
	var e events.Event
	if why == nil {
		e, why = s.judge.event(f.subject, h, f.payload)
	}
	switch {
	case why != nil:
	case h.get(headerBatchNumber) != "" || h.get(headerBatchCommit) != "":
		why = refuse(CodeBatch, "a message of a batch needs the header %s", headerBatch)
	case f.reply == "":
		why = refuse(CodeDenied, "an event needs a subject for its acknowledgement")
	case e.Kind.Decides():
		if len(f.payload) > smallDecision {
			why = s.admit()
		}
		if why == nil {
			why = s.decision(e, h, f.reply)
		}
		h = h.set(events.HeaderActor, s.decider(claimed))
	default:
		if why = conditionless(h); why == nil {
			why = s.admit()
		}
	}
	if why == nil {
		why = s.door.quota.take(h.size() + len(f.payload))
	}
	if why != nil {
		return s.refuse(f, why)
	}
	if e.Kind.Decides() {
		return s.passNow(f.subject, f.reply, h, f.payload)
	}
	return s.pass(f.subject, f.reply, h, f.payload)
}

// decider returns the principal of a decision: that of the client, or the user for whom a client
// of the owner's own user has made it. Such a client can write the files of the log too.
func (s *session) decider(claimed string) string {
	if s.door.Who != nil && s.door.Trusted != "" && s.principal.Name == s.door.Trusted && userPrincipal.MatchString(claimed) {
		return claimed
	}
	return s.principal.Name
}

// judge validates events as far as that does not depend on the log.
type judge struct {
	largest int
	grant   Grant
}

// event decodes an event.
func (j judge) event(subject string, h header, payload []byte) (events.Event, *Refusal) {
	e, err := events.Envelope(subject, h.get, payload)
	if err != nil {
		return e, refuse(CodeEvent, "%v", err)
	}
	switch decides := e.Kind.Decides(); {
	case !e.Kind.Known():
		return e, refuse(CodeUnknownKind, "the owner of the store does not know the kind %s: it is of an older version: upgrade it first", e.Kind)
	case !e.Known():
		return e, refuse(CodeNewer, "version %d of %s is newer than the owner of the store: upgrade it first", e.Version, e.Kind)
	case e.ID != h.get(events.HeaderMsgID) || len(e.ID) > longID:
		return e, refuse(CodeEvent, "header %s is %q, want the event's ID", events.HeaderMsgID, h.get(events.HeaderMsgID))
	case decides != (e.Scope.Actor == events.Server):
		return e, refuse(CodeLane, "%s cannot have the actor %s: decisions have %s, and facts do not", e.Kind, e.Scope.Actor, events.Server)
	case e.Kind == events.StoreCreated{}.Kind(), e.Kind == events.LogVoided{}.Kind(), e.Kind == events.AuditSealed{}.Kind():
		return e, refuse(CodeDenied, "the owner of the store alone appends %s", e.Kind)
	case e.Scope.Run == events.None && e.Scope.Trial == events.Keys && !accesses[e.Kind]: // every bundle has all events there
		return e, refuse(CodeLane, "%s cannot be in the trial %s of no run: only decisions about keys are", e.Kind, events.Keys)
	case accesses[e.Kind] && !j.grant.Access:
		return e, refuse(CodeDenied, "%s is for an admin, or for a user of the store's directory: ask one of them", e.Kind)
	case accesses[e.Kind] && e.Scope != events.Scope{Actor: events.Server} && e.Scope != events.Scope{Trial: events.Keys, Actor: events.Server}:
		return e, refuse(CodeLane, "%s is a decision of the store, not of run %q", e.Kind, e.Scope.Run)
	case !accesses[e.Kind] && !j.grant.Run(e.Scope.Run):
		return e, j.grant.otherRun(e.Scope.Run)
	}
	if err := e.CheckBody(); err != nil {
		return e, refuse(CodeEvent, "%v", err)
	}
	if n := h.size() + len(payload) + jetStreamAdds; n > j.largest {
		return e, refuse(CodeTooLarge, "the event has %d bytes with its headers, at most %d are allowed; put large parts into a blob", n, j.largest)
	}
	return e, nil
}

// signed checks the signature of a decision after another of its lane.
func (s *session) signed(e events.Event, after uint64) *Refusal {
	if s.f.o.Signed == nil {
		return nil
	}
	ctx, cancel, err := s.looking()
	defer cancel()
	if err == nil {
		err = s.f.o.Signed(ctx, e, after)
	}
	if err != nil {
		return refusal(err)
	}
	return nil
}

// conditionless checks that a fact has no condition, and no signature, which covers one.
func conditionless(h header) *Refusal {
	for _, name := range []string{headerAfter, headerAfterLane, headerFollows, events.HeaderSignature} {
		if h.get(name) != "" {
			return refuse(CodeLane, "a fact has no condition: header %s", name)
		}
	}
	return nil
}

// smallDecision is the maximum size in bytes of a decision that is accepted on a
// disk without room for facts: such decisions end trainings.
const smallDecision = 64 << 10

// admit checks that the disk has room for facts.
func (s *session) admit() *Refusal {
	if s.f.o.Admit != nil {
		if err := s.f.o.Admit(); err != nil {
			return &Refusal{Code: CodeNoRoom, Status: 507, Text: err.Error()}
		}
	}
	return nil
}

// decision checks a decision's condition on its own lane. It compares the part
// about the archive itself: the server does not know that part of the lane.
func (s *session) decision(e events.Event, h header, reply string) *Refusal {
	lane := events.Aggregate{Run: e.Scope.Run, Trial: e.Scope.Trial}.Lane()
	after, err := events.ParseSequence(h.get(headerAfter))
	if err != nil || h.get(headerAfterLane) != lane {
		return refuse(CodeLane, "%s is a decision: it is appended on the condition that its lane %s ends where the client thinks, by the headers %s and %s", e.Kind, lane, headerAfter, headerAfterLane)
	}
	if stream := h.get(headerStream); !s.f.o.Log.Tail(stream) {
		return refuse(CodeLane, "%s is a decision: header %s is %q, want the live stream of the log", e.Kind, headerStream, stream)
	}
	follows := uint64(0)
	if text := h.get(headerFollows); text != "" {
		follows, err = events.ParseSequence(text)
		if err != nil || after != 0 {
			return refuse(CodeLane, "header %s is %q with the condition %d: it is for the first decision behind the archive", headerFollows, text, after)
		}
	}
	if after == 0 {
		ctx, cancel, err := s.looking()
		defer cancel()
		head := uint64(0)
		if err == nil {
			head, err = s.f.o.Log.Head(ctx, lane)
		}
		if err != nil {
			return refusal(err)
		}
		if head != follows {
			return WrongLast(head)
		}
	}
	if why := s.deciding(e, reply); why != nil {
		return why
	}
	if why := s.signed(e, max(after, follows)); why != nil {
		return why
	}
	if s.f.o.Deciding != nil {
		s.f.o.Deciding()
	}
	return nil
}
