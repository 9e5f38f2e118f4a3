package session

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/peer"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/session/outbox"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/tensor"
)

// onSave plans a rank's save: it appends the local plan to the log and gives the
// worker a slot.
func (s *rankServer) onSave(ctx context.Context, req client.SaveRequest) (client.SaveReply, error) {
	if req.Step < 0 {
		return client.SaveReply{}, badRequest("step %d is negative", req.Step)
	}
	if req.Name == "" {
		req.Name = planner.DefaultName(req.Step)
	}
	if err := planner.ValidName(req.Name); err != nil {
		return client.SaveReply{}, badRequest("%w", err)
	}
	participants, err := s.participants(req.Participants)
	if err != nil {
		return client.SaveReply{}, err
	}
	known, checked, err := s.local(ctx, req)
	if err != nil {
		return client.SaveReply{}, err
	}

	s.mu.Lock()
	s.saves[req.Name]++
	id := planner.CheckpointID(req.Name, s.Number, s.names.rank(req.Name, s.saves[req.Name]))
	s.mu.Unlock()

	reply, err := s.stage(ctx, id, req, participants, known, checked)
	if now := s.saver.state(id, s.rank); now.State == client.Aborted {
		s.slots.Abort(id, s.rank)
		if err == nil && now.NoRoom {
			return reply, nil // as if it had been aborted a moment later
		}
		return client.SaveReply{}, aborted(id, now)
	}
	if errors.Is(err, staging.ErrNoSlotFree) {
		return s.busy(id, err)
	}
	if err != nil {
		s.slots.Abort(id, s.rank)
		return client.SaveReply{}, errors.Join(err, s.saver.refuse(ctx, s.Number, id, s.rank, err))
	}
	s.saver.asked(id) // from here on, a worker that does not wait gets no result
	return reply, nil
}

// busy tells a worker, and the log, that a save is skipped or has failed for lack
// of a slot.
func (s *rankServer) busy(id string, why error) (client.SaveReply, error) {
	text := why.Error()
	if s.cfg.WhenBusy == staging.BusySkip {
		text = "skipped: " + text
	}
	s.outbox.Post(id, &events.WriteFailed{Attempt: s.Number, Checkpoint: id, Rank: s.rank, Error: text})
	if s.cfg.WhenBusy == staging.BusySkip {
		return client.SaveReply{Checkpoint: id, Skipped: why.Error()}, nil
	}
	return client.SaveReply{}, problem.Wrap(problem.Unavailable, why)
}

// stage gives a rank its slot for a save and appends the rank's plan. A plan that
// the log already has is appended after the rank has its reply.
func (s *rankServer) stage(ctx context.Context, id string, req client.SaveRequest, participants []int, known *localPlan, checked *checkpoint.Local) (client.SaveReply, error) {
	ctx, cancel := s.store.calls.Timeout(ctx, s.cfg.SaveTimeout)
	defer cancel()
	say := s.says(id, req, participants, known, checked)
	part := staging.Part{Attempt: s.Number, Rank: s.rank, Fingerprint: say.print, Checkpoint: id}
	if err := s.loader.EndAhead(ctx); err != nil {
		return client.SaveReply{}, err
	}
	sl, err := s.slots.Take(ctx, part, s.onNode(participants), known.slot)
	if err == nil {
		err = s.waiting(ctx)
	}
	if err != nil {
		return client.SaveReply{}, err
	}
	s.saver.keep(say.full)
	if say.said == say.full {
		err = s.outbox.Record(ctx, id, say.said)
	} else {
		s.outbox.Post(id, say.said)
	}
	if err == nil {
		err = s.waiting(ctx)
	}
	if err != nil {
		return client.SaveReply{}, err
	}
	reply := client.SaveReply{
		Checkpoint: id, Plan: known.token, Slot: sl.Index, Arena: sl.Path, Size: known.slot.Size(), Generation: sl.Generation,
	}
	if checked != nil {
		reply.Offsets = known.slot.Offsets()
	}
	return reply, nil
}

// waiting refuses a slot to a rank that has disconnected: the slot would stay
// empty and be held until the deadline of the save. A rank that disconnects while
// the reply is on its way still holds its slot that long.
func (s *rankServer) waiting(ctx context.Context) error {
	if peer.HungUp(ctx) {
		return fmt.Errorf("rank %d no longer waits for a staging slot", s.rank)
	}
	return nil
}

