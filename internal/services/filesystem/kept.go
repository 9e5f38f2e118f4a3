package filesystem

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// kept is a file of a committed checkpoint: one of its own, or an attachment.
type kept struct {
	file *data.VerbatimFile
}

func (k kept) name() string { return k.file.Name }
func (k kept) size() int64  { return k.file.Size }

// keptOpen is how many checkpoints' files are cached: indexes are read once for
// all files and ranks.
const keptOpen = 8

// opened caches them, by the digest of their manifest.
type opened struct {
	mu    sync.Mutex
	order []string
	of    map[string]*data.Verbatim
}

func (h *Handler) verbatim(ctx context.Context, c projections.Checkpoint) (*data.Verbatim, error) {
	h.opened.mu.Lock()
	defer h.opened.mu.Unlock()
	if v := h.opened.of[c.Manifest]; v != nil {
		return v, nil
	}
	digest, err := checkpoint.ParseDigest(c.Manifest)
	if err != nil {
		return nil, err
	}
	v, err := h.store.Data.Verbatim(ctx, store.RefOf(c), digest)
	if err != nil {
		return nil, err
	}
	if h.opened.of == nil {
		h.opened.of = map[string]*data.Verbatim{}
	}
	h.opened.of[c.Manifest] = v
	h.opened.order = append(h.opened.order, c.Manifest)
	if len(h.opened.order) > keptOpen {
		delete(h.opened.of, h.opened.order[0])
		h.opened.order = h.opened.order[1:]
	}
	return v, nil
}

// filesOf returns the files of the newest checkpoint of a name. A checkpoint in
// the store's own format has only its attachments.
func (h *Handler) filesOf(ctx context.Context, at target, all []projections.Checkpoint) ([]kept, error) {
	var out []kept
	var of *projections.Checkpoint
	for i := range all {
		if all[i].Name == at.name {
			of = &all[i]
		}
	}
	if of == nil {
		return nil, h.absent(ctx, at.run+"/"+dirOf(at.name), all)
	}
	v, err := h.verbatim(ctx, *of)
	if err != nil && !errors.Is(err, data.ErrNotVerbatim) {
		return nil, err
	}
	attached := map[string]bool{}
	for _, a := range of.Attachments {
		digest, err := checkpoint.ParseDigest(a.Digest)
		if err != nil {
			return nil, err
		}
		if f := h.store.Data.Attached(store.RefOf(*of), a.Name, digest, a.Size); f != nil {
			out, attached[a.Name] = append(out, kept{f}), true
		}
	}
	if v != nil {
		for _, name := range v.Names() {
			f, err := v.File(name)
			if err != nil {
				return nil, err
			}
			if !attached[name] {
				out = append(out, kept{f})
			}
		}
	}
	slices.SortFunc(out, func(a, b kept) int { return strings.Compare(a.name(), b.name()) })
	return out, nil
}

// fileOf returns the file of a single-file checkpoint.
func (h *Handler) fileOf(ctx context.Context, c projections.Checkpoint, name string) (kept, error) {
	v, err := h.verbatim(ctx, c)
	if err != nil {
		return kept{}, err
	}
	f, err := v.File(name)
	return kept{f}, err
}

// find returns the file at a path.
func (h *Handler) find(ctx context.Context, p path, all []projections.Checkpoint) (kept, target, error) {
	at, name, ok := p.file()
	if !ok {
		return kept{}, at, h.absent(ctx, p.text, all)
	}
	// A file written into a checkpoint is attached to it, so a single file of
	// that name is older.
	files, err := h.filesOf(ctx, at, all)
	for _, f := range files {
		if f.name() == name {
			return f, at, nil
		}
	}
	for _, c := range slices.Backward(all) {
		if c.IsFile() && p.is(dirOf(c.Name)) {
			f, err := h.fileOf(ctx, c, name)
			return f, at, err
		}
	}
	if err != nil {
		return kept{}, at, err
	}
	var names []string
	for _, f := range files {
		names = append(names, f.name())
	}
	return kept{}, at, missing(p.text, names...)
}
