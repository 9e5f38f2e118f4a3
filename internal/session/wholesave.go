package session

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/planner"
)

// Caller is the rank that makes a request to the store; [CallerOf] returns it.
type Caller struct {
	Run, Trial string
	Attempt    int
	Rank       int
	World      int

	group *Group
}

// Coordinator returns how to make a request of the caller to the process that
// coordinates its group; nil if this process does.
func (c Caller) Coordinator() func(ctx context.Context, path string, in, out any) error {
	if c.group == nil || c.group.Peer == nil {
		return nil
	}
	return func(ctx context.Context, path string, in, out any) error {
		return c.group.Peer.Request(ctx, c.Rank, path, in, out)
	}
}

// callerKey is the key of a request's Caller in its context.
type callerKey struct{}

// CallerOf returns the rank that made the request; false if no rank did.
func CallerOf(ctx context.Context) (Caller, bool) {
	c, ok := ctx.Value(callerKey{}).(Caller)
	return c, ok
}

// called returns the request with its caller.
func (s *rankServer) called(r *http.Request) *http.Request {
	return r.WithContext(context.WithValue(r.Context(), callerKey{}, Caller{
		Run: s.cfg.Run, Trial: s.cfg.Trial, Attempt: s.Number, Rank: s.rank, World: s.cfg.World(), group: s.Group,
	}))
}

// Save saves complete, digested files as a checkpoint of the caller's attempt:
// the saver of that attempt appends the plans, seals and writes of all ranks. It
// returns when the checkpoint is committed. Once the attempt is over or fenced,
// nothing is committed.
func (c Caller) Save(ctx context.Context, name string, step int64, from *data.Sealed) (id string, err error) {
	g := c.group
	if err := planner.ValidName(name); err != nil {
		return "", badRequest("%w", err)
	}
	ranks := from.Manifest().Ranks
	if last := ranks[len(ranks)-1].Rank; last >= g.cfg.World() {
		return "", badRequest("the files of %s are of rank %d, in a job of %d ranks", name, last, g.cfg.World())
	}
	id = planner.CheckpointID(name, g.Number, g.names.whole(name))
	g.saver.putWhole(id, from)
	defer g.saver.putWhole(id, nil)
	if err := offerWhole(ctx, g.decisions, g.store.Blobs, g.Number, id, name, step, g.cfg.World(), from.Manifest().Ranks, from.Items); err != nil {
		return id, err
	}
	ctx, cancel := g.store.calls.Timeout(ctx, g.cfg.SaveTimeout+decideTimeout)
	defer cancel()
	reply, err := g.saver.wait(ctx, id, ranks[0].Rank, client.Committed)
	if err == nil && reply.State == client.Aborted {
		err = aborted(id, reply)
	}
	return id, err
}

// putWhole sets the files that hold the bytes of a save without slots; nil
// removes them.
func (s *saver) putWhole(id string, from *data.Sealed) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if from == nil {
		delete(s.wholes, id)
		return
	}
	if s.wholes == nil {
		s.wholes = map[string]*data.Sealed{}
	}
	s.wholes[id] = from
}

// whole returns the files that hold the bytes of a save without slots, or nil.
func (s *saver) whole(id string) *data.Sealed {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.wholes[id]
}

// putOf writes the bytes of one rank, from files or slots.
func (s *saver) putOf(ctx context.Context, c planner.Write) (data.Written, error) {
	from := s.whole(c.Checkpoint)
	if from == nil {
		return s.put(ctx, c)
	}
	w := s.store.Data.Writer(s.ref(c.Checkpoint))
	if err := w.SetUp(ctx, c.Rank == 0); err != nil {
		return data.Written{}, err
	}
	return w.KeepData(ctx, c.Rank, c.Items, from)
}

// offerWhole appends the plan and the seal of every rank of a save.
func offerWhole(ctx context.Context, l *decisionLog, blobs Blobs, attempt int, id, name string, step int64, world int, ranks []checkpoint.RankIndex, items func(int) []checkpoint.Item) error {
	var participants []int
	for _, r := range ranks {
		participants = append(participants, r.Rank)
	}
	listed := events.Listed(participants, world)
	var plans, seals []events.Fact
	add := func(to *[]events.Fact, rank int, body events.Body) error {
		f, err := l.fact(l.trial, events.Rank(rank), body)
		*to = append(*to, f)
		return err
	}
	for _, rank := range participants {
		local := checkpoint.Local{Rank: rank, Items: items(rank)}
		bytes := int64(0)
		for _, it := range local.Items {
			bytes += it.Bytes
		}
		encoded := checkpoint.EncodeLocal(local)
		blob, err := blobs.Put(ctx, encoded)
		if err != nil {
			return err
		}
		err = errors.Join(
			add(&plans, rank, &events.LocalPlan{
				Attempt: attempt, Checkpoint: id, Name: name, Step: step, Rank: rank,
				Participants: listed, Fingerprint: checkpoint.Sum(encoded).String(), Plan: blob,
			}),
			add(&seals, rank, &events.WriteSealed{Attempt: attempt, Checkpoint: id, Rank: rank, Bytes: bytes}),
		)
		if err != nil {
			return err
		}
	}
	if _, err := l.log.Append(ctx, append(plans, seals...)...); err != nil {
		return fmt.Errorf("record the plans of %s: %w", id, err)
	}
	return nil
}

// saveNames counts the saves of each name in an attempt: the saves of ranks, which
// each count their own, and the saves from files. The ID of the n-th save of a
// name contains n.
type saveNames struct {
	mu    sync.Mutex
	slots map[string]int // the most that a rank has made
	files map[string]int
}

// rank returns the number of a rank's n-th save of a name.
func (c *saveNames) rank(name string, n int) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.slots == nil {
		c.slots = map[string]int{}
	}
	c.slots[name] = max(c.slots[name], n)
	return n + c.files[name]
}

// whole returns the number of the next save from files.
func (c *saveNames) whole(name string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.files == nil {
		c.files = map[string]int{}
	}
	c.files[name]++
	return c.files[name] + c.slots[name]
}
