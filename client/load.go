package client

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
)

// LoadOptions are optional.
type LoadOptions struct {
	Ref    string // run@name or a full ID; default: what the trainer says to resume from
	Strict bool   // keys of the checkpoint that no rank asks for are an error
	// Partial leaves the Data of keys that the checkpoint lacks as they are,
	// and lists them, where a load otherwise is an error that lists them.
	Partial bool
	// StrictDType makes it an error when a tensor's dtype is not the saved
	// one. Without it, elements are converted as PyTorch's copy_ does, unless
	// that would lose more than precision and range.
	StrictDType bool
	// SameKind makes it an error when floats would lose their fractions to integers.
	SameKind bool
	// Participants are the ranks that load, the same on each of them; default all.
	Participants []int
}

// Loaded says what a load found.
type Loaded struct {
	Checkpoint string // full ID
	Step       int64
	Unread     []string // keys of the checkpoint that no rank asked for
	Absent     []string // keys that a partial load, or one of optional values, has left out
}

// Load fills the tensors' Data with their boxes and sets the values' Data.
// The layout may differ from the one that was saved in every way: world size,
// boxes, which rank has what. Load is a collective: every rank calls it, or
// every participant, and all get the same checkpoint. Nothing is written to Data unless everything
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
	req := LoadRequest{Ref: o.Ref, Strict: o.Strict, Partial: o.Partial, StrictDType: o.StrictDType, SameKind: o.SameKind, Participants: o.Participants, Items: state.items()}
	if err := c.call(ctx, "load", req, &r); err != nil {
		return Loaded{}, err
	}
	if err := r.fits(state); err != nil {
		return Loaded{}, err
	}
	from, err := r.open()
	if err != nil {
		return Loaded{}, fmt.Errorf("load: %w", err)
	}
	defer from.close()
	var absent []string
	for i, t := range state.Tensors {
		if r.Sizes[i] < 0 {
			absent = append(absent, t.FQN)
			continue
		}
		if err := from.read(t.Data, r.In[i], r.Offsets[i]); err != nil {
			return Loaded{}, fmt.Errorf("load %q: %w", t.FQN, err)
		}
	}
	for j, v := range state.Values {
		i := len(state.Tensors) + j
		if r.Sizes[i] < 0 {
			absent = append(absent, v.FQN)
			continue
		}
		data := make([]byte, r.Sizes[i])
		if err := from.read(data, r.In[i], r.Offsets[i]); err != nil {
			return Loaded{}, fmt.Errorf("load %q: %w", v.FQN, err)
		}
		state.Values[j].Data = data
	}
	return Loaded{r.Checkpoint, r.Step, r.Unread, absent}, c.call(ctx, "loaded", LoadedRequest{Load: r.Load}, nil)
}

// fits checks that a reply says of every item where it lies, and has as many
// bytes of each tensor as there is room for.
func (r LoadReply) fits(state *State) error {
	names := make([]string, 0, len(state.Tensors)+len(state.Values))
	for _, t := range state.Tensors {
		names = append(names, t.FQN)
	}
	for _, v := range state.Values {
		names = append(names, v.FQN)
	}
	if len(r.Offsets) != len(names) || len(r.Sizes) != len(names) || len(r.In) != len(names) {
		return fmt.Errorf("load: the trainer has sent %d offsets, %d sizes and the files of %d for %d items", len(r.Offsets), len(r.Sizes), len(r.In), len(names))
	}
	for i, name := range names {
		at, size := r.Offsets[i], r.Sizes[i]
		if size < 0 {
			continue // it is absent
		}
		if r.In[i] < 0 || r.In[i] >= len(r.Arenas) {
			return fmt.Errorf("load: the trainer has sent %q in file %d of %d", name, r.In[i], len(r.Arenas))
		}
		if end := r.Arenas[r.In[i]].Size; at < 0 || at > end || size > end-at {
			return fmt.Errorf("load: the trainer has sent %q as %d bytes at %d, in memory of %d bytes", name, size, at, end)
		}
		if i < len(state.Tensors) && size != int64(len(state.Tensors[i].Data)) {
			return fmt.Errorf("load: the trainer has sent %d bytes of tensor %q, its box %v needs %d", size, name, state.Tensors[i].Box, len(state.Tensors[i].Data))
		}
	}
	return nil
}

// RefuseLoad says that this rank cannot take part in the load that the other
// participants call now, and why, so that theirs fails at once.
func (c *Client) RefuseLoad(ctx context.Context, o LoadOptions, why string) error {
	var problem *Error
	err := c.call(ctx, "load", LoadRequest{Ref: o.Ref, Participants: o.Participants, Refused: why, Items: []Item{}}, &LoadReply{})
	if errors.As(err, &problem) && problem.Status == http.StatusConflict {
		return nil // it is what the others are told
	}
	return err
}

// loadFiles are the files of a load, in the order of its reply. They are read,
// not mapped: a read of memory costs as much as to map and to copy it, and one
// of memory that is not there is an error, and no signal.
type loadFiles []*os.File

// open opens all files, and sees that they hold what they are to hold.
func (r LoadReply) open() (loadFiles, error) {
	files := make(loadFiles, len(r.Arenas))
	for i, a := range r.Arenas {
		f, err := os.Open(a.Path)
		if err != nil {
			files.close()
			return nil, fmt.Errorf("open what is loaded: %w", err)
		}
		files[i] = f
		info, err := f.Stat()
		if err == nil && info.Size() < a.Size {
			err = fmt.Errorf("%s has %d bytes, the trainer has named %d", a.Path, info.Size(), a.Size)
		}
		if err != nil {
			files.close()
			return nil, fmt.Errorf("open what is loaded: %w", err)
		}
	}
	return files, nil
}

// read fills data with what begins at a byte of a file.
func (f loadFiles) read(data []byte, file int, at int64) error {
	if len(data) == 0 {
		return nil
	}
	if _, err := f[file].ReadAt(data, at); err != nil {
		return fmt.Errorf("read what is loaded: %w", err)
	}
	return nil
}

func (f loadFiles) close() {
	for _, file := range f {
		if file != nil {
			_ = file.Close() // it was only read
		}
	}
}
