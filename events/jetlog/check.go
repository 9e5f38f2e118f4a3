package jetlog

import (
	"bufio"
	"cmp"
	"container/heap"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
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

// seenIDs finds repeated IDs in bounded memory. It keeps 24 bytes of each event, sorts
// as many as fit its memory, and spills each sorted run to one unnamed file. At the end
// it merges the runs:
//
//	record   16 bytes of the ID's SHA-256, 8 bytes of the sequence
//	run      records in order of the digest, then of the sequence
type seenIDs struct {
	dir  string // of the file; "" is the system's temporary directory
	most int    // records in memory

	mem  []seenID
	file *os.File
	runs []int64 // where each begins
	size int64
}

type seenID struct {
	digest [16]byte
	event  uint64
}

const (
	seenSize = 24
	// seenMost is 6 MiB of records: a million events need four runs.
	seenMost = 1 << 18
)

func (a seenID) compare(b seenID) int {
	return cmp.Or(slices.Compare(a.digest[:], b.digest[:]), cmp.Compare(a.event, b.event))
}

// add records one event. Sequences must be added in order.
func (s *seenIDs) add(id string, seq uint64) error {
	sum := sha256.Sum256([]byte(id))
	if s.mem = append(s.mem, seenID{[16]byte(sum[:16]), seq}); len(s.mem) < s.most {
		return nil
	}
	return s.spill()
}

func (s *seenIDs) spill() (err error) {
	if s.file == nil {
		if s.file, err = os.CreateTemp(s.dir, ".ckptstore-check-*"); err != nil {
			return fmt.Errorf("make room for the IDs of events: %w", err)
		}
		// The unlinked file vanishes however this process ends.
		if err := os.Remove(s.file.Name()); err != nil {
			return err
		}
	}
	slices.SortFunc(s.mem, seenID.compare)
	s.runs = append(s.runs, s.size)
	w := bufio.NewWriterSize(io.NewOffsetWriter(s.file, s.size), 1<<16)
	for _, e := range s.mem {
		b := binary.BigEndian.AppendUint64(e.digest[:], e.event)
		if _, err := w.Write(b); err != nil {
			return fmt.Errorf("spill the IDs of events: %w", err)
		}
	}
	if err := w.Flush(); err != nil {
		return fmt.Errorf("spill the IDs of events: %w", err)
	}
	s.size += int64(len(s.mem)) * seenSize
	s.mem = s.mem[:0]
	return nil
}

// repeats calls visit for every event whose ID an earlier event has, in no particular
// order. before is the first event with that ID.
func (s *seenIDs) repeats(visit func(seq, before uint64)) error {
	slices.SortFunc(s.mem, seenID.compare)
	from := seenRuns{{next: s.mem}}
	for i, begin := range s.runs {
		end := s.size
		if i+1 < len(s.runs) {
			end = s.runs[i+1]
		}
		from = append(from, &seenRun{r: bufio.NewReaderSize(io.NewSectionReader(s.file, begin, end-begin), 1<<15)})
	}
	for _, r := range from {
		if err := r.fill(); err != nil {
			return err
		}
	}
	from = slices.DeleteFunc(from, func(r *seenRun) bool { return len(r.next) == 0 })
	heap.Init(&from)
	var first seenID // of those with the same digest; 0 before there is one
	for len(from) > 0 {
		r := from[0]
		e := r.next[0]
		if first.event != 0 && e.digest == first.digest {
			visit(e.event, first.event)
		} else {
			first = e
		}
		r.next = r.next[1:]
		if err := r.fill(); err != nil {
			return err
		}
		if len(r.next) == 0 {
			heap.Pop(&from)
		} else {
			heap.Fix(&from, 0)
		}
	}
	return nil
}

func (s *seenIDs) close() error {
	if s.file == nil {
		return nil
	}
	return s.file.Close()
}

// seenRun is the unread rest of a sorted run: in memory, and in the file.
type seenRun struct {
	next []seenID
	r    *bufio.Reader // nil: nothing
	one  [1]seenID
}

// fill reads the next record unless one is in memory.
func (r *seenRun) fill() error {
	if len(r.next) > 0 || r.r == nil {
		return nil
	}
	var b [seenSize]byte
	_, err := io.ReadFull(r.r, b[:])
	if errors.Is(err, io.EOF) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the IDs of events: %w", err)
	}
	r.one[0] = seenID{[16]byte(b[:16]), binary.BigEndian.Uint64(b[16:])}
	r.next = r.one[:]
	return nil
}

