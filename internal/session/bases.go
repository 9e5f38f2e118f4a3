package session

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/data/reuse"
	"github.com/ckptstore/ckptstore/internal/session/restore"
	"github.com/ckptstore/ckptstore/projections"
)

// basesTimeout bounds the lookup of reusable checkpoints. A save whose lookup
// times out writes everything.
const basesTimeout = 10 * time.Second

// bases are the checkpoints whose chunks a save can reuse. All ranks of a save
// ask the same question, so the last answer is cached.
type bases struct {
	mu   sync.Mutex
	of   string // checkpoint being saved
	list []data.Base

	begun map[string]*begunBases // of open saves, by checkpoint; where files have no links
}

// begunBases are the bases of a save that the log has begun.
type begunBases struct {
	names  []events.CheckpointRef
	list   []data.Base // those that may be reused, once looked up
	looked bool
}

// begin records the bases with which the log began a save.
func (b *bases) begin(of *events.CheckpointBegun) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(of.Bases) == 0 {
		return
	}
	if b.begun == nil {
		b.begun = map[string]*begunBases{}
	}
	b.begun[of.Checkpoint] = &begunBases{names: of.Bases}
}

// end forgets the bases of a save that has ended.
func (b *bases) end(checkpoint string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.begun, checkpoint)
}

// nameOf returns the name of a checkpoint in events.
func nameOf(ref checkpoint.Ref) (name events.CheckpointRef) {
	name.Run, name.Trial, name.Checkpoint = ref.Names()
	return name
}

// named returns the bases of a save for checkpoint.begun. Where files have links there are
// none: no collection has to know them.
func (s *saver) named(ctx context.Context, checkpoint string) (names []events.CheckpointRef) {
	if s.store.Data.HasLinks() || s.whole(checkpoint) != nil {
		return nil
	}
	for _, b := range s.basesOf(ctx, checkpoint) {
		names = append(names, nameOf(b.Ref))
	}
	return names
}

// usable returns the bases that a save may reuse. Where files have no links, these are the
// bases in its checkpoint.begun, except those that were deleted before that event: a collection
// may be removing their files. The views have that event, so they have such deletions too.
// Bases that were deleted later are left out as well, although their files stay.
func (s *saver) usable(ctx context.Context, checkpoint string) []data.Base {
	if s.store.Data.HasLinks() {
		return s.basesOf(ctx, checkpoint)
	}
	s.reuse.mu.Lock()
	defer s.reuse.mu.Unlock()
	of := s.reuse.begun[checkpoint]
	if of == nil {
		return nil
	}
	if of.looked {
		return of.list
	}
	ctx, cancel := context.WithTimeout(ctx, basesTimeout)
	defer cancel()
	of.looked = true
	for _, name := range of.names {
		b, found, err := s.base(ctx, name.String())
		if err != nil {
			s.log.Warn("checkpoint not reused; all chunks are written", "save", checkpoint, "of", name, "error", err)
		}
		if found && nameOf(b.Ref) == name {
			of.list = append(of.list, b)
		}
	}
	return of.list
}

// basesOf returns the newest checkpoint of the trial's line and, if different,
// the checkpoint that the attempt resumed from. The first save of a trial looks
// further: see firstBases. The result is no longer than the number of indexes
// that storage caches; with more, every rank would read all of them again.
func (s *saver) basesOf(ctx context.Context, checkpoint string) []data.Base {
	s.reuse.mu.Lock()
	defer s.reuse.mu.Unlock()
	if s.reuse.of == checkpoint {
		return s.reuse.list
	}
	ctx, cancel := context.WithTimeout(ctx, basesTimeout)
	defer cancel()
	var list []data.Base
	add := func(ref string) {
		if len(list) == data.MostBases {
			return
		}
		b, found, err := s.base(ctx, ref)
		if err != nil {
			s.log.Warn("checkpoint not reused; all chunks are written", "save", checkpoint, "of", ref, "error", err)
		}
		if found && !slices.Contains(list, b) {
			list = append(list, b)
		}
	}
	own := s.decisions.run + "/" + s.decisions.trial + "@"
	add(own + "latest")
	first := len(list) == 0
	if s.resume != "" && !restore.IsPath(s.resume) {
		add(restore.Qualify(s.decisions.run, s.decisions.trial, s.resume))
	}
	var refs []string
	var err error
	if first {
		refs, err = s.firstBases(ctx)
	} else if s.from != "" {
		refs, err = s.importedBefore(ctx, own)
	}
	if err != nil {
		s.log.Warn("chunks of other trials not reused", "save", checkpoint, "error", err)
	}
	for _, ref := range refs {
		add(ref)
	}
	s.reuse.of, s.reuse.list = checkpoint, list
	return list
}

