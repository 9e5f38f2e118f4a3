package jetlog

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/ckptstore/ckptstore/events"
)

// Read yields the events of the log in order, from sequence from (at least 1) to until
// inclusive. With until 0 it follows the log until ctx ends, and then yields the
// context's error. It yields every event once, and survives lost connections and server
// restarts.
//
// Any other error ends the sequence: [ErrGap] when an event of the log is missing or
// unreadable, or the log ends before from-1; [ErrForeign] when the log was recreated;
// [ErrEnd] when it ends before until and nothing is appended for ten seconds. Events
// yielded before an error are valid. An [events.Void] replaces a message that is not an
// event.
func (l *Log) Read(ctx context.Context, from, until uint64) iter.Seq2[events.Recorded, error] {
	return func(yield func(events.Recorded, error) bool) {
		if from == 0 {
			yield(events.Recorded{}, errors.New("read the log: it starts at sequence 1, not 0"))
			return
		}
		r := &reader{l: l, next: from, until: until, yield: yield, stall: l.stall}
		err := r.run(ctx)
		if err != nil && !errors.Is(err, errStop) {
			yield(events.Recorded{}, fmt.Errorf("read the log at %s from event %d: %w", l.opts.where(), r.next, err))
		}
	}
}

// Walk calls each with the messages that [Log.Read] yields as events: with all headers,
// and the messages that are not events as they are. event decodes the message that it is
// called with. The first error of each ends the walk.
func (l *Log) Walk(ctx context.Context, from, until uint64, each func(m events.Message, sequence uint64, stored time.Time, event func() events.Recorded) error) error {
	if from == 0 {
		return errors.New("walk the log: it starts at sequence 1, not 0")
	}
	var failed error
	r := &reader{l: l, next: from, until: until, stall: l.stall, bare: true}
	var at events.Recorded
	event := func() events.Recorded {
		return recorded(r.raw.Subject, r.header, r.raw.Data, at.Sequence, at.Stored)
	}
	r.yield = func(e events.Recorded, err error) bool {
		if failed, at = err, e; failed == nil {
			failed = each(r.raw, e.Sequence, e.Stored, event)
		}
		return failed == nil
	}
	err := r.run(ctx)
	if failed != nil {
		return failed
	}
	if err != nil {
		err = fmt.Errorf("walk the log at %s from event %d: %w", l.opts.where(), r.next, err)
	}
	return err
}

var (
	errStop = errors.New("the caller has enough")
	errIdle = errors.New("no event for a while")
)

// reader is one call of Read. It runs sessions, each with a new consumer, because a
// consumer does not outlive its server's process.
type reader struct {
	l     *Log
	next  uint64 // sequence to be yielded next
	until uint64
	yield func(events.Recorded, error) bool
	leap  uint64 // value of next when the server continued with a later event
	idle  int    // sessions in a row that ended without an event
	stall time.Duration

	header nats.Header    // of the event that is being yielded
	raw    events.Message // the message as it is stored
	bare   bool           // yield has the sequence and the time only: the caller takes raw
}

// decoded returns what yield is called with.
func (r *reader) decoded(seq uint64, at time.Time) events.Recorded {
	if r.bare {
		return events.Recorded{Sequence: seq, Stored: at}
	}
	return recorded(r.raw.Subject, r.header, r.raw.Data, seq, at)
}

// run starts sessions until one ends permanently.
func (r *reader) run(ctx context.Context) error {
	var b backoff
	consumes := concernOf(concerning(ctx, consuming))
	for r.until == 0 || r.next <= r.until {
		before, since := r.next, r.l.denials.mark()
		err := r.session(ctx)
		if denied := r.l.denials.of(since, consumes); err != nil && denied != nil && ctx.Err() == nil {
			return denied
		}
		if r.next > before {
			b.reset()
			r.idle = 0
		}
		if errors.Is(err, errIdle) {
			if r.l.nc.IsConnected() {
				r.idle++
			}
			err = nil
		}
		switch {
		case ctx.Err() != nil && err != nil && !errors.Is(err, errStop):
			return context.Cause(ctx)
		case r.l.ctx.Err() != nil:
			return ErrClosed
		case err != nil && !transient(err):
			return err
		case err != nil:
			if b.wait(ctx) != nil {
				return context.Cause(ctx)
			}
		}
	}
	return nil
}