// seenRuns is a heap ordered by the next record of each run.
type seenRuns []*seenRun

var _ heap.Interface = (*seenRuns)(nil)

// Len implements [heap.Interface].
func (h seenRuns) Len() int { return len(h) }

// Less implements [heap.Interface].
func (h seenRuns) Less(i, j int) bool { return h[i].next[0].compare(h[j].next[0]) < 0 }

// Swap implements [heap.Interface].
func (h seenRuns) Swap(i, j int) { h[i], h[j] = h[j], h[i] }

// Push implements [heap.Interface].
func (h *seenRuns) Push(x any) { *h = append(*h, x.(*seenRun)) }

// Pop implements [heap.Interface].
func (h *seenRuns) Pop() any {
	last := (*h)[len(*h)-1]
	*h = (*h)[:len(*h)-1]
	return last
}

// buckets checks that the keys next to the log are readable, well-formed and as many as
// the server counts. It also checks that cursors are within the log and that every
// witness has its cursor.
func (c *checker) buckets(ctx context.Context) error {
	ctx, cancel := deadline(ctx, DefaultAppend)
	defer cancel()
	var found []string
	err := c.l.retry(ctx, func(ctx context.Context) (err error) {
		if err = c.l.known(ctx); err == nil {
			found, err = c.l.checkBuckets(ctx)
		}
		return err
	})
	for _, problem := range found {
		c.out.Findings = append(c.out.Findings, Finding{Problem: problem, Aside: true})
	}
	return err
}

func (l *Log) checkBuckets(ctx context.Context) (found []string, err error) {
	cursors := map[string]uint64{}
	for _, b := range []struct {
		name  string
		value func(key string, data []byte) error
	}{
		{Cursors, func(key string, data []byte) error {
			var v cursorValue
			err := json.Unmarshal(data, &v)
			cursors[key] = v.Sequence
			return named(err, key, v.Name)
		}},
		{Witnesses, func(key string, data []byte) error {
			var v witnessValue
			return named(json.Unmarshal(data, &v), key, v.Name)
		}},
		{Leases, func(_ string, data []byte) error {
			var v leaseValue
			err := json.Unmarshal(data, &v)
			if err == nil && (v.Token == "" || v.TermMS <= 0) {
				err = errors.New("no token or no term")
			}
			return err
		}},
	} {
		some, err := l.checkBucket(ctx, b.name, b.value)
		if err != nil {
			return nil, err
		}
		found = append(found, some...)
	}
	info, err := l.ours(ctx) // current: a cursor may have moved meanwhile
	if err != nil {
		return nil, err
	}
	for key, at := range cursors {
		if at > info.State.LastSeq {
			found = append(found, fmt.Sprintf("cursor %q stands at event %d, and the log ends at %d", key, at, info.State.LastSeq))
		}
	}
	witnesses, _, err := l.keys(ctx, Witnesses)
	if err != nil {
		return nil, err
	}
	for _, key := range witnesses {
		state, err := l.cursorState(ctx, key)
		if err != nil {
			return nil, err
		}
		if _, read := cursors[key]; state.Damage != nil && !read {
			found = append(found, fmt.Sprintf("cursor %q: %v", key, state.Damage))
		}
	}
	slices.Sort(found)
	return found, nil
}

// named checks that a value names its own key.
func named(err error, key, name string) error {
	if err == nil && bucketKey(name) != key {
		err = fmt.Errorf("the value belongs to %q", name)
	}
	return err
}

// checkBucket reads all keys of one bucket.
func (l *Log) checkBucket(ctx context.Context, bucket string, value func(key string, data []byte) error) (found []string, err error) {
	keys, state, err := l.keys(ctx, bucket)
	if err != nil {
		return nil, err
	}
	bad := func(format string, a ...any) { found = append(found, "bucket "+bucket+": "+fmt.Sprintf(format, a...)) }
	if state.Lost != nil {
		bad("the server lost %d values (%d bytes) to a damaged block", len(state.Lost.Msgs), state.Lost.Bytes)
	}
	if state.LastSeq > 0 && len(keys) == 0 {
		bad("it had %d values, and no key is left", state.LastSeq)
	}
	for _, key := range keys {
		m, err := l.entry(ctx, bucket, key)
		switch {
		case errors.Is(err, errUnreadable):
			bad("the value of key %q cannot be read", key)
		case err != nil:
			return nil, err
		case m.Seq != 0:
			if err := value(key, m.Data); err != nil {
				bad("the value of key %q: %v", key, err)
			}
		}
	}
	return found, nil
}