// firstBases returns the checkpoints with which the first save of a trial may
// share chunks: the checkpoint it was forked from, in any run, and the newest
// checkpoints of the run's other trials, which may share frozen weights. Once the
// trial has a checkpoint of its own, that checkpoint covers them.
func (s *saver) firstBases(ctx context.Context) (refs []string, err error) {
	trials, err := s.store.Views.Trials(ctx, s.decisions.run)
	if err != nil {
		return nil, err
	}
	for _, t := range trials {
		if p := t.Parent; t.Name == s.decisions.trial && p != nil {
			refs = append(refs, p.Run+"/"+p.Trial+"@"+p.Checkpoint)
		}
	}
	slices.SortFunc(trials, func(a, b projections.Trial) int { return cmp.Compare(b.HeadSeq, a.HeadSeq) })
	for _, t := range trials {
		if t.Name != s.decisions.trial && t.Head != "" {
			refs = append(refs, t.Run+"/"+t.Name+"@"+t.Head)
		}
	}
	return refs[:min(len(refs), data.MostBases)], nil
}

// importedFrom separates the checkpoint's ID from the path in the final message
// of an importing attempt.
const importedFrom = " was imported from "

// importedBefore returns the trial's newest checkpoint that was imported from the
// same path.
func (s *saver) importedBefore(ctx context.Context, own string) ([]string, error) {
	attempts, err := s.store.Views.Attempts(ctx, s.decisions.run, s.decisions.trial)
	if err != nil {
		return nil, err
	}
	for _, a := range slices.Backward(attempts) {
		if id, ok := strings.CutSuffix(a.Reason, importedFrom+s.from); ok && a.Backend == ImportBackend {
			return []string{own + id}, nil
		}
	}
	return nil, nil
}

// share makes the ranks of a save decide together what they reuse.
func (s *saver) share(b *events.CheckpointBegun) {
	if !s.together || b.Attempt != s.decisions.attempt {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	own := slices.DeleteFunc(slices.Clone(b.All()), func(rank int) bool { return !s.serves(rank) })
	s.uses[b.Checkpoint] = reuse.NewUses(own, func() { <-s.permits }, func() { s.permits <- struct{}{} })
}

func (s *saver) usesOf(checkpoint string) *reuse.Uses {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.uses[checkpoint]
}

func (s *saver) base(ctx context.Context, ref string) (b data.Base, found bool, err error) {
	c, err := s.store.Views.Resolve(ctx, ref)
	if errors.Is(err, projections.ErrNotFound) { // another process's answer counts too
		return b, false, nil
	}
	if err != nil || c.State != projections.Committed {
		return b, false, err
	}
	digest, err := checkpoint.ParseDigest(c.Manifest)
	return data.Base{Ref: checkpoint.RefOf(c.Run, c.Trial, c.ID), Manifest: digest}, err == nil, err
}

// reusing returns a writer that writes only the new chunks of a checkpoint.
func (s *saver) reusing(ctx context.Context, checkpoint string) *data.FileWriter {
	warn := func(err error) {
		s.log.Info("chunks written again; their base is not reused", "save", checkpoint, "reason", err)
	}
	return s.store.Data.Writer(s.ref(checkpoint)).Reusing(warn, s.usable(ctx, checkpoint)...)
}
