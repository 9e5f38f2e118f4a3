package jetlog

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Read yields the events of the log in order, from sequence from (at least 1)
// to until inclusive; with until 0 it follows the log until ctx ends, and
// yields the context's error then. Every event of the log is yielded, none
// twice. Lost connections and restarted servers are survived.
//
// Any other error ends the sequence: [ErrGap] when an event that was in the
// log is missing or unreadable, or the log ends before from-1; [ErrForeign]
// when the log was made anew; [ErrEnd] when it ends before until and nothing
// is appended for ten seconds. Sequences that were yielded before an error are good.
// In the place of a message that is no event comes an [events.Void].
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

var (
	errStop = errors.New("the caller has enough")
	errIdle = errors.New("no event for a while")
)

// reader is one call of Read. It goes through sessions, each with a consumer
// of its own, because a consumer does not outlive its server's process.
type reader struct {
	l     *Log
	next  uint64 // sequence to be yielded next
	until uint64
	yield func(events.Recorded, error) bool
	leap  uint64 // next at which the server went on with a later event
	idle  int    // sessions in a row that ended because nothing came
	stall time.Duration

	header nats.Header // of the event that is being yielded
}

// run starts sessions until one ends for good.
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

// consuming concerns the requests of a session.
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

// judge looks at what the server says of the stream before a session.
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
		// Not delivered: its block is damaged, or the machine is so busy that
		// nothing arrives in time. A damaged one cannot be asked for.
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

// drain yields what the consumer delivers.
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
			// Whatever it was, a new session finds out.
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
		if !r.yield(recorded(m.Subject(), r.header, m.Data(), meta.Sequence.Stream, meta.Timestamp), nil) {
			return errStop
		}
		watchdog.Reset(r.stall)
	}
	return nil
}
