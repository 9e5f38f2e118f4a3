package jetlog

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"strconv"

	"github.com/ckptstore/ckptstore/events"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// ReadTrial yields the events of one trial, facts and decisions, in order, from
// sequence from (at least 1) to until inclusive. With until 0 it follows the log until
// ctx ends, and then yields the context's error. The server sends only the events of
// this trial, so the cost does not grow with the appends of other runs. Lost
// connections and server restarts are survived.
//
// A selection is weaker than [Log.Read]: a server silently skips a damaged block, and
// missing sequences are expected here. Detected, as [ErrGap], are:
//
//   - a decision that is missing before another one: each has the sequence of
//     the one before it in its lane
//   - an event at the end that is not delivered: when nothing came for a while,
//     the leader is asked for the last event of the selection
//   - an event that was lost on the way: deliveries are numbered
//   - losses that the server itself reports, and a log that is shorter than
//     the part already read
//
// Not detected is a fact that is missing in a damaged block and followed by other
// events. From the absence of a fact, a reader must conclude nothing except to wait for
// it. Readers of the whole log, including the views, detect it.
func (l *Log) ReadTrial(ctx context.Context, agg events.Aggregate, from, until uint64) iter.Seq2[events.Recorded, error] {
	return l.selected(ctx, &selection{l: l, what: "trial " + agg.Run + "/" + agg.Trial, filter: agg.Subjects(), is: agg.About}, from, until)
}

// ReadLane yields the decisions of one aggregate, as [Log.ReadTrial] does. No decision
// can be missing between two yielded ones.
func (l *Log) ReadLane(ctx context.Context, agg events.Aggregate, from, until uint64) iter.Seq2[events.Recorded, error] {
	return l.selected(ctx, &selection{l: l, what: "lane " + agg.Lane(), filter: agg.Lane(), is: agg.Owns}, from, until)
}

// ReadCheckpoints yields the decisions about checkpoints of all trials. It detects the
// same losses as [Log.ReadTrial], except decisions missing in the middle.
func (l *Log) ReadCheckpoints(ctx context.Context, from, until uint64) iter.Seq2[events.Recorded, error] {
	return l.selected(ctx, &selection{
		l: l, what: "the checkpoints", filter: events.CheckpointDecisions, loose: true,
		is: func(e events.Event) bool { return e.Scope.Actor == events.Server && e.Kind.Family() == "checkpoint" },
	}, from, until)
}

// LastOf returns the sequence of the last event of one trial, 0 if it has none. The
// leader answers, so nothing acknowledged before the call is missing.
func (l *Log) LastOf(ctx context.Context, agg events.Aggregate) (uint64, error) {
	ctx, cancel := deadline(ctx, DefaultAppend)
	defer cancel()
	s, last := selection{l: l, filter: agg.Subjects()}, uint64(0)
	err := l.retry(ctx, func(ctx context.Context) error {
		err := l.known(ctx)
		if err == nil {
			last, err = s.last(ctx)
		}
		if err != nil || last > 0 || l.sealed().Last == 0 {
			return err
		}
		a, err := l.archived(ctx)
		if err == nil {
			last, err = a.Latest(s.filter)
		}
		return damagedArchive(err)
	})
	if err != nil {
		return 0, fmt.Errorf("last event of trial %s/%s at %s: %w", agg.Run, agg.Trial, l.opts.where(), err)
	}
	return last, nil
}

// selection is one reading of the events under a filter.
type selection struct {
	l      *Log
	what   string
	filter string
	is     func(events.Event) bool
	loose  bool // it covers lanes only in part

	next  uint64 // the least sequence not yet read
	until uint64
	yield func(events.Recorded, error) bool
	lane  uint64 // the last yielded decision, or the last one before from
	idle  bool   // the last session ended because nothing came
	again uint64 // value of next when a delivery was found to be lost
}

