package jetlog

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/ckptstore/ckptstore/events"
)

// Finding is a problem found in the log.
type Finding struct {
	Sequence uint64 // of the first event concerned; 0: the log as a whole
	Until    uint64 // of the last event; equal to Sequence for a single event
	Problem  string
	Aside    bool // it is in a bucket next to the log: no event is lost
}

// String returns the events and the problem.
func (f Finding) String() string {
	switch {
	case f.Sequence == 0:
		return "the log: " + f.Problem
	case f.Until > f.Sequence:
		return fmt.Sprintf("events %d to %d: %s", f.Sequence, f.Until, f.Problem)
	}
	return fmt.Sprintf("event %d: %s", f.Sequence, f.Problem)
}

// Checked is the outcome of [Log.Check].
type Checked struct {
	First, Last uint64 // as the server reports
	Events      uint64 // number of events read
	Decisions   uint64 // number of decisions among them
	// Repeated counts the events whose ID an earlier event has: facts that a late retry
	// stored twice. A repeated decision is always a finding: one repeated by the server
	// does not follow its predecessor, and one repeated by its client has a duplicate
	// ID.
	Repeated uint64
	Findings []Finding
}

// CheckOptions configure a check. Both functions may be nil.
type CheckOptions struct {
	// Each is called in order for every readable event, and for each [events.Void].
	// Each returned problem becomes a finding about that event.
	Each func(events.Recorded) (problems []string)
	// Pace is called with the size in bytes of each event and may block to limit the
	// rate. Its error ends the check.
	Pace func(ctx context.Context, bytes int64) error
	// Dir is the directory of an unnamed temporary file: 24 bytes for each event, of
	// which a few megabytes are kept in memory. "" is the system's temporary directory.
	Dir string
}

// Check reads every sequence from 1 to the current end of the log. It does not stop at
// damage: an unreadable sequence is a finding, and Check continues at the next readable
// one. It compares the server's counts with the events read, and checks that every
// decision follows the decision that it was based on:
//
//	lane ckpt.a.main.s.>      4 ──▶ 7 ──▶ 12     each message has the sequence
//	                          0     4     7      that was the end of its lane
//
// In the buckets next to the log (leases, cursors and their witnesses) it checks that
// every key is readable, and that every cursor exists and is within the log.
//
// Check returns an error only if the check itself could not be done.
func (l *Log) Check(ctx context.Context, o CheckOptions) (Checked, error) {
	c := &checker{l: l, o: o, ids: seenIDs{dir: o.Dir, most: seenMost}, lanes: map[events.Scope]uint64{}}
	err := errors.Join(c.run(ctx), c.ids.close())
	if err != nil {
		err = fmt.Errorf("check the log at %s: %w", l.opts.where(), err)
	}
	return c.out, err
}

type checker struct {
	l     *Log
	o     CheckOptions
	out   Checked
	ids   seenIDs
	lanes map[events.Scope]uint64 // the last decision of each
}

func (c *checker) find(seq uint64, problem string) {
	if n := len(c.out.Findings); n > 0 {
		// A damaged block is one finding, not a thousand.
		if last := &c.out.Findings[n-1]; seq > 0 && last.Until+1 == seq && last.Problem == problem {
			last.Until = seq
			return
		}
	}
	c.out.Findings = append(c.out.Findings, Finding{Sequence: seq, Until: seq, Problem: problem})
}

func (c *checker) run(ctx context.Context) error {
	state, err := c.state(ctx)
	if err != nil {
		return err
	}
	c.out.First, c.out.Last = infoOf(state).First, state.State.LastSeq
	partial := whole(state)
	if partial != nil {
		c.find(0, partial.Error())
	}
	for next := uint64(1); next <= c.out.Last; {
		// A log that the server itself reports as damaged is read event by event.
		if partial == nil {
			if next, err = c.read(ctx, next); err != nil {
				return err
			}
		}
		if next, err = c.pass(ctx, next, partial != nil); err != nil {
			return err
		}
	}
	if partial == nil && len(c.out.Findings) == 0 {
		c.count(state.State.Msgs + infoOf(state).Sealed)
	}
	if err := c.archive(ctx); err != nil {
		return err
	}
	if err := c.ids.repeats(func(uint64, uint64) { c.out.Repeated++ }); err != nil {
		return err
	}
	return c.buckets(ctx)
}

// archive checks every byte of the archive against its seal, including bytes outside of
// events, such as an index.
func (c *checker) archive(ctx context.Context) error {
	if c.l.sealed().Last == 0 {
		return nil
	}
	a, err := c.l.archived(ctx)
	if err == nil {
		err = damagedArchive(a.Verify(ctx, c.o.Pace))
	}
	if errors.Is(err, ErrGap) {
		c.find(0, err.Error())
		return nil
	}
	return err
}

