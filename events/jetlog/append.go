package jetlog

import (
	"container/list"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/ckptstore/ckptstore/events"
)

// Limits of one atomic batch.
const (
	maxBatch      = 1000    // messages, the server's limit
	maxBatchBytes = 8 << 20 // small enough for the server's queues
	maxSingles    = 8       // up to so many queued facts, single appends are faster: a batch took as long as 12
)

// Append adds facts to the log in order and returns their sequences. They are durable
// on return. Several facts form one atomic batch of up to 1000 events and 8 MiB, and
// longer lists are split. A batch also takes facts of other callers that wait at the
// same time.
//
// Append retries lost acknowledgements and connections until ctx ends (30 s without a
// deadline). It then returns [ErrUnacknowledged], and the facts may or may not be in
// the log. Appending the same events again is safe and returns their sequences.
//
// At most 64 MiB and 65536 facts wait at a time. Later callers wait for room, in the
// order of arrival, until ctx ends.
func (l *Log) Append(ctx context.Context, facts ...events.Fact) ([]uint64, error) {
	if len(facts) == 0 {
		return nil, nil
	}
	if l.opts.ReadOnly != nil {
		return nil, fmt.Errorf("append %s: %w", facts[0].Kind, l.opts.ReadOnly)
	}
	if l.opts.Admit != nil {
		if err := l.opts.Admit(); err != nil {
			return nil, fmt.Errorf("append %s to the log at %s: %w", facts[0].Kind, l.opts.where(), err)
		}
	}
	j := &job{events: make([]events.Event, len(facts)), done: make(chan error, 1)}
	for i, f := range facts {
		size, err := check(f.Event)
		if err == nil && (f.Kind.Decides() || f.Scope.Actor == events.Server) {
			err = errors.New("it is a decision, or has the actor of decisions")
		}
		if err != nil {
			return nil, fmt.Errorf("append %s: %w", f.Kind, err)
		}
		j.events[i] = f.Event
		j.bytes += size
	}
	ctx, cancel := deadline(ctx, DefaultAppend)
	defer cancel()
	j.ctx = ctx
	if err := l.enqueue(j); err != nil {
		what := string(facts[0].Kind)
		if len(facts) > 1 {
			what = fmt.Sprintf("%d facts from %s on", len(facts), what)
		}
		return nil, fmt.Errorf("append %s to the log at %s: %w", what, l.opts.where(), err)
	}
	return j.sequences, nil
}

// check rejects an event that the log could not store, and returns its size in bytes.
func check(e events.Event) (int, error) {
	m := events.Encode(e)
	size := len(m.Data) + 256 // added by JetStream
	for name, values := range m.Header {
		for _, v := range values {
			if strings.ContainsAny(v, "\r\n") || strings.TrimSpace(v) != v {
				return 0, fmt.Errorf("header %s is %q, which a header cannot hold", name, v)
			}
			size += len(name) + len(v) + 4
		}
	}
	if size > MaxMessage {
		return 0, fmt.Errorf("it has %d bytes, at most %d are allowed; put large parts into a blob", size, MaxMessage)
	}
	return size, nil
}

func message(e events.Event) *nats.Msg {
	m := events.Encode(e)
	return &nats.Msg{Subject: m.Subject, Header: m.Header, Data: m.Data}
}

// publish sends one event once and returns its sequence, whether it is new or already
// stored.
func (l *Log) publish(ctx context.Context, m *nats.Msg, opts ...jetstream.PublishOpt) (uint64, error) {
	return l.publishTo(ctx, l.stream(), m, opts...)
}

// publishTo sends one event once, for one tail of the log: any other tail refuses it.
func (l *Log) publishTo(ctx context.Context, stream string, m *nats.Msg, opts ...jetstream.PublishOpt) (uint64, error) {
	ack, err := l.js.PublishMsg(ctx, m, append(opts, jetstream.WithExpectStream(stream), jetstream.WithRetryAttempts(0))...)
	if hasCode(err, codeOtherStream) {
		return 0, l.suspect(err)
	}
	if err != nil {
		return 0, err
	}
	l.saw(ack.Sequence)
	return ack.Sequence, nil
}

// commit sends the queued facts whenever the previous batch is acknowledged. Under
// load, batches therefore grow by themselves.
func (l *Log) commit() {
	defer close(l.idle)
	var g gather
	for {
		select {
		case <-l.queue.ready:
		case <-l.ctx.Done():
			return
		}
		for {
			g.wait(l.ctx, &l.queue)
			jobs := l.queue.take()
			if len(jobs) == 0 {
				break
			}
			l.commitJobs(jobs, &g)
		}
	}
}

