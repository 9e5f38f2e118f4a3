package filesystem

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/foreign"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/planner"
)

// pending is an uncommitted checkpoint under one name.
type pending struct {
	mu    sync.Mutex // held by a commit
	files *data.Pending
	// Guarded by the handler's mu:
	used  time.Time // time of the last file creation
	begun int       // files being created
}

// patience is how long a stopping agent waits for the rest of a save.
const patience = time.Minute

func (p *pending) remove(ctx context.Context) error {
	return p.files.Remove(context.WithoutCancel(ctx))
}

// whole is a checkpoint with all its files.
type whole struct {
	to   target
	step int64
	from *data.Sealed
}

// pendingOf returns the pending save of a name, or nil.
func (h *Handler) pendingOf(to target) *pending {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.pending[to]
}

// begin returns the pending save of a name, and opens it if necessary. The save
// stays at least until began is called.
func (h *Handler) begin(ctx context.Context, to target) (*pending, error) {
	h.mu.Lock()
	p := h.pending[to]
	if p != nil {
		p.used = time.Now()
		p.begun++
	}
	h.mu.Unlock()
	if p != nil {
		return p, nil
	}
	files, err := h.store.Data.NewPending(ctx)
	if err != nil {
		return nil, err
	}
	mine := &pending{files: files, used: time.Now(), begun: 1}
	h.mu.Lock()
	p = h.pending[to]
	switch {
	case p != nil:
		p.begun++
	case !h.closed:
		h.pending[to], p = mine, mine
	}
	h.mu.Unlock()
	if p != mine {
		err = mine.remove(ctx)
	}
	if p == nil {
		err = errors.Join(conflict("the trainer or agent is ending"), err)
	}
	return p, err
}

// began ends a begin.
func (h *Handler) began(p *pending) {
	h.mu.Lock()
	defer h.mu.Unlock()
	p.begun--
}

// place creates the file of a stream in its place.
func (h *Handler) place(ctx context.Context, s *stream) (err error) {
	if !isData(s.name) {
		if s.own, err = h.store.Data.NewPending(ctx); err != nil {
			return err
		}
		if s.file, err = s.own.Create(ctx, s.name); err != nil {
			return errors.Join(named(err), s.own.Remove(context.WithoutCancel(ctx)))
		}
		return nil
	}
	p, err := h.begin(ctx, s.to)
	if err != nil {
		return err
	}
	defer h.began(p)
	s.file, err = p.files.Create(ctx, s.name)
	return named(err)
}

// isData reports whether a file is DCP's own, which begins another checkpoint.
func isData(name string) bool {
	return strings.HasSuffix(name, dataSuffix) || strings.HasSuffix(strings.TrimSuffix(name, tempSuffix), metadataFile)
}

// named marks a name that the store cannot keep as the caller's fault.
func named(err error) error {
	if bad := (*checkpoint.NameError)(nil); errors.As(err, &bad) {
		return refused("%w", err)
	}
	return err
}

type renameRequest struct {
	From string `json:"from"`
	To   string `json:"to"`
}

type renameReply struct {
	Checkpoint string            `json:"checkpoint,omitempty"` // that was committed
	TextKeys   map[string]string `json:"text_keys,omitempty"`  // see textKeys
}

// rename renames a pending file; renaming to .metadata is the commit.
func (h *Handler) rename(ctx context.Context, in renameRequest) (renameReply, error) {
	if up := h.upstream(ctx); up != nil {
		return pass[renameReply](ctx, up, "rename", in)
	}
	from, err := parse(in.From)
	if err != nil {
		return renameReply{}, err
	}
	to, err := parse(in.To)
	if err != nil {
		return renameReply{}, err
	}
	of, old, err := from.written()
	if err != nil {
		return renameReply{}, err
	}
	at, name, err := to.written()
	if err != nil {
		return renameReply{}, err
	}
	if of != at {
		return renameReply{}, refused("rename %s to %s: files do not move between checkpoints", in.From, in.To)
	}
	p := h.pendingOf(of)
	if p == nil || p.files.File(old) == nil {
		return renameReply{}, missing(from.text)
	}
	if strings.HasSuffix(name, metadataFile) && name != metadataFile {
		return renameReply{}, refused("%s is the metadata of one rank alone: save with a process group, or with no_dist=True, so that one .metadata describes the checkpoint", in.To)
	}
	if f := p.files.File(old); !f.Whole() {
		return renameReply{}, conflict("rename %s: the file is not closed, or could not be written: %w", in.From, errors.Join(f.Err(), errors.New("close it first")))
	}
	if name != metadataFile {
		if err := p.files.Rename(old, name); err != nil {
			return renameReply{}, named(err)
		}
		return h.renamedAlone(ctx, of, p, name)
	}
	return h.commit(ctx, of, p, old)
}