func (l *Log) selected(ctx context.Context, s *selection, from, until uint64) iter.Seq2[events.Recorded, error] {
	return func(yield func(events.Recorded, error) bool) {
		if from == 0 {
			yield(events.Recorded{}, errors.New("read the log: it starts at sequence 1, not 0"))
			return
		}
		r := *s
		r.next, r.until, r.yield, r.lane = from, until, yield, from-1
		if err := r.run(ctx); err != nil && !errors.Is(err, errStop) {
			yield(events.Recorded{}, fmt.Errorf("read %s in the log at %s from event %d: %w", r.what, l.opts.where(), r.next, err))
		}
	}
}

func (s *selection) run(ctx context.Context) error {
	var b backoff
	for {
		before := s.next
		done, err := s.session(ctx)
		if s.next > before {
			b.reset()
			s.idle = false
		}
		if errors.Is(err, errIdle) {
			s.idle = s.l.nc.IsConnected()
			err = nil
		}
		switch {
		case done:
			return nil
		case ctx.Err() != nil && err != nil && !errors.Is(err, errStop):
			return context.Cause(ctx)
		case s.l.ctx.Err() != nil:
			return ErrClosed
		case err != nil && s.l.denials.lasting() != nil:
			return s.l.denials.lasting()
		case err != nil && !transient(err):
			return err
		case err != nil:
			if b.wait(ctx) != nil {
				return context.Cause(ctx)
			}
		}
	}
}

// session reads with one consumer. It reports whether the reading is done; otherwise a
// nil error asks for another session.
func (s *selection) session(ctx context.Context) (done bool, err error) {
	l := s.l
	inner, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer l.watch(func() { cancel(nats.ErrDisconnected) })()
	once, stop := context.WithTimeout(inner, l.opts.Timeout)
	defer stop()
	l.saw(s.next - 1)
	info, err := l.ours(once)
	if err != nil {
		return false, err
	}
	if err := whole(info); err != nil {
		return false, err
	}
	if info.State.LastSeq < s.next-1 {
		return false, fmt.Errorf("%w: it ends at event %d, but event %d was in it: it was rolled back; %s", ErrGap, info.State.LastSeq, s.next-1, restore)
	}
	if sealed := l.sealed().Last; s.next <= sealed {
		stop()
		return s.sealed(inner, sealed)
	}
	last, err := s.last(once)
	if err != nil {
		return false, err
	}
	end := last // of a bounded reading, which ends with the event there
	switch {
	case s.until != 0 && (last < s.next || s.next > s.until):
		return true, nil
	case s.idle && last >= s.next:
		if err := s.stuck(once, last); err != nil {
			return false, err
		}
	}
	messages, finish, err := l.deliver(ctx, once, info.Config.Name, s.filter, s.next)
	if err != nil {
		return false, err
	}
	defer finish()
	stop()
	return s.drain(inner, messages, end)
}

// sealed yields the selection's events in the archive, up to its end. It skips segments
// without such an event.
func (s *selection) sealed(ctx context.Context, end uint64) (done bool, err error) {
	if s.until != 0 {
		end = min(end, s.until)
	}
	a, err := s.l.archived(ctx)
	if err != nil {
		return false, err
	}
	for s.next <= end {
		has, last, err := a.Has(s.filter, s.next)
		if err != nil {
			return false, damagedArchive(err)
		}
		last = min(last, end)
		if has {
			for e, err := range s.l.Read(ctx, s.next, last) {
				if err != nil {
					return false, err
				}
				if !s.is(e.Event) {
					continue
				}
				if err := s.give(e, nil); err != nil {
					return false, err
				}
			}
		}
		s.next = max(s.next, last+1)
	}
	return s.until != 0 && s.next > s.until, nil
}