// consuming reports whether a subject is one of a session's requests.
func consuming(subject string) bool {
	const api = "$JS.API.CONSUMER."
	return strings.HasPrefix(subject, api+"CREATE."+Stream+".") || strings.HasPrefix(subject, api+"MSG.NEXT."+Stream+".")
}

// session reads with one consumer. A nil error asks for another session.
func (r *reader) session(ctx context.Context) error {
	l := r.l
	inner, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer l.watch(func() { cancel(nats.ErrDisconnected) })()
	once, stop := context.WithTimeout(inner, l.opts.Timeout)
	defer stop()
	defer l.denials.watch(stop, concernOf(concerning(ctx, consuming)))()
	l.saw(r.next - 1)
	info, err := l.ours(once)
	if err != nil {
		return err
	}
	if err := r.judge(once, info); err != nil {
		return err
	}
	if r.next <= l.sealed().Last {
		return r.sealed(inner)
	}
	messages, end, err := l.deliver(ctx, once, info.Config.Name, "", r.next)
	if err != nil {
		return err
	}
	defer end()
	stop()
	return r.drain(inner, cancel, messages)
}

// judge checks the server's state of the stream before a session.
func (r *reader) judge(ctx context.Context, info *jetstream.StreamInfo) error {
	if err := whole(info); err != nil {
		return err
	}
	s := info.State
	if s.LastSeq < r.next-1 {
		return fmt.Errorf("%w: it ends at event %d, but event %d was in it: it was rolled back; %s", ErrGap, s.LastSeq, r.next-1, restore)
	}
	switch {
	case r.idle == 0:
	case s.LastSeq >= r.next:
		// Not delivered: its block is damaged, or the machine is so busy that nothing
		// arrives in time. The server cannot return a damaged event on request either.
		_, err := r.l.get(ctx, msgGet{Seq: r.next})
		switch {
		case err == nil:
			r.idle = 0
		case transient(err):
			return err
		default:
			return fmt.Errorf("%w: event %d of %d is not delivered: its block is damaged (%w); %s", ErrGap, r.next, s.LastSeq, err, restore)
		}
	case r.idle > 1 && r.until != 0:
		return fmt.Errorf("%w: it has %d events, event %d was asked for", ErrEnd, s.LastSeq, r.until)
	}
	return nil
}

// drain yields the events that the consumer delivers.
func (r *reader) drain(ctx context.Context, cancel context.CancelCauseFunc, messages jetstream.MessagesContext) error {
	watchdog := time.AfterFunc(r.stall, func() { cancel(errIdle) })
	defer watchdog.Stop()
	wait := jetstream.NextContext(ctx)
	for r.until == 0 || r.next <= r.until {
		m, err := messages.Next(wait)
		if err != nil {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			// Whatever the cause, a new session finds out.
			return fmt.Errorf("%w: %w", nats.ErrDisconnected, err)
		}
		watchdog.Stop()
		meta, err := m.Metadata()
		if err != nil {
			return err
		}
		switch seq := meta.Sequence.Stream; {
		case seq < r.next:
			return fmt.Errorf("%w: the server sent event %d again", ErrGap, seq)
		case seq > r.next:
			// Messages may get lost on the way to us, but not twice.
			if r.leap == r.next {
				return fmt.Errorf("%w: event %d is followed by event %d; %s", ErrGap, r.next-1, seq, restore)
			}
			r.leap = r.next
			return nil
		}
		r.next++
		r.header = m.Headers()
		r.raw = events.Message{Subject: m.Subject(), Header: r.header, Data: m.Data()}
		if !r.yield(r.decoded(meta.Sequence.Stream, meta.Timestamp), nil) {
			return errStop
		}
		watchdog.Reset(r.stall)
	}
	return nil
}

// Latest returns the sequence of the last event whose subject matches one of the
// filters, 0 if there is none. It does not read the log.
func (l *Log) Latest(ctx context.Context, filters ...string) (uint64, error) {
	ctx, cancel := deadline(ctx, DefaultAppend)
	defer cancel()
	last := uint64(0)
	for _, filter := range filters {
		err := l.retry(ctx, func(ctx context.Context) error {
			if err := l.known(ctx); err != nil {
				return err
			}
			e, err := l.get(ctx, msgGet{LastFor: filter})
			if errors.Is(err, errNoMessage) {
				return nil
			}
			last = max(last, e.Sequence)
			return err
		})
		if err != nil {
			return 0, fmt.Errorf("last event under %s at %s: %w", filter, l.opts.where(), err)
		}
	}
	return last, nil
}

