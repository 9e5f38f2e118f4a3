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
	Ref    string // run@name or a full ID; default: Context.Resume
	Strict bool   // keys of the checkpoint that no rank requests are an error
	// Partial leaves Data unchanged for keys that the checkpoint lacks and lists
	// them in Loaded.Absent. Without it, the load fails and lists them.
	Partial bool
	// StrictDType makes a dtype other than the saved one an error. Without it,
	// elements are converted as PyTorch's copy_ does, unless that would lose more
	// than precision and range.
	StrictDType bool
	// SameKind makes the conversion of floats to integers an error.
	SameKind bool
	// Participants are the ranks that load, the same on each of them; default all.
	Participants []int
}

// Loaded is the result of a load.
type Loaded struct {
	Checkpoint string // full ID
	Step       int64
	Unread     []string // keys of the checkpoint that no rank requested
	Absent     []string // keys left out because of Partial, or because the value is optional
}

// Load fills the Data of the state's tensors and values. The layout may differ
// from the saved one in every way: world size, boxes, and the assignment to ranks.
// Load is a collective: every rank, or every participant, calls it, and all get
// the same checkpoint. Data is written only after everything was read and
// verified.
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

// fits checks that a reply locates every item within its file, and that the
// size of each tensor matches its Data.
func (r LoadReply) fits(state *State) error {
	names := make([]string, 0, len(state.Tensors)+len(state.Values))
	for _, t := range state.Tensors {
		names = append(names, t.FQN)
	}
	for _, v := range state.Values {
		names = append(names, v.FQN)
	}
	if len(r.Offsets) != len(names) || len(r.Sizes) != len(names) || len(r.In) != len(names) {
		return fmt.Errorf("load: the trainer sent %d offsets, %d sizes and the files of %d for %d items", len(r.Offsets), len(r.Sizes), len(r.In), len(names))
	}
	for i, name := range names {
		at, size := r.Offsets[i], r.Sizes[i]
		if size < 0 {
			continue // absent
		}
		if r.In[i] < 0 || r.In[i] >= len(r.Arenas) {
			return fmt.Errorf("load: the trainer sent %q in file %d of %d", name, r.In[i], len(r.Arenas))
		}
		if end := r.Arenas[r.In[i]].Size; at < 0 || at > end || size > end-at {
			return fmt.Errorf("load: the trainer sent %q as %d bytes at %d, in memory of %d bytes", name, size, at, end)
		}
		if i < len(state.Tensors) && size != int64(len(state.Tensors[i].Data)) {
			return fmt.Errorf("load: the trainer sent %d bytes of tensor %q, its box %v needs %d", size, name, state.Tensors[i].Box, len(state.Tensors[i].Data))
		}
	}
	return nil
}

// RefuseLoad tells the trainer why this rank cannot take part in the load that
// the other participants are calling, so that theirs fails at once.
func (c *Client) RefuseLoad(ctx context.Context, o LoadOptions, why string) error {
	var problem *Error
	err := c.call(ctx, "load", LoadRequest{Ref: o.Ref, Participants: o.Participants, Refused: why, Items: []Item{}}, &LoadReply{})
	if errors.As(err, &problem) && problem.Status == http.StatusConflict {
		return nil // the conflict is this rank's own refusal
	}
	return err
}

// loadFiles are the files of a load, in the order of its reply. They are read,
// not mapped: a read costs as much as a mapping and a copy, and past the end of
// the file it returns an error where a mapping raises SIGBUS.
type loadFiles []*os.File

// open opens all files and checks that none is shorter than the reply states.
func (r LoadReply) open() (loadFiles, error) {
	files := make(loadFiles, len(r.Arenas))
	for i, a := range r.Arenas {
		f, err := os.Open(a.Path)
		if err != nil {
			files.close()
			return nil, fmt.Errorf("open checkpoint data: %w", err)
		}
		files[i] = f
		info, err := f.Stat()
		if err == nil && info.Size() < a.Size {
			err = fmt.Errorf("%s has %d bytes, the trainer stated %d", a.Path, info.Size(), a.Size)
		}
		if err != nil {
			files.close()
			return nil, fmt.Errorf("open checkpoint data: %w", err)
		}
	}
	return files, nil
}

// read fills data from an offset of a file.
func (f loadFiles) read(data []byte, file int, at int64) error {
	if len(data) == 0 {
		return nil
	}
	if _, err := f[file].ReadAt(data, at); err != nil {
		return fmt.Errorf("read checkpoint data: %w", err)
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
