package filesystem

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/storage"
	"github.com/ckptstore/ckptstore/storage/foreign"
	"github.com/ckptstore/ckptstore/store"
)

// A file that is closed where no save of DCP is pending is a checkpoint of its own,
// as torch.save into a URL writes one: RUN/NAME/FILE is the checkpoint NAME~~FILE.
// Whoever writes the file again makes a newer one. When .metadata follows in the same
// directory, such files become attachments of the checkpoint that it makes.

// unfinished reports whether a name says that the file will get another one.
func unfinished(name string) bool {
	return strings.HasSuffix(name, tempSuffix) || strings.HasSuffix(name, ".part") || strings.HasSuffix(name, ".partial")
}

// closedAlone commits the file of a stream that was closed, if it is a checkpoint of
// its own.
func (h *Handler) closedAlone(ctx context.Context, s *stream) (id string, err error) {
	p := h.pendingOf(s.to)
	if p == nil || p.files.File(s.name) != s.file {
		return "", storage.ErrReplaced
	}
	return h.commitAlone(ctx, s.to, p, s.name)
}

// commitAlone makes one whole file of what is pending a checkpoint, unless it belongs
// to a save that is pending, or will get another name. After an error it is given up.
func (h *Handler) commitAlone(ctx context.Context, dir target, p *pending, name string) (id string, err error) {
	if isData(name) || unfinished(name) {
		return "", nil
	}
	// Not ctx: as in commit.
	work, cancel := context.WithTimeout(context.WithoutCancel(ctx), commitTimeout)
	defer cancel()
	p.mu.Lock()
	defer p.mu.Unlock()
	if slices.ContainsFunc(p.files.Names(), isData) {
		return "", nil
	}
	to := dir.alone(name)
	id, err = h.keepAlone(work, to, p, name)
	if err != nil {
		err = fmt.Errorf("commit %s%s/%s: %w", scheme, to.run, dirOf(to.name), err)
	}
	if gone := p.files.Discard(work, name); gone != nil {
		h.log.Warn("a file stays on disk beside its checkpoint", "checkpoint", id, "error", gone)
	}
	return id, errors.Join(err, h.emptied(work, dir, p))
}

func (h *Handler) keepAlone(ctx context.Context, to target, p *pending, name string) (string, error) {
	if err := planner.ValidName(to.name); err != nil {
		return "", refused("%w: give the file, or its directory, another name", err)
	}
	from, err := foreign.File(ctx, p.files.Files(), p.files.Path()+"/"+name)
	if err != nil {
		return "", err
	}
	sealed, err := p.files.Seal(ctx, from)
	if err != nil {
		return "", named(err)
	}
	return h.keep(ctx, to, sealed)
}

// emptied forgets what is pending under a name once it has no file; under p.mu.
func (h *Handler) emptied(ctx context.Context, to target, p *pending) error {
	if len(p.files.Names()) > 0 {
		return nil
	}
	h.mu.Lock()
	mine := h.pending[to] == p && p.begun == 0 && len(p.files.Names()) == 0
	if mine {
		delete(h.pending, to)
	}
	h.mu.Unlock()
	if !mine {
		return nil
	}
	return p.remove(ctx)
}

// gather attaches the files that were checkpoints of their own to the one that their
// directory is now.
func (h *Handler) gather(ctx context.Context, to target) error {
	all, err := h.line(ctx, to.run)
	if err != nil {
		return err
	}
	var of projections.Checkpoint
	newest := map[string]projections.Checkpoint{} // by the name of the file
	for _, c := range all {
		switch dir, file, alone := planner.SplitFile(c.Name); {
		case c.Name == to.name:
			of = c
		case alone && dir == to.name:
			newest[file] = c
		}
	}
	if of.ID == "" || len(newest) == 0 {
		return nil
	}
	var problems []error
	for name, c := range newest {
		problems = append(problems, h.attachAlone(ctx, of, c, name))
	}
	if err := errors.Join(problems...); err != nil {
		return err
	}
	var old []projections.Checkpoint
	for _, c := range all {
		if dir, _, alone := planner.SplitFile(c.Name); alone && dir == to.name {
			old = append(old, c)
		}
	}
	_, err = h.store.Withdraw(ctx, old, "attached to "+of.ID)
	return err
}

// attachAlone attaches a file that is a checkpoint to another one, unless that has a
// file of the name.
func (h *Handler) attachAlone(ctx context.Context, to, from projections.Checkpoint, name string) error {
	v, err := h.verbatim(ctx, to)
	if err != nil && !errors.Is(err, storage.ErrNotVerbatim) {
		return err
	}
	if v != nil && slices.Contains(v.Names(), name) {
		return nil
	}
	held, err := h.fileOf(ctx, from, name)
	if err != nil {
		return err
	}
	digest, err := h.store.Data.AttachKept(ctx, store.RefOf(to), held.file)
	if err != nil {
		return err
	}
	return h.store.Attached(ctx, to, name, digest, held.size())
}
