package replica

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/internal/crc32c"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/session/staging"
)

// Partner is the node to which a sender sends.
type Partner struct {
	Node   string // name for messages
	Index  int    // of the node
	URL    string // where its keeper answers, without a path
	Client *http.Client
}

// Slot is what a sender reads: [staging.Reader] implements it.
type Slot interface {
	io.ReaderAt
	Size() int64
}

var _ Slot = (*staging.Reader)(nil)

// Sender sends the sealed slots of one attempt's ranks to a partner, one after the other. Once a
// slot of a checkpoint is sent, its others are too; behind them only the newest checkpoint waits,
// so a partner has whole checkpoints although saves are faster than it. It exists per attempt: [Sender.Stop] ends it.
type Sender struct {
	to      Partner
	attempt int
	rate    int64 // bytes in a second; 0: any number
	log     *slog.Logger
	whole   func(ctx context.Context, w Whole)
	stop    context.CancelFunc
	done    chan struct{}
	telling sync.WaitGroup

	sent map[string]*Whole // of checkpoints, the last few; the goroutine of run has them

	mu      sync.Mutex
	saves   map[string]*sentSave // by checkpoint, the last few
	last    uint64
	waiting []sealedSlot
	skipped int
	came    chan struct{}
}

// sentSave is what a sender does with the slots of a checkpoint.
type sentSave struct {
	order   uint64
	begun   bool // a slot was sent, or is
	skipped bool // a newer checkpoint took its place
}

// sealedSlot is a slot to send.
type sealedSlot struct {
	checkpoint string
	*sentSave
	rank int
	slot Slot
	of   int // ranks of this node that take part in the save
	at   time.Time
}

// Whole describes the replica of all slots that a node has sealed for one checkpoint.
type Whole struct {
	Checkpoint string
	Ranks      []int
	Bytes      int64
	Took       time.Duration // since the first seal

	order uint64
	since time.Time
}

// NewSender starts a sender, which ends with ctx. whole is called for each checkpoint when
// the partner has the slots of all ranks of this node; it may block, for as long as its context
// lasts.
func NewSender(ctx context.Context, attempt int, to Partner, rate int64, whole func(context.Context, Whole), log *slog.Logger) *Sender {
	ctx, stop := context.WithCancel(ctx)
	s := &Sender{
		to: to, attempt: attempt, rate: rate, whole: whole, log: log, stop: stop, done: make(chan struct{}),
		saves: map[string]*sentSave{}, sent: map[string]*Whole{}, came: make(chan struct{}, 1),
	}
	go s.run(ctx)
	return s
}

// Stop ends the sender and waits until it reads no slot any more. A nil sender does nothing.
func (s *Sender) Stop() {
	if s == nil {
		return
	}
	s.stop()
	<-s.done
	s.telling.Wait()
	s.to.Client.CloseIdleConnections()
}

// knownOrders is how many checkpoints a sender tells apart: ranks seal the same one at about the
// same time.
const knownOrders = 64

// Send gives a sealed slot to send; of ranks of this node take part in the save. It does not block. A nil sender does nothing.
func (s *Sender) Send(checkpoint string, rank, of int, slot Slot) {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	save := s.saves[checkpoint]
	if save == nil {
		s.last++
		save = &sentSave{order: s.last}
		s.saves[checkpoint] = save
		for id, old := range s.saves {
			if old.order+knownOrders < s.last {
				delete(s.saves, id)
			}
		}
	}
	next := sealedSlot{checkpoint, save, rank, slot, of, time.Now()}
	if save.skipped {
		s.behind(next)
		return
	}
	s.waiting = slices.DeleteFunc(s.waiting, func(old sealedSlot) bool {
		if old.order < save.order && !old.begun {
			old.skipped = true
			s.behind(old)
			return true
		}
		return old.sentSave == save && old.rank == rank
	})
	s.waiting = append(s.waiting, next)
	select {
	case s.came <- struct{}{}:
	default:
	}
}