// commitTimeout bounds a commit, in which all data is on the disk already.
const commitTimeout = 10 * time.Minute

// commit commits a pending save. After an error it is still pending.
func (h *Handler) commit(ctx context.Context, to target, p *pending, metadata string) (done renameReply, err error) {
	// Not ctx: if the caller is gone, the commit must still succeed or fail as a
	// whole.
	work, cancel := context.WithTimeout(context.WithoutCancel(ctx), commitTimeout)
	defer cancel()
	p.mu.Lock()
	defer p.mu.Unlock()
	if h.pendingOf(to) != p {
		return done, conflict("%s%s/%s was committed or removed meanwhile", scheme, to.run, dirOf(to.name))
	}
	if err := p.files.Rename(metadata, metadataFile); err != nil {
		return done, named(err)
	}
	done, err = h.commitFiles(work, to, p)
	if err != nil {
		if back := p.files.Rename(metadataFile, metadata); back != nil {
			err = errors.Join(err, back)
		}
		return renameReply{}, fmt.Errorf("commit %s%s/%s: %w", scheme, to.run, dirOf(to.name), err)
	}
	h.mu.Lock()
	if h.pending[to] == p {
		delete(h.pending, to)
	}
	h.mu.Unlock()
	if err := p.remove(work); err != nil {
		h.log.Warn("copies of a committed save's files not removed", "checkpoint", done.Checkpoint, "error", err)
	}
	if err := h.gather(work, to); err != nil {
		h.log.Warn("earlier files not attached to the checkpoint", "checkpoint", done.Checkpoint, "error", err)
	}
	return done, nil
}

func (h *Handler) commitFiles(ctx context.Context, to target, p *pending) (done renameReply, err error) {
	from, err := foreign.Open(ctx, p.files.Files(), p.files.Path())
	if err != nil {
		return done, conflict("%w", err)
	}
	for _, name := range p.files.Names() {
		if f := p.files.File(name); f != nil && !f.Whole() && !strings.HasSuffix(name, ".tmp") {
			return done, conflict("%s is not closed, or could not be written", name)
		}
	}
	if err := covered(from); err != nil {
		return done, conflict("%w", err)
	}
	sealed, err := p.files.Seal(ctx, from, p.files.Names()...)
	if err != nil {
		return done, err
	}
	id, err := h.keep(ctx, to, sealed)
	return renameReply{Checkpoint: id, TextKeys: textKeys(from.Manifest().Layout)}, err
}

// keep commits sealed files, as the attempt of the requesting rank, or as a job
// of its own.
func (h *Handler) keep(ctx context.Context, to target, sealed *data.Sealed) (string, error) {
	step, err := h.stepOf(ctx, to)
	if err != nil {
		return "", err
	}
	if c, ok := session.CallerOf(ctx); ok && c.Run == to.run {
		return c.Save(ctx, to.name, step, sealed)
	}
	return h.job(ctx, whole{to, step, sealed})
}

// covered refuses chunks that overlap, and tensors with holes.
func covered(f *data.Foreign) error {
	var locals []checkpoint.Local
	for _, r := range f.Manifest().Ranks {
		locals = append(locals, checkpoint.Local{Rank: r.Rank, Items: f.Items(r.Rank)})
	}
	offers := planner.Dedup(locals)
	if err := offers.Overlaps(offers.Layout()); err != nil {
		return err
	}
	if holes := planner.Holes(f.Manifest().Layout); len(holes) > 0 {
		return holes[0]
	}
	return nil
}

func (h *Handler) stepOf(ctx context.Context, to target) (int64, error) {
	before := int64(0)
	all, err := h.line(ctx, to.run)
	if err != nil {
		return 0, err
	}
	for _, c := range all {
		before = max(before, c.Step)
	}
	return stepOf(to.name, before), nil
}
