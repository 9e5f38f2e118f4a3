package filesystem

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/web"
)

// line are the committed checkpoints of the run's line, the oldest first.
func (h *Handler) line(ctx context.Context, run string) ([]projections.Checkpoint, error) {
	all, err := web.Ask(ctx, h.store.Views(), web.Checkpoints, web.Params{Run: run})
	if errors.Is(err, projections.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	all = slices.DeleteFunc(all, func(c projections.Checkpoint) bool {
		return !c.Visible() || c.Run != run || c.Trial != projections.DefaultTrial
	})
	slices.SortStableFunc(all, func(a, b projections.Checkpoint) int {
		return int(min(max(int64(a.CommittedSeq)-int64(b.CommittedSeq), -1), 1))
	})
	return all, nil
}

// committed is the newest checkpoint of a name.
func (h *Handler) committed(ctx context.Context, to target) (c projections.Checkpoint, found bool, err error) {
	all, err := h.line(ctx, to.run)
	for _, one := range all {
		if one.Name == to.name {
			c, found = one, true
		}
	}
	return c, found, err
}

// node is what a path leads to.
type node struct {
	Name  string `json:"name"` // the path
	Type  string `json:"type"` // "directory" or "file"
	Size  int64  `json:"size"` // in bytes
	Step  int64  `json:"step,omitempty"`
	ID    string `json:"checkpoint,omitempty"` // of a checkpoint's directory
	Since string `json:"created,omitempty"`    // when that was committed
}

const (
	aFile      = "file"
	aDirectory = "directory"
)

type pathRequest struct {
	Path string `json:"path"`
}

// stat is what a path leads to; 404 if to nothing.
func (h *Handler) stat(ctx context.Context, in pathRequest) (node, error) {
	p, err := parse(in.Path)
	if err != nil {
		return node{}, err
	}
	all, err := h.line(ctx, p.run)
	if err != nil {
		return node{}, err
	}
	if dir, ok := directory(p, all); ok {
		return dir, nil
	}
	f, _, err := h.find(ctx, p, all)
	if err != nil {
		return node{}, err
	}
	return node{Name: p.text, Type: aFile, Size: f.size()}, nil
}

// directory is the path as a run, a part or a checkpoint.
func directory(p path, all []projections.Checkpoint) (node, bool) {
	out, found := node{Name: p.text, Type: aDirectory}, false
	at, isCheckpoint := p.checkpoint()
	for _, c := range all {
		switch {
		case isCheckpoint && c.Name == at.name:
			return directoryOf(p.text, c), true
		case len(p.parts) == 0, len(p.parts) == 1 && strings.HasPrefix(c.Name, p.parts[0]+partMark):
			found = true
		}
	}
	return out, found
}

func directoryOf(text string, c projections.Checkpoint) node {
	return node{Name: text, Type: aDirectory, Step: c.Step, ID: c.ID}
}

type listReply struct {
	Entries []node `json:"entries"`
}

// list is what lies directly below a path; a file is its own entry.
func (h *Handler) list(ctx context.Context, in pathRequest) (listReply, error) {
	p, err := parse(in.Path)
	if err != nil {
		return listReply{}, err
	}
	all, err := h.line(ctx, p.run)
	if err != nil {
		return listReply{}, err
	}
	dir, ok := directory(p, all)
	if !ok {
		f, _, err := h.find(ctx, p, all)
		if err != nil {
			return listReply{}, err
		}
		return listReply{[]node{{Name: p.text, Type: aFile, Size: f.size()}}}, nil
	}
	if dir.ID != "" {
		at, _ := p.checkpoint()
		files, err := h.filesOf(ctx, at, all)
		if err != nil {
			return listReply{}, err
		}
		out := listReply{Entries: []node{}}
		for _, f := range files {
			out.Entries = append(out.Entries, node{Name: p.text + "/" + f.name(), Type: aFile, Size: f.size()})
		}
		return out, nil
	}
	below := map[string]node{}
	for _, c := range all {
		name := dirOf(c.Name)
		if len(p.parts) == 1 {
			var inside bool
			if name, inside = strings.CutPrefix(name, p.parts[0]+"/"); !inside {
				continue
			}
		}
		part, rest, deeper := strings.Cut(name, "/")
		at := p.text + "/" + part
		if deeper && rest != "" {
			if _, there := below[at]; !there {
				below[at] = node{Name: at, Type: aDirectory}
			}
			continue
		}
		below[at] = directoryOf(at, c)
	}
	out := listReply{Entries: []node{}}
	for _, one := range below {
		out.Entries = append(out.Entries, one)
	}
	slices.SortFunc(out.Entries, func(a, b node) int { return strings.Compare(a.Name, b.Name) })
	return out, nil
}

type removeRequest struct {
	Path      string `json:"path"`
	Recursive bool   `json:"recursive"`
}

// remove supersedes a checkpoint, or gives up a file that is pending. The files
// of a committed checkpoint are never removed by themselves; .metadata, of which
// a successor is pending, stays until that takes its place.
func (h *Handler) remove(ctx context.Context, in removeRequest) (empty, error) {
	p, err := parse(in.Path)
	if err != nil {
		return empty{}, err
	}
	if to, name, ok := p.file(); ok {
		if open := h.pendingOf(to); open != nil {
			if name == metadataFile && open.files.File(metadataTemp) != nil {
				return empty{}, nil
			}
			if open.files.File(name) != nil {
				return empty{}, open.files.Discard(ctx, name)
			}
		}
	}
	all, err := h.line(ctx, p.run)
	if err != nil {
		return empty{}, err
	}
	if _, ok := directory(p, all); ok {
		if !in.Recursive {
			return empty{}, refused("remove %s%s: it is a directory: remove it with recursive=True, which supersedes its checkpoints", scheme, p.text)
		}
		return empty{}, h.supersede(ctx, p, all)
	}
	if at, ok := p.checkpoint(); ok && in.Recursive {
		if open := h.pendingOf(at); open != nil {
			return empty{}, h.giveUp(ctx, at, open)
		}
	}
	if _, _, err := h.find(ctx, p, all); err != nil {
		return empty{}, err
	}
	return empty{}, conflict("remove %s%s: the files of a committed checkpoint stay together: remove its directory with recursive=True", scheme, p.text)
}

// supersede takes every checkpoint at and below a path out of the line.
func (h *Handler) supersede(ctx context.Context, p path, all []projections.Checkpoint) error {
	at, isCheckpoint := p.checkpoint()
	for _, c := range all {
		inside := len(p.parts) == 0 || len(p.parts) == 1 && strings.HasPrefix(c.Name, p.parts[0]+partMark)
		if !inside && !(isCheckpoint && c.Name == at.name) {
			continue
		}
		if err := h.store.Supersede(ctx, c, "removed as "+scheme+p.text); err != nil {
			return fmt.Errorf("remove %s%s: %w", scheme, p.text, err)
		}
	}
	return nil
}

// giveUp ends what is pending under a name.
func (h *Handler) giveUp(ctx context.Context, at target, p *pending) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	h.mu.Lock()
	mine := h.pending[at] == p
	if mine {
		delete(h.pending, at)
	}
	h.mu.Unlock()
	if !mine {
		return nil
	}
	return p.remove(ctx)
}