// ranksOnce lists the ranks of a world once: a list for each save of each rank would be
// quadratic.
type ranksOnce struct {
	once sync.Once
	all  []int
}

func (r *ranksOnce) of(world int) []int {
	r.once.Do(func() { r.all = events.Participants(nil, world) })
	return r.all
}

// onNode returns those of some ranks that live on this node: it has no slots of others.
func (s *rankServer) onNode(ranks []int) []int {
	if len(s.cfg.Nodes) == 1 {
		return ranks
	}
	return outbox.Among(s.cfg.Local(), ranks)
}

// participants returns the sorted ranks of a save or load.
func (s *rankServer) participants(asked []int) ([]int, error) {
	if len(asked) == 0 {
		return s.everyone.of(s.cfg.World()), nil
	}
	ranks := slices.Sorted(slices.Values(asked))
	if len(slices.Compact(slices.Clone(ranks))) != len(ranks) || ranks[0] < 0 || ranks[len(ranks)-1] >= s.cfg.World() {
		return nil, badRequest("participants %v are not distinct ranks of a world of %d", asked, s.cfg.World())
	}
	if !slices.Contains(ranks, s.rank) {
		return nil, badRequest("rank %d takes part without being one of the participants %v", s.rank, asked)
	}
	return ranks, nil
}

// planItem validates one item of a request.
func planItem(it client.Item) (checkpoint.Item, error) {
	check, err := parseCheck(it.Check)
	path, perr := parsePath(it.FQN, it.Path)
	err = errors.Join(err, perr)
	out := checkpoint.Item{Value: it.Value, PerRank: it.PerRank, Bytes: it.Bytes, Shard: tensor.Shard{FQN: it.FQN}, Check: check, Path: path}
	switch {
	case err != nil:
		return out, err
	case it.FQN == "":
		return out, badRequest("an item has no name")
	case it.Bytes < 0:
		return out, badRequest("%q has %d bytes", it.FQN, it.Bytes)
	case it.PerRank && !it.Value:
		return out, badRequest("tensor %q cannot be per rank: give each rank's tensor its own name", it.FQN)
	case it.Value:
		return out, nil
	}
	out.Shard = it.Shard()
	if err := out.Shard.Validate(); err != nil {
		return out, badRequest("%w", err)
	}
	if it.Bytes != out.Shard.Bytes() {
		return out, badRequest("tensor %q has %d bytes, its box %v needs %d", it.FQN, it.Bytes, out.Shard.Box, out.Shard.Bytes())
	}
	return out, nil
}

// onSeal records that a worker's copy is complete. The seal is appended after the
// reply: the sealed bytes are the trainer's. Only workers that wait for a save
// learn that it was aborted for lack of disk space: a full disk fails no call of
// a worker that trains.
func (s *rankServer) onSeal(_ context.Context, req client.SealRequest) (struct{}, error) {
	over := func() (bool, error) {
		now := s.saver.state(req.Checkpoint, s.rank)
		if now.State != client.Aborted || now.NoRoom {
			return now.State == client.Aborted, nil
		}
		return true, aborted(req.Checkpoint, now)
	}
	if ended, err := over(); ended {
		return struct{}{}, err
	}
	size, ok, err := s.slots.Seal(s.rank, req.Checkpoint)
	if err != nil {
		return struct{}{}, err
	}
	// An abort in between has taken the slot.
	if ended, err := over(); ended {
		return struct{}{}, err
	}
	if !ok {
		return struct{}{}, problem.Errorf(problem.Conflict, "rank %d has no staging slot for %q: call save first, and seal once", s.rank, req.Checkpoint)
	}
	sealed := &events.WriteSealed{Attempt: s.Number, Checkpoint: req.Checkpoint, Rank: s.rank, Bytes: size}
	if t, ok := s.slots.Times(req.Checkpoint, s.rank); ok {
		sealed.Waited, sealed.Copied = ownSeconds(req.Waited, t.Waited), ownSeconds(req.Copied, t.Copied)
	}
	s.outbox.Post(req.Checkpoint, sealed)
	for _, to := range s.senders {
		if slot := s.slots.Reader(req.Checkpoint, s.rank); slot != nil {
			to.Send(req.Checkpoint, s.rank, s.saver.joined.Ranks(req.Checkpoint), slot)
		}
	}
	return struct{}{}, nil
}

