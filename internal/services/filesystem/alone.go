package filesystem

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/foreign"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/projections"
)

// A file that is closed without a pending save of DCP is a checkpoint of its own,
// as when torch.save writes to a URL: RUN/NAME/FILE is the checkpoint NAME~~FILE.
// Writing the file again makes a newer checkpoint. When .metadata follows in the
// same directory, such files become attachments of its checkpoint.

// unfinished reports whether a file has a temporary name.
func unfinished(name string) bool {
	return strings.HasSuffix(name, tempSuffix) || strings.HasSuffix(name, ".part") || strings.HasSuffix(name, ".partial")
}

// closedAlone keeps the file of a closed stream: as a checkpoint of its own, as
// an attachment of its directory's checkpoint, or as a part of a pending save.
func (h *Handler) closedAlone(ctx context.Context, s *stream) (closeReply, error) {
	// Not ctx: as in commit.
	work, cancel := context.WithTimeout(context.WithoutCancel(ctx), commitTimeout)
	defer cancel()
	for {
		if p := h.pendingOf(s.to); !unfinished(s.name) && (p == nil || !p.hasData()) {
			id, err := h.keepAlone(work, s.to, s.own, s.name)
			return closeReply{Checkpoint: id}, err
		}
		if done, err := h.adopt(work, s); done || err != nil {
			return closeReply{Pending: true}, err
		}
	}
}

// adopt adds the file of a stream to the pending save. It returns false if that
// was committed or abandoned meanwhile.
func (h *Handler) adopt(ctx context.Context, s *stream) (done bool, err error) {
	p, err := h.begin(ctx, s.to)
	if err != nil {
		return false, err
	}
	defer h.began(p)
	p.mu.Lock() // a commit takes all files that exist when it begins
	defer p.mu.Unlock()
	if h.pendingOf(s.to) != p {
		return false, nil
	}
	return true, p.files.Adopt(ctx, s.own, s.name)
}

// hasData reports whether a save of DCP is pending.
func (p *pending) hasData() bool { return slices.ContainsFunc(p.files.Names(), isData) }

// renamedAlone does the same for a pending file that now has its final name.
func (h *Handler) renamedAlone(ctx context.Context, dir target, p *pending, name string) (renameReply, error) {
	if isData(name) || unfinished(name) {
		return renameReply{}, nil
	}
	work, cancel := context.WithTimeout(context.WithoutCancel(ctx), commitTimeout)
	defer cancel()
	p.mu.Lock()
	defer p.mu.Unlock()
	f := p.files.File(name)
	if p.hasData() || f == nil {
		return renameReply{}, nil
	}
	own := p.files.Detach(name, f)
	if own == nil {
		return renameReply{}, conflict("%s%s/%s/%s was created again meanwhile", scheme, dir.run, dirOf(dir.name), name)
	}
	id, err := h.keepAlone(work, dir, own, name)
	if gone := own.Discard(work, name); gone != nil {
		h.log.Warn("copy of a committed file not removed", "checkpoint", id, "error", gone)
	}
	return renameReply{Checkpoint: id}, errors.Join(err, h.emptied(work, dir, p))
}

// keepAlone attaches a complete file to the checkpoint of its directory, or else
// makes the file a checkpoint. It returns the checkpoint's ID.
func (h *Handler) keepAlone(ctx context.Context, dir target, own *data.Pending, name string) (id string, err error) {
	c, found, err := h.committed(ctx, dir)
	if err != nil {
		return "", err
	}
	if found {
		digest, size, err := h.store.Data.Attach(ctx, store.RefOf(c), own, name)
		if err == nil {
			err = h.store.Attached(ctx, c, name, digest, size)
		}
		return c.ID, err
	}
	to := dir.alone(name)
	if strings.Contains(name, partMark) {
		return "", refused("commit %s%s/%s: a single file has no ~ in its name, since %s separates it from the directory in the checkpoint's name: give it another name", scheme, to.run, dirOf(to.name), projections.FileMark)
	}
	if err := planner.ValidName(to.name); err != nil {
		return "", refused("commit %s%s/%s: %w: give the file, or its directory, another name", scheme, to.run, dirOf(to.name), err)
	}
	from, err := foreign.File(ctx, own.Files(), own.Path()+"/"+name)
	if err != nil {
		return "", err
	}
	sealed, err := own.Seal(ctx, from)
	if err == nil {
		id, err = h.keep(ctx, to, sealed)
	}
	if err != nil {
		err = fmt.Errorf("commit %s%s/%s: %w", scheme, to.run, dirOf(to.name), named(err))
	}
	return id, err
}

// emptied drops a pending save once it has no file. The caller holds p.mu.
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

// gather attaches the files that were checkpoints of their own to their
// directory's checkpoint.
func (h *Handler) gather(ctx context.Context, to target) error {
	all, err := h.line(ctx, to.run)
	if err != nil {
		return err
	}
	var of projections.Checkpoint
	newest := map[string]projections.Checkpoint{} // by file name
	for _, c := range all {
		switch dir, file, alone := projections.SplitFile(c.Name); {
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
	_, err = h.store.Withdraw(ctx, slices.Collect(maps.Values(newest)), "attached to "+of.ID)
	return err
}

// attachAlone attaches a file that is a checkpoint to another checkpoint, unless
// that has a file of the name.
func (h *Handler) attachAlone(ctx context.Context, to, from projections.Checkpoint, name string) error {
	v, err := h.verbatim(ctx, to)
	if err != nil && !errors.Is(err, data.ErrNotVerbatim) {
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