// last returns the sequence of the last event of the selection in the live stream, from
// the leader; 0 if there is none.
func (s *selection) last(ctx context.Context) (uint64, error) {
	name := s.l.stream()
	m, err := s.l.getStored(ctx, name, msgGet{LastFor: s.filter})
	if hasCode(err, codeNoStream) {
		return 0, s.l.suspect(err)
	}
	if !errors.Is(err, errNoMessage) {
		return m.Seq, err
	}
	// The server gives the same answer for a message that it cannot read.
	stream, err := s.l.js.Stream(ctx, name)
	if err != nil {
		return 0, err
	}
	info, err := stream.Info(ctx, jetstream.WithSubjectFilter(s.filter))
	if err != nil || len(info.State.Subjects) == 0 {
		return 0, err
	}
	// It may have been appended in between.
	m, err = s.l.getStored(ctx, name, msgGet{LastFor: s.filter})
	if errors.Is(err, errNoMessage) {
		err = fmt.Errorf("%w: the last event cannot be read: its block is damaged; %s", ErrGap, restore)
	}
	return m.Seq, err
}

// stuck checks for an event that was not delivered for a while, although the log has
// later ones.
func (s *selection) stuck(ctx context.Context, last uint64) error {
	_, err := s.l.getStored(ctx, s.l.stream(), msgGet{Seq: s.next, NextFor: s.filter})
	switch {
	case err == nil:
		s.idle = false // the machine is so busy that nothing arrived in time
		return nil
	case transient(err):
		return err
	}
	return fmt.Errorf("%w: an event from %d to %d is not delivered: its block is damaged (%w); %s", ErrGap, s.next, last, err, restore)
}

// drain yields the events that the consumer delivers.
func (s *selection) drain(ctx context.Context, messages jetstream.MessagesContext, end uint64) (done bool, err error) {
	for n := uint64(1); ; n++ {
		m, err := s.message(ctx, messages)
		if err != nil {
			return false, err
		}
		meta, err := m.Metadata()
		if err != nil {
			return false, err
		}
		seq := meta.Sequence.Stream
		switch {
		case s.until != 0 && seq > s.until:
			return true, nil
		case seq < s.next:
			return false, fmt.Errorf("%w: the server sent event %d again", ErrGap, seq)
		case meta.Sequence.Consumer != n:
			// Messages may get lost on the way to us, but not twice.
			if s.again == s.next {
				return false, fmt.Errorf("%w: an event before event %d is not delivered; %s", ErrGap, seq, restore)
			}
			s.again = s.next
			return false, nil
		}
		if err := s.give(recorded(m.Subject(), m.Headers(), m.Data(), seq, meta.Timestamp), m.Headers()); err != nil {
			return false, err
		}
		if s.until != 0 && seq >= min(end, s.until) {
			return true, nil
		}
	}
}

// message waits for the next message. If none came for a while, the leader knows
// whether there is one.
func (s *selection) message(ctx context.Context, messages jetstream.MessagesContext) (jetstream.Msg, error) {
	for {
		once, cancel := context.WithTimeout(ctx, s.l.stall)
		m, err := messages.Next(jetstream.NextContext(once))
		silent := once.Err() != nil
		cancel()
		switch {
		case err == nil:
			return m, nil
		case ctx.Err() != nil:
			return nil, context.Cause(ctx)
		case !silent:
			return nil, fmt.Errorf("%w: %w", nats.ErrDisconnected, err)
		}
		once, cancel = context.WithTimeout(ctx, s.l.opts.Timeout)
		last, err := s.last(once)
		cancel()
		if err != nil {
			return nil, err
		}
		if last >= s.next {
			return nil, errIdle
		}
	}
}

// give yields one event after checking that it follows the last decision. A reading by
// sequence misses none, and has no header here.
func (s *selection) give(e events.Recorded, header nats.Header) error {
	if e.Scope.Actor == events.Server && !s.loose {
		if header != nil {
			text := header.Get(jetstream.ExpectedLastSubjSeqHeader)
			if follows := header.Get(headerFollows); follows != "" {
				text = follows // its predecessor is in the archive
			}
			after, err := strconv.ParseUint(text, 10, 64)
			if err == nil && after > s.lane {
				return fmt.Errorf("%w: event %d was decided after event %d, which is not delivered: its block is damaged; %s", ErrGap, e.Sequence, after, restore)
			}
		}
		s.lane = e.Sequence
	}
	s.next = e.Sequence + 1
	if !s.yield(e, nil) {
		return errStop
	}
	return nil
}
