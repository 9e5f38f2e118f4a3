package client

import (
	"context"
	"fmt"
)

// LoadOptions are optional.
type LoadOptions struct {
	Ref    string // run@name or a full ID; default: what the trainer says to resume from
	Strict bool   // keys of the checkpoint that no rank asks for are an error
}

// Loaded says what a load found.
type Loaded struct {
	Checkpoint string // full ID
	Step       int64
	Unread     []string // keys of the checkpoint that no rank asked for
}

// Load fills the tensors' Data with their boxes and sets the values' Data.
// The layout may differ from the one that was saved in every way: world size,
// boxes, which rank has what. Load is a collective: every rank calls it, and
// all get the same checkpoint. Nothing is written to Data unless everything
// was read and verified.
func (c *Client) Load(ctx context.Context, state *State, o LoadOptions) (Loaded, error) {
	for _, t := range state.Tensors {
		if err := t.Validate(); err != nil {
			return Loaded{}, fmt.Errorf("load: %w", err)
		}
		if int64(len(t.Data)) != t.Bytes() {
			return Loaded{}, fmt.Errorf("load: tensor %q has room for %d bytes, its box %v needs %d", t.FQN, len(t.Data), t.Box, t.Bytes())
		}
	}
	var r LoadReply
	if err := c.call(ctx, "load", LoadRequest{Ref: o.Ref, Strict: o.Strict, Items: state.items()}, &r); err != nil {
		return Loaded{}, err
	}
	m, err := mapArena(r.Arena, r.Size, false)
	if err != nil {
		return Loaded{}, fmt.Errorf("load: %w", err)
	}
	i := 0
	get := func() []byte {
		data := m.data[r.Offsets[i] : r.Offsets[i]+r.Sizes[i]]
		i++
		return data
	}
	for _, t := range state.Tensors {
		copy(t.Data, get())
	}
	for j := range state.Values {
		if r.Sizes[i] < 0 {
			i++
			continue
		}
		state.Values[j].Data = append([]byte(nil), get()...)
	}
	if err := m.close(); err != nil {
		return Loaded{}, fmt.Errorf("load: %w", err)
	}
	return Loaded{r.Checkpoint, r.Step, r.Unread}, c.call(ctx, "loaded", LoadedRequest{r.Arena}, nil)
}