// behind warns of slots that were never sent, the 1st, 2nd, 4th and so on. The caller holds the
// lock.
func (s *Sender) behind(of sealedSlot) {
	if s.skipped++; s.skipped&(s.skipped-1) == 0 {
		s.log.Warn("replication is slower than the saves: a save has no replica", "checkpoint", of.checkpoint, "rank", of.rank, "partner", s.to.Node, "slots_skipped", s.skipped)
	}
}

// next returns a slot that waits, of the oldest checkpoint.
func (s *Sender) next() (of sealedSlot, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.waiting) == 0 {
		return of, false
	}
	at := 0
	for i, w := range s.waiting {
		if w.order < s.waiting[at].order {
			at = i
		}
	}
	of = s.waiting[at]
	of.begun = true
	s.waiting = append(s.waiting[:at], s.waiting[at+1:]...)
	return of, true
}

func (s *Sender) run(ctx context.Context) {
	defer close(s.done)
	failing := false
	for {
		of, ok := s.next()
		if !ok {
			select {
			case <-s.came:
				continue
			case <-ctx.Done():
				return
			}
		}
		err := s.send(ctx, of)
		if err == nil {
			s.arrived(ctx, of)
		}
		switch {
		case ctx.Err() != nil:
			return
		case err == nil && failing:
			s.log.Info("replication works again", "partner", s.to.Node, "checkpoint", of.checkpoint)
		case err == nil:
			s.log.Debug("replica sent", "checkpoint", of.checkpoint, "rank", of.rank, "partner", s.to.Node)
		case errors.Is(err, staging.ErrReused):
			s.mu.Lock()
			s.behind(of)
			s.mu.Unlock()
			continue
		case !failing: // logged once, until one succeeds
			s.log.Warn("replica missing: the save is lost with this node until its files are written", "checkpoint", of.checkpoint, "rank", of.rank, "partner", s.to.Node, "error", err)
		}
		failing = err != nil
	}
}

// arrived counts a slot that the partner has.
func (s *Sender) arrived(ctx context.Context, of sealedSlot) {
	w := s.sent[of.checkpoint]
	if w == nil {
		w = &Whole{Checkpoint: of.checkpoint, order: of.order, since: of.at}
		s.sent[of.checkpoint] = w
		for id, old := range s.sent {
			if old.order+knownOrders < of.order {
				delete(s.sent, id) // never whole
			}
		}
	}
	w.Ranks, w.Bytes = append(w.Ranks, of.rank), w.Bytes+of.slot.Size()
	if of.at.Before(w.since) {
		w.since = of.at
	}
	if len(w.Ranks) < of.of {
		return
	}
	delete(s.sent, of.checkpoint)
	slices.Sort(w.Ranks)
	w.Took = time.Since(w.since)
	s.log.Debug("replica is whole", "checkpoint", w.Checkpoint, "ranks", w.Ranks, "partner", s.to.Node, "bytes", w.Bytes, "took", w.Took)
	s.telling.Go(func() { s.whole(ctx, *w) })
}

// tries is how often a request is sent before the slot is abandoned.
const tries = 3

// pauseAgain is the pause before a request is repeated.
const pauseAgain = 200 * time.Millisecond

// send sends one slot.
func (s *Sender) send(ctx context.Context, of sealedSlot) error {
	began, size := time.Now(), of.slot.Size()
	var begun beginAnswer
	begin, err := json.Marshal(beginRequest{Attempt: s.attempt, Rank: of.rank, Checkpoint: of.checkpoint, Order: of.order, Size: size})
	if err != nil {
		return err
	}
	if err := s.request(ctx, "begin", text(begin), &begun); err != nil {
		return err
	}
	for n := int64(0); n*staging.ReplicaBlock < size; n++ {
		at, end := n*staging.ReplicaBlock, min((n+1)*staging.ReplicaBlock, size)
		block := body{end - at + sumSize, func() io.Reader { return &summed{slot: of.slot, at: at, end: end} }}
		if err := s.request(ctx, fmt.Sprintf("%d/blocks/%d", begun.ID, n), block, &nothing{}); err != nil {
			return fmt.Errorf("block %d: %w", n, err)
		}
		if err := s.pace(ctx, began, end); err != nil {
			return err
		}
	}
	return s.request(ctx, fmt.Sprintf("%d/whole", begun.ID), text(nil), &nothing{})
}