// commitJobs retries until each job is acknowledged, refused, or abandoned by its
// caller.
func (l *Log) commitJobs(jobs []*job, g *gather) {
	var b backoff
	since := l.denials.mark()
	for {
		begin := time.Now()
		waiting := jobs[:0:0]
		for _, j := range jobs {
			if j.ctx.Err() == nil {
				waiting = append(waiting, j)
			}
		}
		if jobs = waiting; len(jobs) == 0 || l.ctx.Err() != nil {
			return
		}
		ctx, cancel := l.attempt(concerning(l.ctx, published(jobs...)))
		err := l.send(ctx, jobs)
		cancel()
		if err != nil && transient(err) {
			jobs = l.refuseDenied(jobs, since)
			if b.wait(l.ctx) != nil {
				return
			}
			continue
		}
		if err != nil && len(jobs) > 1 { // find the job at fault
			for _, j := range jobs {
				l.commitJobs([]*job{j}, g)
			}
			return
		}
		g.sent(len(jobs)+l.queue.length(), time.Since(begin))
		for _, j := range jobs {
			j.done <- refusedBy(err)
		}
		return
	}
}

// refuseDenied ends the jobs that contain an event which the server does not let this
// client publish. It returns the others.
func (l *Log) refuseDenied(jobs []*job, since int) (others []*job) {
	for _, j := range jobs {
		if denied := l.denials.of(since, published(j)); denied != nil {
			j.done <- denied
		} else {
			others = append(others, j)
		}
	}
	return others
}

// published returns the concern for the subjects of the jobs' events.
func published(jobs ...*job) concern {
	return func(subject string) bool {
		for _, j := range jobs {
			for _, e := range j.events {
				if events.Subject(e.Scope, e.Kind) == subject {
					return true
				}
			}
		}
		return false
	}
}

// send appends all events of the jobs once and fills in their sequences.
func (l *Log) send(ctx context.Context, jobs []*job) error {
	if err := l.known(ctx); err != nil {
		return err
	}
	if err := l.sealedMeanwhile(ctx, jobs); err != nil {
		return err
	}
	var all []events.Event
	for _, j := range jobs {
		for _, e := range j.events {
			if j.had[e.ID] == 0 {
				all = append(all, e)
			}
		}
	}
	var sequences []uint64
	for rest := all; len(rest) > 0; {
		n, bytes := 0, 0
		for n < min(len(rest), maxBatch) && (n == 0 || bytes+len(rest[n].Data) <= maxBatchBytes) {
			bytes += len(rest[n].Data)
			n++
		}
		some, err := l.sendBatch(ctx, rest[:n], len(jobs))
		if err != nil {
			return err
		}
		sequences = append(sequences, some...)
		rest = rest[n:]
	}
	for _, j := range jobs {
		j.sequences = make([]uint64, len(j.events))
		for i, e := range j.events {
			if j.sequences[i] = j.had[e.ID]; j.sequences[i] == 0 {
				j.sequences[i], sequences = sequences[0], sequences[1:]
			}
		}
	}
	return nil
}

// sendBatch appends up to 1000 events that belong to the given number of jobs.
func (l *Log) sendBatch(ctx context.Context, all []events.Event, jobs int) ([]uint64, error) {
	if len(all) == 1 || len(all) == jobs && len(all) <= maxSingles {
		return l.sendSingly(ctx, all)
	}
	first, err := l.sendAtomically(ctx, all)
	if hasCode(err, codeBatchDuplicate) {
		return l.sendSingly(ctx, all)
	}
	if err != nil {
		return nil, err
	}
	sequences := make([]uint64, len(all))
	for i := range sequences {
		sequences[i] = first + uint64(i)
	}
	return sequences, nil
}

func (l *Log) sendSingly(ctx context.Context, all []events.Event) ([]uint64, error) {
	sequences := make([]uint64, len(all))
	for i, e := range all {
		var err error
		if sequences[i], err = l.publish(ctx, message(e)); err != nil {
			return nil, fmt.Errorf("event %s: %w", e.ID, err)
		}
	}
	return sequences, nil
}

// Headers of an atomic batch.
const (
	headerBatchID       = "Nats-Batch-Id"
	headerBatchSequence = "Nats-Batch-Sequence"
	headerBatchCommit   = "Nats-Batch-Commit"
)