// ownSeconds returns a duration in the form of the log: the worker's own if it has a sensible
// one, else that of this process.
func ownSeconds(own *float64, here time.Duration) *float64 {
	const longest = 7 * 24 * time.Hour // a save whose seal is later has been aborted
	if own != nil && *own >= 0 && *own < longest.Seconds() {
		here = time.Duration(*own * float64(time.Second))
	}
	return events.Seconds(here)
}

// onAbort records that a rank cannot finish a save, so that the others need not
// wait for its deadline. The event follows the rank's plan in the log; the
// coordinator then takes the slots back.
func (s *rankServer) onAbort(_ context.Context, req client.AbortRequest) (struct{}, error) {
	switch now := s.saver.state(req.Checkpoint, s.rank); {
	case req.Checkpoint == "":
		return struct{}{}, badRequest("no checkpoint to abort is named")
	case req.Reason == "":
		return struct{}{}, badRequest("abort of %s without a reason", req.Checkpoint)
	case now.State == client.Aborted:
		return struct{}{}, nil
	case now.State == client.Committed:
		return struct{}{}, problem.Errorf(problem.Conflict, "checkpoint %s is committed: it can only be deleted", req.Checkpoint)
	}
	s.outbox.Post(req.Checkpoint, &events.WriteFailed{
		Attempt: s.Number, Checkpoint: req.Checkpoint, Rank: s.rank, Error: Beginning(req.Reason, MaxMessage),
	})
	return struct{}{}, nil
}

// onSlots answers when the memory of the rank's other slots exists, so that a
// worker can map it in parallel with its training.
func (s *rankServer) onSlots(ctx context.Context, _ struct{}) (client.Slots, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.SaveTimeout)
	defer cancel()
	made, err := s.slots.Made(ctx, s.rank)
	var out client.Slots
	for _, sl := range made {
		out.Slots = append(out.Slots, client.Slot{Slot: sl.Index, Arena: sl.Path, Size: sl.Size})
	}
	return out, err
}

func aborted(id string, now client.WaitReply) error {
	return problem.Errorf(problem.Conflict, "checkpoint %s was aborted: %s", id, now.Reason)
}

func (s *rankServer) onWait(ctx context.Context, req client.WaitRequest) (client.WaitReply, error) {
	if req.State != client.Begun && req.State != client.Staged && req.State != client.Committed {
		return client.WaitReply{}, badRequest("no state %q to wait for: begun, staged or committed", req.State)
	}
	// The coordinator's deadline ends every save; the margin is for its decision
	// to arrive.
	ctx, cancel := s.store.calls.Timeout(ctx, s.cfg.SaveTimeout+decideTimeout)
	defer cancel()
	return s.saver.wait(ctx, req.Checkpoint, s.rank, req.State)
}

// parsePath parses an item's path in its state dict; nil is the FQN's path.
func parsePath(fqn string, keys []any) (checkpoint.Path, error) {
	if len(keys) == 0 {
		return nil, nil
	}
	path := make(checkpoint.Path, len(keys))
	for i, key := range keys {
		switch key := key.(type) {
		case string:
			path[i] = checkpoint.PathKey(key)
		case float64:
			if key != math.Trunc(key) || math.Abs(key) > math.MaxInt32 {
				return nil, badRequest("%q has a path with the index %v: give keys as strings and indexes as integers", fqn, key)
			}
			path[i] = checkpoint.PathIndex(int(key))
		case map[string]any:
			literal, ok := key["literal"].(string)
			if !ok || len(key) != 1 {
				return nil, badRequest("%q has a path with %v: give keys that are no strings as {\"literal\": \"3\"}", fqn, key)
			}
			path[i] = checkpoint.PathLiteral(literal)
		default:
			return nil, badRequest("%q has a path with %v: give keys as strings and indexes as integers", fqn, key)
		}
	}
	if path.Plain(fqn) {
		return nil, nil // equal plans encode equally
	}
	if err := path.Validate(fqn); err != nil {
		return nil, badRequest("%w", err)
	}
	return path, nil
}