// pace waits until so many bytes may have been sent since began. It is called for each block: for each piece
// of 256 KiB, a copied byte took half as much CPU again, and a training lost more.
func (s *Sender) pace(ctx context.Context, began time.Time, sent int64) error {
	if s.rate <= 0 {
		return nil
	}
	wait := time.Until(began.Add(time.Duration(float64(sent) / float64(s.rate) * float64(time.Second))))
	if wait <= 0 {
		return nil
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// body is that of a request, which may be sent several times.
type body struct {
	size int64
	from func() io.Reader
}

func text(of []byte) body {
	return body{int64(len(of)), func() io.Reader { return bytes.NewReader(of) }}
}

// request sends a request, and repeats it if there is no answer, or the partner found the body
// damaged.
func (s *Sender) request(ctx context.Context, path string, of body, out any) (err error) {
	for try := range tries {
		if try > 0 {
			timer := time.NewTimer(pauseAgain)
			select {
			case <-timer.C:
			case <-ctx.Done():
				timer.Stop()
				return ctx.Err()
			}
		}
		err = s.once(ctx, path, of, out)
		if err == nil || ctx.Err() != nil || final(err) {
			return err
		}
	}
	return err
}

// final reports whether a repeated request would fail too.
func final(err error) bool {
	for _, kind := range problem.Kinds(err) {
		if kind != problem.Damage && kind != problem.Unavailable {
			return true
		}
	}
	return errors.Is(err, staging.ErrReused)
}

// once sends a request and waits for its answer.
func (s *Sender) once(ctx context.Context, path string, of body, out any) error {
	limit := blockTimeout
	if path == "begin" {
		limit = beginTimeout
	}
	var uses sync.WaitGroup
	defer uses.Wait() // the transport may read the slot longer than it is asked to
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, s.to.URL+"/v1/replicas/"+path, nil)
	if err != nil {
		return err
	}
	if of.size > 0 {
		r.ContentLength = of.size
		r.GetBody = func() (io.ReadCloser, error) {
			uses.Add(1)
			return &used{of.from(), sync.OnceFunc(uses.Done)}, nil
		}
		r.Body, _ = r.GetBody()
	}
	reply, err := s.to.Client.Do(r)
	if err != nil {
		return err
	}
	return answer(reply, out)
}

// used is a body whose transport closes it when it has read it.
type used struct {
	io.Reader
	done func()
}

// Close implements [io.Closer].
func (u *used) Close() error {
	u.done()
	return nil
}

// summed reads a block of a slot, and after it the CRC-32C of these bytes in sumSize bytes. Each piece is
// summed while it is in the cache. A profile of both ends has the copies of whole blocks of 4 MiB through
// memory, two on each side, as half of what a copied byte costs: more than TLS.
type summed struct {
	slot    io.ReaderAt
	at, end int64 // what is left of the block
	sum     uint32
	tail    []byte // what is left of the checksum; nil: the block has not ended
}

var _ io.Reader = (*summed)(nil)

// Read implements [io.Reader].
func (s *summed) Read(p []byte) (n int, err error) {
	if s.at < s.end {
		p = p[:min(int64(len(p)), s.end-s.at)]
		n, err = s.slot.ReadAt(p, s.at)
		s.sum, s.at = crc32c.Update(s.sum, p[:n]), s.at+int64(n)
		if n == len(p) {
			err = nil // io.EOF of the whole slot
		}
		return n, err
	}
	if s.tail == nil {
		s.tail = binary.LittleEndian.AppendUint32(nil, s.sum)
	}
	n = copy(p, s.tail)
	if s.tail = s.tail[n:]; n == 0 && len(p) > 0 {
		return 0, io.EOF
	}
	return n, nil
}