// count compares the number of events read with the server's count.
func (c *checker) count(stored uint64) {
	if n := c.out.Events; n != stored {
		c.find(0, fmt.Sprintf("the server counts %d events, %d were read", stored, n))
	}
}

func (c *checker) state(ctx context.Context) (state *jetstream.StreamInfo, err error) {
	ctx, cancel := deadline(ctx, DefaultAppend)
	defer cancel()
	err = c.l.retry(ctx, func(ctx context.Context) error {
		state, err = c.l.ours(ctx)
		return err
	})
	return state, err
}

// read reads from next until damage, and returns the first sequence that it did not
// get.
func (c *checker) read(ctx context.Context, next uint64) (uint64, error) {
	r := &reader{l: c.l, next: next, until: c.out.Last, stall: min(c.l.stall, time.Second)}
	var stopped error
	r.yield = func(e events.Recorded, _ error) bool {
		stopped = c.see(ctx, e, r.header)
		return stopped == nil
	}
	err := r.run(ctx)
	switch {
	case stopped != nil:
		return r.next, stopped
	case ctx.Err() != nil:
		return r.next, ctx.Err()
	case errors.Is(err, ErrForeign), errors.Is(err, ErrClosed), errors.Is(err, ErrNoLog):
		return r.next, err
	}
	return r.next, nil // reading the sequence itself will show why it ended
}

// pass tries unreadable sequences one by one, up to the first readable event; with all,
// to the end of the log.
func (c *checker) pass(ctx context.Context, next uint64, all bool) (uint64, error) {
	for ; next <= c.out.Last; next++ {
		e, header, err := c.one(ctx, next)
		switch {
		case ctx.Err() != nil:
			return next, ctx.Err()
		case errors.Is(err, ErrClosed) || errors.Is(err, ErrForeign) || err != nil && transient(err):
			return next, err
		case errors.Is(err, errNoMessage):
			c.find(next, fmt.Sprintf("it is not there, or cannot be read, although the log goes up to event %d; %s", c.out.Last, restore))
		case err != nil:
			c.find(next, err.Error())
		default:
			if err := c.see(ctx, e, header); err != nil {
				return next, err
			}
			if !all {
				return next + 1, nil
			}
		}
	}
	return next, nil
}

// one reads one event.
func (c *checker) one(ctx context.Context, seq uint64) (e events.Recorded, header nats.Header, err error) {
	ctx, cancel := deadline(ctx, DefaultAppend)
	defer cancel()
	var m stored
	err = c.l.retry(ctx, func(ctx context.Context) (err error) {
		if err = c.l.known(ctx); err == nil {
			m, err = c.l.fetch(ctx, msgGet{Seq: seq})
		}
		return err
	})
	if err == nil && m.Seq != seq {
		err = fmt.Errorf("the server answers with event %d", m.Seq)
	}
	if err != nil {
		return e, nil, err
	}
	header = m.readable()
	return recorded(m.Subject, header, m.Data, m.Seq, m.Time), header, nil
}

// see checks one event.
func (c *checker) see(ctx context.Context, e events.Recorded, header nats.Header) error {
	c.out.Events++
	void := e.Kind == events.Void{}.Kind()
	if !void {
		if err := c.ids.add(e.ID, e.Sequence); err != nil {
			return err
		}
	}
	if e.Scope.Actor == events.Server {
		if !void && e.Kind.Known() {
			c.out.Decisions++
		}
		if !void && e.Known() { // the rules of a newer version are unknown
			c.chain(e, header)
		}
		c.lanes[e.Scope] = e.Sequence
	}
	if c.o.Each != nil {
		for _, problem := range c.o.Each(e) {
			c.find(e.Sequence, problem)
		}
	}
	if c.o.Pace != nil {
		return c.o.Pace(ctx, int64(len(e.Data))+256)
	}
	return nil
}

// chain checks that a decision follows the last decision that its decider had seen.
func (c *checker) chain(e events.Recorded, header nats.Header) {
	if e.Sequence == 1 {
		return // nothing precedes store.created
	}
	text := header.Get(jetstream.ExpectedLastSubjSeqHeader)
	if follows := header.Get(headerFollows); follows != "" && text == "0" {
		text = follows // its predecessor was in the archive when it was appended
	}
	after, err := strconv.ParseUint(text, 10, 64)
	switch before := c.lanes[e.Scope]; {
	case err != nil:
		c.find(e.Sequence, fmt.Sprintf("decision %s was appended without a condition (%q)", e.ID, text))
	case after != before:
		c.find(e.Sequence, fmt.Sprintf("decision %s was made after event %d of its lane, and follows event %d", e.ID, after, before))
	}
}