// recorded decodes a message of the log. An invalid message becomes an [events.Void],
// by rules that depend only on the message and its sequence: no message may stop the
// readers of the log.
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

// inPlace checks the log's rules that go beyond the envelope: the event's ID equals the ID
// by which the server deduplicates, only event 1 is a beginning, the lane fits the kind,
// and a decision has a condition. The rules of a newer version are unknown.
func inPlace(e events.Event, header nats.Header, seq uint64) error {
	if id := header.Get(events.HeaderMsgID); id != "" && id != e.ID {
		return fmt.Errorf("header %s is %q, want the event's ID %s", events.HeaderMsgID, id, e.ID)
	}
	switch {
	case seq == 1:
		return nil // nothing precedes it
	case e.Kind == events.StoreCreated{}.Kind():
		return fmt.Errorf("%s is event 1 and no other", e.Kind)
	case !e.Known():
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

// msgGet asks a stream's leader for one message. Any replica answers a direct get, and
// may not have seen the last append yet.
type msgGet struct {
	Seq     uint64 `json:"seq,omitempty"`
	LastFor string `json:"last_by_subj,omitempty"`
	NextFor string `json:"next_by_subj,omitempty"`
}

// stored is a message as a stream keeps it.
type stored struct {
	Subject string    `json:"subject"`
	Seq     uint64    `json:"seq"`
	Headers []byte    `json:"hdrs"`
	Data    []byte    `json:"data"`
	Time    time.Time `json:"time"`
}

func (m stored) header() (nats.Header, error) {
	if len(m.Headers) == 0 {
		return nil, nil
	}
	return nats.DecodeHeadersMsg(m.Headers)
}

// readable parses the headers as far as possible. It returns none if they are
// malformed, as the client library does when it delivers such a message.
func (m stored) readable() nats.Header {
	h, err := m.header()
	if err != nil {
		return nil
	}
	return h
}

// errNoMessage reports that the stream has no such message.
var errNoMessage = errors.New("no such message")

// getStored asks once.
func (l *Log) getStored(ctx context.Context, stream string, q msgGet) (stored, error) {
	bad := func(err error) (stored, error) {
		return stored{}, fmt.Errorf("read a message of stream %s: %w", stream, err)
	}
	request, err := json.Marshal(q)
	if err != nil {
		return bad(err)
	}
	reply, err := l.nc.RequestWithContext(ctx, "$JS.API.STREAM.MSG.GET."+stream, request)
	if err != nil {
		return bad(err)
	}
	var r struct {
		Error   *jetstream.APIError `json:"error"`
		Message *stored             `json:"message"`
	}
	if err := json.Unmarshal(reply.Data, &r); err != nil {
		return bad(err)
	}
	switch {
	case r.Error != nil && r.Error.ErrorCode == codeNoMessage:
		return bad(errNoMessage)
	case r.Error != nil:
		return bad(r.Error)
	case r.Message == nil:
		return bad(errors.New("the reply holds none"))
	}
	return *r.Message, nil
}

// get asks once for an event of the log.
func (l *Log) get(ctx context.Context, q msgGet) (events.Recorded, error) {
	m, err := l.fetch(ctx, q)
	if err != nil {
		return events.Recorded{}, err
	}
	return recorded(m.Subject, m.readable(), m.Data, m.Seq, m.Time), nil
}

// At returns the event at a sequence. It returns [ErrEnd] if the log ends before it,
// and [ErrGap] if the event is missing.
func (l *Log) At(ctx context.Context, seq uint64) (events.Recorded, error) {
	ctx, cancel := deadline(ctx, DefaultAppend)
	defer cancel()
	var found events.Recorded
	err := l.retry(ctx, func(ctx context.Context) (err error) {
		if err = l.known(ctx); err == nil {
			found, err = l.get(ctx, msgGet{Seq: seq})
		}
		return err
	})
	if errors.Is(err, errNoMessage) {
		last, lerr := l.Last(ctx)
		switch {
		case lerr != nil:
			err = lerr
		case last < seq:
			err = fmt.Errorf("%w: it has %d events", ErrEnd, last)
		default:
			err = fmt.Errorf("%w: it is not there, although the log has %d events", ErrGap, last)
		}
	}
	if err != nil {
		return events.Recorded{}, fmt.Errorf("read event %d of the log at %s: %w", seq, l.opts.where(), err)
	}
	return found, nil
}
