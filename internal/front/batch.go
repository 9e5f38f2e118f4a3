package front

import (
	"strconv"
	"time"
)

// batchTime is how long a batch may take from its first message to its last.
const batchTime = 10 * time.Second

// streams is how many batches are passed on message by message at a time. The
// server has room for 50 open batches.
const streams = 8

// longBatch is the maximum length of a batch's ID in bytes.
const longBatch = 64

// batch holds facts that are appended together. They take effect only with its
// last message, which is passed on when all are valid. A few batches at a time
// are passed on as they come. All others are held back until they are complete: a
// client that does not continue its batch would keep the server's room from
// others.
type batch struct {
	id     string
	count  int
	frames []byte // encoded for the server
	bytes  int    // of all its messages
	held   int64  // reserved bytes
	until  time.Time
	why    *Refusal // first reason to refuse the batch
	stream bool     // passed on as it comes
	taken  bool     // its ID belongs to another open batch
}

// batched handles one message of a batch. why is a reason to refuse it.
func (s *session) batched(f frame, h header, why *Refusal) error {
	id := h.get(headerBatch)
	if s.batch == nil || s.batch.id != id {
		s.dropBatch() // the rest of an interrupted batch
		s.batch = s.newBatch(id)
		if id == s.lapsed {
			s.batch.why = tooLate(id)
		}
	}
	b, commit := s.batch, h.get(headerBatchCommit) != ""
	b.count++
	if why == nil {
		why = b.fits(f, h)
	}
	if why == nil && time.Now().After(b.until) {
		why = tooLate(b.id)
	}
	if why == nil && (commit || b.count == 1) {
		why = s.admit()
	}
	if why == nil && b.why == nil {
		why = s.fact(f, h)
	}
	if why == nil && b.why == nil {
		why = s.hold(b, f, h)
	}
	if b.why == nil {
		b.why = why
	}
	if !commit && f.reply == "" {
		if !b.stream || b.why != nil {
			return nil
		}
		err := s.to.add(b.frames)
		b.frames = b.frames[:0]
		return err
	}
	if b.why == nil {
		b.why = s.door.quota.take(b.bytes)
	}
	if why = b.why; why != nil {
		s.dropBatch()
		return s.refuse(f, why)
	}
	// No other batch may have its ID before the server has its end.
	err := s.to.send(b.frames)
	if err == nil && b.stream {
		b.stream = false
		<-s.f.streams
	}
	s.dropBatch()
	return err
}

// tooLate refuses a batch that took too long, for example because this process
// was stopped in between. The client appends it again.
func tooLate(id string) *Refusal {
	return &Refusal{Code: CodeBusy, Status: 503, Text: "batch " + id + " took longer than " + batchTime.String()}
}

// newBatch takes an ID that no other open batch has: the server would merge their
// messages, the valid and the unchecked ones, into one batch, and the last
// message of the valid batch would commit all of them.
func (s *session) newBatch(id string) *batch {
	b := &batch{id: id, until: time.Now().Add(batchTime)}
	s.f.mu.Lock()
	taken := s.f.batches[id]
	s.f.batches[id] = true
	s.f.mu.Unlock()
	if taken {
		b.taken = true
		b.why = &Refusal{Code: CodeBusy, Status: 503, Text: "another batch has the ID " + id}
		return b
	}
	select {
	case s.f.streams <- struct{}{}:
		b.stream = true
	default:
	}
	return b
}

// fits checks that a message is the next of its batch.
func (b *batch) fits(f frame, h header) *Refusal {
	text, commit := h.get(headerBatchNumber), h.get(headerBatchCommit)
	number, err := strconv.Atoi(text)
	switch {
	case len(b.id) > longBatch:
		return refuse(CodeBatch, "the ID of a batch has %d bytes", len(b.id))
	case err != nil || number != b.count || number > batchMessages:
		return refuse(CodeBatch, "message %q of batch %s, want %d of at most %d", text, b.id, b.count, batchMessages)
	case commit != "" && commit != "1", (commit == "") != (f.reply == ""):
		return refuse(CodeBatch, "message %d of batch %s: the last one alone has the header %s: 1 and a subject for the answer", number, b.id, headerBatchCommit)
	case h.get(headerStream) != "":
		return refuse(CodeBatch, "batch %s: header %s", b.id, headerStream)
	}
	return conditionless(h)
}

// hold keeps a message until it is passed on.
func (s *session) hold(b *batch, f frame, h header) *Refusal {
	before := len(b.frames)
	b.frames = appendPub(b.frames, f.subject, f.reply, h, f.payload)
	if b.bytes += len(b.frames) - before; b.bytes > s.f.limits.Batch {
		return refuse(CodeTooLarge, "batch %s has more than %d bytes", b.id, s.f.limits.Batch)
	}
	if more := int64(cap(b.frames)) - b.held; more > 0 {
		if !s.reserve(more) {
			return &Refusal{Code: CodeBusy, Status: 503, Text: "the owner of the store has no room for another batch at the moment"}
		}
		b.held += more
	}
	return nil
}

// fact validates one message of a batch.
func (s *session) fact(f frame, h header) *Refusal {
	e, why := s.judge.event(f.subject, h, f.payload)
	if why == nil && e.Kind.Decides() {
		why = refuse(CodeLane, "%s is a decision: it is appended alone", e.Kind)
	}
	return why
}

// reserve takes bytes from the budget of all clients, if available.
func (s *session) reserve(bytes int64) bool { return s.budget.TryAcquire(bytes) }

// dropBatch forgets the open batch, if any.
func (s *session) dropBatch() {
	b := s.batch
	if b == nil {
		return
	}
	s.batch = nil
	switch {
	case b.taken:
	case b.stream:
		// The server keeps its rest open for that long.
		time.AfterFunc(2*batchTime, func() {
			<-s.f.streams
			s.f.freeBatch(b.id)
		})
	default:
		s.f.freeBatch(b.id)
	}
	s.budget.Release(b.held)
}

// freeBatch makes an ID available to other batches.
func (f *Front) freeBatch(id string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.batches, id)
}
