package filesystem

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// line returns the committed checkpoints of the run's line, oldest first.
func (h *Handler) line(ctx context.Context, run string) ([]projections.Checkpoint, error) {
	all, err := query.Ask(ctx, h.store.Views(), query.Checkpoints, query.Params{Run: run})
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

// readable returns a path and the line of its run, as reads see them. A path may name a
// checkpoint by its ID, as CKPTSTORE_RESUME does: step-40.a1 or, of another run that a
// fork begins with, RUN@step-40.a1. That checkpoint then has its ID as its name. No name
// has the form of an ID: see [path.written].
func (h *Handler) readable(ctx context.Context, p path) (path, []projections.Checkpoint, error) {
	if len(p.parts) > 0 {
		if run, id, other := strings.Cut(p.parts[0], "@"); other && idForm.MatchString(id) {
			if err := store.ValidRun(run); err != nil {
				return p, nil, refused("%s%s: run %q: %w", scheme, p.text, run, err)
			}
			p.run, p.parts = run, append([]string{id}, p.parts[1:]...)
		}
	}
	all, err := h.line(ctx, p.run)
	if err != nil {
		return p, nil, err
	}
	for n := 1; n <= len(p.parts); n++ {
		id := strings.Join(p.parts[:n], partMark)
		for i := range all {
			if all[i].ID == id {
				all[i].Name = id
			}
		}
	}
	return p, all, nil
}

// committed returns the newest checkpoint of a name.
func (h *Handler) committed(ctx context.Context, to target) (c projections.Checkpoint, found bool, err error) {
	all, err := h.line(ctx, to.run)
	for _, one := range all {
		if one.Name == to.name {
			c, found = one, true
		}
	}
	return c, found, err
}

// node is the file or directory at a path.
type node struct {
	Name  string `json:"name"` // the path
	Type  string `json:"type"` // "directory" or "file"
	Size  int64  `json:"size"` // in bytes
	Step  int64  `json:"step,omitempty"`
	ID    string `json:"checkpoint,omitempty"` // of a checkpoint's directory
	Since string `json:"created,omitempty"`    // time of its commit
}

const (
	aFile      = "file"
	aDirectory = "directory"
)

type pathRequest struct {
	Path string `json:"path"`
}

// stat returns the node at a path, or 404.
func (h *Handler) stat(ctx context.Context, in pathRequest) (node, error) {
	p, err := parse(in.Path)
	if err != nil {
		return node{}, err
	}
	p, all, err := h.readable(ctx, p)
	if err != nil {
		return node{}, err
	}
	if n, ok := stands(p, all); ok && n.Type == aDirectory {
		return n, nil
	}
	f, _, err := h.find(ctx, p, all)
	if err != nil {
		return node{}, err
	}
	return node{Name: p.text, Type: aFile, Size: f.size()}, nil
}

// stands returns the path's node if it is a run, a part, a checkpoint, or the
// file of a single-file checkpoint.
func stands(p path, all []projections.Checkpoint) (out node, found bool) {
	out = node{Name: p.text, Type: aDirectory}
	for _, c := range all { // newest last
		at := dirOf(c.Name)
		if !p.holds(at) {
			continue
		}
		found = true
		if p.is(at) {
			out = nodeOf(p.text, c)
		}
	}
	return out, found
}

// nodeOf returns the node of a checkpoint at a path.
func nodeOf(text string, c projections.Checkpoint) node {
	if c.IsFile() {
		return node{Name: text, Type: aFile, Size: c.Bytes, Step: c.Step, ID: c.ID}
	}
	return node{Name: text, Type: aDirectory, Step: c.Step, ID: c.ID}
}

type listReply struct {
	Entries []node `json:"entries"`
}

// list returns the entries directly below a path; a file is its own entry.
func (h *Handler) list(ctx context.Context, in pathRequest) (listReply, error) {
	p, err := parse(in.Path)
	if err != nil {
		return listReply{}, err
	}
	p, all, err := h.readable(ctx, p)
	if err != nil {
		return listReply{}, err
	}
	top, ok := stands(p, all)
	switch {
	case !ok:
		f, _, err := h.find(ctx, p, all)
		if err != nil {
			return listReply{}, err
		}
		top = node{Name: p.text, Type: aFile, Size: f.size()}
		fallthrough
	case top.Type == aFile:
		return listReply{[]node{top}}, nil
	}
	below := map[string]node{}
	if top.ID != "" {
		at, _ := p.checkpoint()
		files, err := h.filesOf(ctx, at, all)
		if err != nil {
			return listReply{}, err
		}
		for _, f := range files {
			at := p.text + "/" + f.name()
			below[at] = node{Name: at, Type: aFile, Size: f.size()}
		}
	}
	for _, c := range all {
		at := dirOf(c.Name)
		if !p.holds(at) || p.is(at) {
			continue
		}
		name, _, deeper := strings.Cut(strings.TrimPrefix(at[len(p.below()):], "/"), "/")
		at = p.text + "/" + name
		old, there := below[at]
		switch {
		case !deeper && !(there && old.ID == ""): // a file of the directory's own checkpoint is newer
			below[at] = nodeOf(at, c)
		case !there:
			below[at] = node{Name: at, Type: aDirectory}
		}
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
	// Checkpoint is RUN@ID, instead of a path.
	Checkpoint string `json:"checkpoint"`
}

type removeReply struct {
	// Kept are the checkpoints that were removed from the line, but whose files
	// stay for now.
	Kept []keptReply `json:"kept,omitempty"`
}

type keptReply struct {
	Checkpoint string `json:"checkpoint"` // RUN@ID
	Reason     string `json:"reason"`
}

// remove deletes checkpoints, or abandons a pending file. Files of a committed
// checkpoint are not removed one by one, except that of a single-file checkpoint.
// .metadata, if its successor is pending, stays until that replaces it.
func (h *Handler) remove(ctx context.Context, in removeRequest) (removeReply, error) {
	if up := h.upstream(ctx); up != nil {
		return pass[removeReply](ctx, up, "remove", in)
	}
	if in.Checkpoint != "" {
		c, err := store.Committed(ctx, h.store.Views(), in.Checkpoint)
		if err != nil {
			return removeReply{}, err
		}
		return h.delete(ctx, []projections.Checkpoint{c}, "removed by the program")
	}
	p, err := parse(in.Path)
	if err != nil {
		return removeReply{}, err
	}
	if to, name, ok := p.file(); ok {
		if open := h.pendingOf(to); open != nil {
			if name == metadataFile && open.files.File(metadataTemp) != nil {
				return removeReply{}, nil
			}
			if open.files.File(name) != nil {
				return removeReply{}, open.files.Discard(ctx, name)
			}
		}
	}
	p, all, err := h.readable(ctx, p)
	if err != nil {
		return removeReply{}, err
	}
	if n, ok := stands(p, all); ok {
		if n.Type == aDirectory && !in.Recursive {
			return removeReply{}, refused("remove %s%s: it is a directory: remove it with recursive=True, which deletes its checkpoints", scheme, p.text)
		}
		all = slices.DeleteFunc(all, func(c projections.Checkpoint) bool {
			if n.Type == aFile {
				return !c.IsFile() || !p.is(dirOf(c.Name))
			}
			return !p.holds(dirOf(c.Name))
		})
		return h.delete(ctx, all, "removed as "+scheme+p.text)
	}
	if at, ok := p.checkpoint(); ok && in.Recursive {
		if open := h.pendingOf(at); open != nil {
			return removeReply{}, h.giveUp(ctx, at, open)
		}
	}
	if _, _, err := h.find(ctx, p, all); err != nil {
		return removeReply{}, err
	}
	return removeReply{}, conflict("remove %s%s: the files of a committed checkpoint stay together: remove its directory with recursive=True", scheme, p.text)
}

// delete deletes checkpoints of one run, except those that are held.
func (h *Handler) delete(ctx context.Context, all []projections.Checkpoint, reason string) (removeReply, error) {
	done, err := h.store.Withdraw(ctx, all, reason)
	if err != nil {
		return removeReply{}, fmt.Errorf("%s: %w", reason, err)
	}
	var out removeReply
	for _, c := range done {
		if why := c.Stays(); why != "" {
			out.Kept = append(out.Kept, keptReply{c.Run + "@" + c.ID, why})
		}
	}
	return out, nil
}

// giveUp abandons a pending save.
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

// missing returns the error of a path that does not exist. have are the names
// that exist in place of its last one.
func missing(path string, have ...string) error {
	err := fmt.Errorf("%s%s: %w", scheme, path, fs.ErrNotExist)
	if near := projections.Near(path[strings.LastIndexByte(path, '/')+1:], have); near != "" {
		err = fmt.Errorf("%w: %s", err, near)
	}
	return problem.Wrap(problem.NotFound, err)
}

// absent returns the error of a checkpoint, part or run that does not exist. all
// are the run's checkpoints.
func (h *Handler) absent(ctx context.Context, text string, all []projections.Checkpoint) error {
	var names []string
	for _, c := range slices.Backward(all) { // newest first
		if !slices.Contains(names, dirOf(c.Name)) {
			names = append(names, dirOf(c.Name))
		}
	}
	if len(names) > 0 {
		return missing(text, names...)
	}
	runs, err := query.Ask(ctx, h.store.Views(), query.Runs, query.Params{})
	if err != nil {
		return err
	}
	for _, r := range runs {
		names = append(names, r.Name)
	}
	run, _, _ := strings.Cut(text, "/")
	near := projections.Near(run, names)
	if near == "" {
		near = "the store has none yet"
	}
	return problem.Errorf(problem.NotFound, "%s%s: %w: no checkpoint is in a run %q: %s", scheme, text, fs.ErrNotExist, run, near)
}
