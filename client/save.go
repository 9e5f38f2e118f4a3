package client

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/ckptstore/ckptstore/tensor"
)

// Tensor is one rank's shard of a tensor. Data holds the elements of its box,
// row-major and little-endian: Save reads it, Load fills it.
type Tensor struct {
	tensor.Shard
	Data []byte
}

// Value is a named sequence of bytes. A per-rank value, such as RNG state, is
// saved for each rank; of a shared value, only the lowest rank's is saved.
type Value struct {
	FQN     string
	PerRank bool
	// Optional lets a load leave Data unchanged if the value is per rank and
	// fewer ranks saved it than now load it.
	Optional bool
	Data     []byte
}

// State is everything that a rank saves or loads.
type State struct {
	Tensors []Tensor
	Values  []Value
}

func (s State) items() []Item {
	items := make([]Item, 0, len(s.Tensors)+len(s.Values))
	for _, t := range s.Tensors {
		items = append(items, Item{
			FQN: t.FQN, DType: t.DType, Shape: t.Global,
			Offsets: t.Box.Offsets, Sizes: t.Box.Sizes, Bytes: int64(len(t.Data)),
		})
	}
	for _, v := range s.Values {
		items = append(items, Item{FQN: v.FQN, Value: true, PerRank: v.PerRank, Optional: v.Optional, Bytes: int64(len(v.Data))})
	}
	return items
}

// SaveOptions are optional.
type SaveOptions struct {
	Name         string // default step-<step>
	Participants []int  // ranks that take part, default all
}

// Save is a checkpoint that is being saved.
type Save struct {
	Checkpoint string // full ID
	c          *Client
	slot       SaveReply
	sealed     atomic.Bool
	fresh      bool // its plan was new to the trainer
	state      State
	waited     time.Duration // for the slot
}

// Save copies the state into shared memory and returns; the rank may then
// change its tensors. [Save.Wait] reports whether the checkpoint was committed.
// Every participant must call Save for the same step. Save returns no error if
// the trainer aborts the save because the disk is full: a lost checkpoint is no
// reason to end the training.
func (c *Client) Save(ctx context.Context, step int64, state State, o SaveOptions) (*Save, error) {
	s, err := c.Begin(ctx, step, state, o)
	if err != nil {
		return nil, err
	}
	return s, s.Seal(ctx)
}

// Begin is the first half of [Client.Save]: it gets a staging slot, and
// [Save.Seal] copies the state into it. The first save of a set of items also
// reads samples of them, so that the trainer can detect replicas that differ.
func (c *Client) Begin(ctx context.Context, step int64, state State, o SaveOptions) (*Save, error) {
	for _, t := range state.Tensors {
		if err := t.Validate(); err != nil {
			return nil, fmt.Errorf("save: %w", err)
		}
		if int64(len(t.Data)) != t.Bytes() {
			return nil, fmt.Errorf("save: tensor %q has %d bytes of data, its box %v needs %d", t.FQN, len(t.Data), t.Box, t.Bytes())
		}
	}
	s := &Save{c: c, state: state}
	req := SaveRequest{Name: o.Name, Step: step, Participants: o.Participants}
	items := state.items()
	var offsets []int64
	if req.Plan, offsets = c.plans.find(items); req.Plan == "" {
		req.Items = state.checked(items, c.WorldSize)
	}
	asked := time.Now()
	err := c.call(ctx, "save", req, &s.slot)
	if refused := (*Error)(nil); req.Plan != "" && errors.As(err, &refused) && refused.Status == http.StatusPreconditionFailed {
		req.Plan, req.Items = "", state.checked(items, c.WorldSize) // the trainer no longer has the plan
		asked = time.Now()
		err = c.call(ctx, "save", req, &s.slot)
	}
	if err != nil {
		return nil, err
	}
	s.waited = time.Since(asked)
	if s.slot.Skipped != "" {
		return nil, &SkippedError{Checkpoint: s.slot.Checkpoint, Reason: s.slot.Skipped}
	}
	if req.Plan != "" {
		s.slot.Offsets = offsets
	} else {
		c.plans.add(items, s.slot.Plan, s.slot.Offsets)
		s.fresh = true
	}
	if len(s.slot.Offsets) != len(items) || s.slot.Size < sealedAt+8 {
		return nil, fmt.Errorf("save: the trainer sent %d offsets for %d items, in a slot of %d bytes", len(s.slot.Offsets), len(items), s.slot.Size)
	}
	s.Checkpoint = s.slot.Checkpoint
	return s, nil
}

// Seal copies the bytes into the slot and tells the trainer that they are
// complete. Call it once. The trainer aborts a save that is never sealed.
func (s *Save) Seal(ctx context.Context) error {
	if s.sealed.Swap(true) {
		return fmt.Errorf("save: %s is sealed already: another save may be using its memory", s.Checkpoint)
	}
	began := time.Now()
	err := s.c.maps.use(s.slot.Slot, s.slot.Arena, s.slot.Size, func(data []byte) {
		i := 0
		put := func(from []byte) {
			copyOut(data[s.slot.Offsets[i]:][:len(from)], from)
			i++
		}
		for _, t := range s.state.Tensors {
			put(t.Data)
		}
		for _, v := range s.state.Values {
			put(v.Data)
		}
		seal(data, s.slot.Generation)
	})
	if errors.Is(err, fs.ErrNotExist) {
		// The trainer has reclaimed the memory and knows why.
		why := s.Wait(ctx, Begun)
		if gone := (*AbortedError)(nil); errors.As(why, &gone) && gone.NoRoom {
			return nil // Wait returns it
		}
		if why != nil {
			return fmt.Errorf("save: %w", why)
		}
	}
	if err != nil {
		return fmt.Errorf("save: %w", err)
	}
	waited, copied := s.waited.Seconds(), time.Since(began).Seconds()
	if err := s.c.call(ctx, "seal", SealRequest{Checkpoint: s.Checkpoint, Waited: &waited, Copied: &copied}, nil); err != nil {
		return err
	}
	if s.fresh {
		s.c.mapAhead()
	}
	return nil
}

// Wait blocks until the checkpoint reaches a state: [Begun], [Staged] or
// [Committed]. It returns an [*AbortedError] if the checkpoint never will.
func (s *Save) Wait(ctx context.Context, state string) error {
	var r WaitReply
	if err := s.c.call(ctx, "wait", WaitRequest{s.Checkpoint, state}, &r); err != nil {
		return err
	}
	if r.State == Aborted {
		return &AbortedError{Checkpoint: s.Checkpoint, Reason: r.Reason, NoRoom: r.NoRoom}
	}
	return nil
}

// AbortedError is why a save was aborted: its checkpoint will never exist.
type AbortedError struct {
	Checkpoint string
	Reason     string
	NoRoom     bool // the disk was full
}

func (e *AbortedError) Error() string {
	return fmt.Sprintf("checkpoint %s was aborted: %s", e.Checkpoint, e.Reason)
}

// ErrSkipped means that a save was skipped on all ranks because earlier saves
// hold all staging slots. Test with errors.Is.
var ErrSkipped = errors.New("save skipped")

// SkippedError is [ErrSkipped] with its reason.
type SkippedError struct {
	Checkpoint string // full ID that it would have had
	Reason     string
}

func (e *SkippedError) Error() string { return "save skipped: " + e.Reason }

// Is matches [ErrSkipped].
func (e *SkippedError) Is(target error) bool { return target == ErrSkipped }
