package launch

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"path"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/session/handoff"
	"github.com/ckptstore/ckptstore/internal/session/retry"
	"github.com/ckptstore/ckptstore/projections"
)

// Survival is the word of the log on which nodes of a group live while no process coordinates it. Of
// Live and Silence for one node, the log takes one after the other. The methods may be called concurrently.
type Survival interface {
	// Live records that a node's part of an attempt lives. It fails once the part was silenced.
	Live(ctx context.Context, node, attempt int) error
	// Silence ends that for good: later calls of Live for this attempt and earlier ones fail.
	Silence(ctx context.Context, node, attempt int) error
	// Term returns how long a coordinator has not renewed its lease when another may take it.
	Term() time.Duration
}

// A part that may outlive its coordinator lives, with T as timeout:
//
//	T + T/4   after it has sent the last beat that was answered: the log may elect a leader meanwhile
//	T/2       after it has begun a call of [Survival.Live] that succeeds
//
// So it is dead 0.65 T after it was silenced, if nothing was received from it for T before: also if
// the two clocks differ in rate by 10 % each, as 0.5 T / 0.9 < 0.65 T / 1.1.
func lifeOfBeat(timeout time.Duration) time.Duration { return timeout + timeout/4 }

func lifeOfWord(timeout time.Duration) time.Duration { return timeout / 2 }

func deadAfter(timeout time.Duration) time.Duration { return timeout * 13 / 20 }

// survive has this node's part live on while the coordinating process is silent, as long as the
// log takes its word.
func (p *part) survive(ctx context.Context) {
	timeout := p.link.Timeout()
	tick := time.NewTicker(timeout / 20)
	defer tick.Stop()
	warned := false
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		if !p.outlives.Load() {
			return // for good
		}
		sent, answered := time.Now(), p.link.Answered()
		p.cfg.Contact.Survive(answered.Add(lifeOfBeat(timeout)))
		if sent.Sub(answered) < timeout/4 {
			warned = false
			continue
		}
		asking, cancel := context.WithTimeout(ctx, timeout/4)
		err := p.cfg.Survival.Live(asking, p.link.Index(), p.order.Attempt)
		cancel()
		if err == nil {
			p.cfg.Contact.Survive(sent.Add(lifeOfWord(timeout)))
		} else if !warned && ctx.Err() == nil {
			warned = true
			p.log.Warn("log does not take the word that this node lives", "attempt", p.order.Attempt, "error", err)
		}
	}
}

// nodePart is a node's part of an attempt.
type nodePart struct{ node, attempt int }

// mayLive notes that the processes of a lost node's part of the current group may live by the word
// of the log.
func (f *fleet) mayLive(index int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if o := f.now; o != nil && o.order.Survives {
		if _, member := o.place[index]; member {
			f.silenced[nodePart{index, o.order.Attempt}] = true
		}
	}
}

// silence ends the parts of lost nodes, and waits until no process of them lives, also if the job is asked to end:
// the next job does not ask for nodes of an attempt whose end is in the log. After an error, the next call
// begins with the same parts.
func (f *fleet) silence(ctx context.Context) error {
	f.mu.Lock()
	parts := maps.Clone(f.silenced)
	f.mu.Unlock()
	for of := range parts {
		if err := f.silencePart(ctx, of); err != nil {
			return err
		}
	}
	if len(parts) == 0 {
		return nil
	}
	dead := time.NewTimer(deadAfter(f.endpoint.Timeout()))
	defer dead.Stop()
	select {
	case <-dead.C:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for of := range parts {
		delete(f.silenced, of)
	}
	return nil
}

// silenceLeft is silence for a job that ends with err. It is bounded. A coordinator that was replaced ends no
// parts: they live under another one.
func (f *fleet) silenceLeft(ctx context.Context, err error) {
	if f == nil || errors.Is(err, session.ErrFenced) || f.overtaken(context.WithoutCancel(ctx)) != nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), retry.EndTimeout+deadAfter(f.endpoint.Timeout()))
	defer cancel()
	if err := f.silence(ctx); err != nil {
		f.log.Warn("processes of lost nodes may live on: the log does not take the end of their parts", "error", err)
	}
}