// sendAtomically appends all events or none, with one sync of the disk. It returns the
// sequence of the first; the others follow it. Every attempt is a new batch: the server
// drops the remains of an interrupted one.
func (l *Log) sendAtomically(ctx context.Context, all []events.Event) (uint64, error) {
	id := rand.Text()
	for i, e := range all {
		m := message(e)
		m.Header[headerBatchID] = []string{id}
		m.Header[headerBatchSequence] = []string{strconv.Itoa(i + 1)}
		if i < len(all)-1 {
			// The server answers only the last message. It refuses the whole batch
			// there if any other message did not arrive.
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
		l.saw(ack.Sequence)
		return ack.Sequence - uint64(len(all)) + 1, nil
	}
	return 0, errors.New("batch of no events")
}

// gather delays the next batch for callers that were just acknowledged and are about to
// append again.
//
// A batch costs five syncs of the disk whether it has ten events or a thousand: the
// server stages it in a separate store before it commits it. Without the delay, the
// callers split into two groups that take turns, and each waits for two batches of half
// the size. With 64 writers that kept 4 appends in flight, that was half the rate at
// twice the latency. A timer that always runs out was worse than none. The wait
// therefore ends when all callers are back, and a single or late caller does not wait.
type gather struct {
	expect int // appends in flight when the last batch returned
	until  time.Time
}

// Bounds of the wait: a share of the time that the last batch took, and a time within
// which a caller that appends at once is certainly back.
const (
	gatherShare = 4
	gatherMost  = 2 * time.Millisecond
)

// sent notes the duration of a batch that is about to be acknowledged.
func (g *gather) sent(inFlight int, took time.Duration) {
	g.expect = inFlight
	g.until = time.Now().Add(min(took/gatherShare, gatherMost))
}

// wait returns when as many appends are queued as were in flight, or after a short
// bounded time.
func (g *gather) wait(ctx context.Context, q *queue) {
	left := time.Until(g.until)
	if left <= 0 || q.length() >= min(g.expect, maxBatch) {
		return
	}
	timer := time.NewTimer(left)
	defer timer.Stop()
	for q.length() < min(g.expect, maxBatch) {
		select {
		case <-q.ready:
		case <-timer.C:
			return
		case <-ctx.Done():
			return
		}
	}
}

// Limits of the queue, so that a server that does not answer costs its clients no more
// memory.
const (
	queueBytes = 64 << 20
	queueFact  = 1 << 10 // bytes that a fact counts for at least, so that 65536 fit
)

// job is one call of Append. Its sequences are valid after done has received nil.
type job struct {
	ctx       context.Context
	events    []events.Event
	bytes     int
	sequences []uint64
	done      chan error
	looked    uint64            // the end of the archive that was searched for its events
	had       map[string]uint64 // the sequences of the events found there, by ID
	place     *list.Element     // in the queue; nil once taken
}

// weight is the job's share of the budget until it is acknowledged or abandoned. A job
// larger than the budget takes all of it.
func (j *job) weight() int64 {
	return min(queueBytes, max(int64(j.bytes), queueFact*int64(len(j.events))))
}

// queue holds jobs in the order of arrival.
type queue struct {
	mu    sync.Mutex
	jobs  list.List     // of *job
	ready chan struct{} // holds a token when jobs may be queued
}

// enqueue hands j to the committer and returns when it is acknowledged or refused, or
// when its context or the log ends. On return it is no longer queued.
func (l *Log) enqueue(j *job) error {
	ctx, cancel := context.WithCancelCause(j.ctx)
	defer cancel(nil)
	defer context.AfterFunc(l.ctx, func() { cancel(ErrClosed) })()
	if err := l.room.Acquire(ctx, j.weight()); err != nil {
		return fmt.Errorf("%w: not sent for lack of room in the queue: %w", ErrUnacknowledged, l.because(context.Cause(ctx)))
	}
	defer l.room.Release(j.weight())
	l.queue.push(j)
	select {
	case err := <-j.done:
		return err
	case <-ctx.Done():
		l.queue.drop(j)
		return fmt.Errorf("%w: %w", ErrUnacknowledged, l.because(context.Cause(ctx)))
	}
}

func (q *queue) push(j *job) {
	q.mu.Lock()
	j.place = q.jobs.PushBack(j)
	q.mu.Unlock()
	select {
	case q.ready <- struct{}{}:
	default:
	}
}

// drop removes an abandoned job from the queue. If the committer has taken it already,
// the committer leaves it out of its next attempt.
func (q *queue) drop(j *job) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if j.place != nil {
		q.jobs.Remove(j.place)
		j.place = nil
	}
}

// take removes the jobs that fit one batch. A larger job is taken alone.
func (q *queue) take() []*job {
	q.mu.Lock()
	defer q.mu.Unlock()
	var taken []*job
	count, bytes := 0, 0
	for front := q.jobs.Front(); front != nil; front = q.jobs.Front() {
		j := front.Value.(*job)
		count += len(j.events)
		bytes += j.bytes
		if len(taken) > 0 && (count > maxBatch || bytes > maxBatchBytes) {
			break
		}
		q.jobs.Remove(front)
		j.place = nil
		taken = append(taken, j)
	}
	return taken
}

func (q *queue) length() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.jobs.Len()
}