// silencePart ends the word of a part. It waits for a log that does not answer.
func (f *fleet) silencePart(ctx context.Context, of nodePart) error {
	err := f.store.Insist(ctx, func(ctx context.Context) error { return f.cfg.Survival.Silence(ctx, of.node, of.attempt) })
	if err != nil {
		return fmt.Errorf("silence node %d: %w", of.node, err)
	}
	return nil
}

// silenceAll ends the parts of all nodes of an attempt that was not ended by its coordinator.
func (f *fleet) silenceAll(ctx context.Context, attempt int) error {
	if f.cfg.Survival == nil {
		return nil
	}
	attempts, err := f.store.Views.Attempts(ctx, f.cfg.Run, f.cfg.Trial)
	if err != nil {
		return err
	}
	at := slices.IndexFunc(attempts, func(a projections.Attempt) bool { return a.Attempt == attempt })
	if at < 0 {
		return errors.New("the views do not have the last attempt; run `ckptstore verify`")
	}
	indexes, _, err := f.placed(ctx, attempts[at])
	if err != nil {
		return err
	}
	for _, index := range indexes {
		if err := f.silencePart(ctx, nodePart{index, attempt}); err != nil {
			return err
		}
	}
	// The last beat was answered before the coordinator let its lease expire. A node that joins has
	// ended its part.
	timeout := f.endpoint.Timeout()
	limit := time.NewTimer(max(deadAfter(timeout), time.Until(f.began.Add(lifeOfBeat(timeout)*11/10-f.cfg.Survival.Term()))))
	defer limit.Stop()
	for {
		changed := f.endpoint.Changed()
		here := f.endpoint.Members()
		if !slices.ContainsFunc(indexes, func(index int) bool {
			return index != f.own() && !slices.ContainsFunc(here, func(m nodes.Member) bool { return m.Index == index })
		}) {
			return nil
		}
		select {
		case <-changed:
		case <-limit.C:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// inventory is what a node's part of a living group has.
type inventory struct {
	Attempt int    `json:"attempt"`          // 0: it has no part
	Broken  string `json:"broken,omitempty"` // why the group cannot continue with another coordinator
	Hello   bool   `json:"hello,omitempty"`  // all its ranks have connected
	Heard   uint64 `json:"heard"`            // last event that the coordinator before has forwarded

	Reports   map[int]handoff.Reported `json:"reports,omitempty"`   // last answers, by rank
	Listens   bool                     `json:"listens,omitempty"`   // a rank has asked whether to stop
	Told      string                   `json:"told,omitempty"`      // the last answer to that
	Sequences map[int]uint64           `json:"sequences,omitempty"` // numbers of the last collectives that have an answer, by rank
	Answer    *collectiveAnswer        `json:"answer,omitempty"`    // to the newest of them

	joining uint64 // of the node, as the receiver counts them: see [nodes.Member]
}

// collectiveAnswer is the answer to a collective.
type collectiveAnswer struct {
	Sequence uint64 `json:"sequence"`
	Root     int    `json:"root"` // of a broadcast; -1: a gather
	Body     []byte `json:"body"` // as the rank got it
}

// mostAnswer bounds the answer to a collective that a node keeps, in bytes.
const mostAnswer = 1 << 20

// holdings notes what the coordinating process has answered to this node's ranks. A nil one notes
// nothing.
type holdings struct {
	mu     sync.Mutex
	moves  int // how often another process has taken the place of the coordinating one
	broken string
	open   int // loads
	inventory
}

// begins notes that a request of a rank begins, and returns when.
func (h *holdings) begins(r *http.Request) (moves int) {
	if h == nil {
		return 0
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	switch path.Base(r.URL.Path) {
	case "send", "set":
		h.breaks("its ranks have exchanged messages, which the coordinator before held")
	}
	return h.moves
}

// breaks notes why the group cannot continue with another coordinator. The caller holds the lock.
func (h *holdings) breaks(why string) {
	if h.broken == "" {
		h.broken = why
	}
}

// told notes a message to the coordinating process.
func (h *holdings) told(kind string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch kind {
	case msgHello:
		h.Hello = true
	case msgExited, msgFailed, msgStopped, msgClosed:
		h.breaks("ranks of it have ended")
	}
}

// loads counts the loads under way.
func (h *holdings) loads(by int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.open += by
}

// accept notes the answer to a rank's request, unless another process coordinates since the
// request began: then the answer is of no worth, and accept returns false.
func (h *holdings) accept(since, rank int, r *http.Request, response *http.Response) bool {
	if h == nil {
		return true
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.moves != since {
		return false
	}
	if response.StatusCode != http.StatusOK {
		return true
	}
	switch op := path.Base(r.URL.Path); op {
	case "report":
		if of, err := handoff.ParseReported(response.Header.Get(session.ReportedHeader)); err == nil {
			if h.Reports == nil {
				h.Reports = map[int]handoff.Reported{}
			}
			if was := h.Reports[rank]; of.Iteration == 0 { // it has returned
				was.Done, was.Step = true, of.Step
				of = was
			}
			h.Reports[rank] = of
		}
	case "should_stop":
		body, err := io.ReadAll(response.Body)
		response.Body = io.NopCloser(bytes.NewReader(body))
		var reply client.StopReply
		if err == nil && json.Unmarshal(body, &reply) == nil {
			h.Listens, h.Told = true, cmp.Or(response.Header.Get(session.RequestHeader), reply.Stop)
		}
	case "gather", "broadcast":
		seq, err := strconv.ParseUint(r.Header.Get(client.HeaderSeq), 10, 64)
		if err != nil {
			return true // the rank has sent none
		}
		if h.Sequences == nil {
			h.Sequences = map[int]uint64{}
		}
		h.Sequences[rank] = seq
		if h.Answer != nil && h.Answer.Sequence >= seq {
			return true
		}
		h.Answer = &collectiveAnswer{Sequence: seq, Root: -1}
		if op == "broadcast" {
			if h.Answer.Root, err = strconv.Atoi(r.Header.Get(client.HeaderRoot)); err != nil {
				h.Answer.Root = 0
			}
		}
		body, err := io.ReadAll(response.Body)
		response.Body = io.NopCloser(bytes.NewReader(body))
		if err == nil && len(body) <= mostAnswer {
			h.Answer.Body = body
		}
	}
	return true
}

// move notes that another process coordinates from now on, and returns what this part has.
func (h *holdings) move(attempt int, heard uint64) inventory {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.moves++
	i := h.inventory
	i.Attempt, i.Heard, i.Broken = attempt, heard, h.broken
	if h.open > 0 && i.Broken == "" {
		i.Broken = "its ranks were loading a checkpoint"
	}
	// The maps change under the lock only; the copy is encoded without it.
	i.Reports, i.Sequences = maps.Clone(i.Reports), maps.Clone(i.Sequences)
	return i
}

// Carrier gives the inventory of a node's part to a coordinator that takes over: see
// [nodes.Link.Move].
type Carrier struct {
	mu sync.Mutex
	of *part // nil: the node has no part now
}

// Inventory returns the first message to a coordinator that takes over. From then on, answers of the
// one before are of no worth.
func (c *Carrier) Inventory() (kind string, body any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.of == nil {
		return msgInventory, inventory{}
	}
	return msgInventory, c.of.held.move(c.of.order.Attempt, c.of.group.LastHeard())
}

// Lives reports whether this node has a part of a group that lives.
func (c *Carrier) Lives() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.of != nil && c.of.outlives.Load() && c.of.cfg.Contact.Survives()
}

// carry has the carrier of this node give the inventory of a part until the caller calls over.
func (j *job) carry(p *part) (over func()) {
	c := j.cfg.Carrier
	if c == nil {
		return func() {}
	}
	set := func(p *part) {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.of = p
	}
	set(p)
	return func() { set(nil) }
}

// parts returns the answer to a collective as its hub has it.
func (a *collectiveAnswer) parts(world int) ([][]byte, error) {
	if a.Body == nil {
		return nil, errors.New("the answer to the last collective is not kept")
	}
	parts, err := client.DecodeParts(a.Body)
	switch {
	case err != nil:
		return nil, err
	case a.Root < 0 && len(parts) == world:
		return parts, nil
	case a.Root < 0 || a.Root >= world || len(parts) != 1:
		return nil, errors.New("the answer to the last collective is malformed")
	}
	all := make([][]byte, world)
	all[a.Root] = parts[0]
	return all, nil
}
