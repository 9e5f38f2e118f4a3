package projections

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/events"
)

// checkpoint returns the row of an ID in the event's trial.
func (f *fold) checkpoint(id string) (Checkpoint, bool, error) {
	return checkpointByID(f.t, f.run, f.name, id)
}

func (f *fold) put(c Checkpoint) error {
	return store(f.t, checkpointKey(f.run, f.name, c.BegunSeq), c)
}

// change changes an existing checkpoint. A decision about a missing checkpoint changes
// nothing.
func (f *fold) change(id string, change func(*Checkpoint)) error {
	c, found, err := f.checkpoint(id)
	if err != nil || !found {
		return err
	}
	change(&c)
	return f.put(c)
}

// begun opens a checkpoint. Its ranks may have sealed before: a steady save copies
// first and reports later.
func (f *fold) begun(b *events.CheckpointBegun) error {
	if _, found, err := f.checkpoint(b.Checkpoint); err != nil || found {
		return err
	}
	c := Checkpoint{
		ID: b.Checkpoint, Name: b.Name, Step: b.Step, Attempt: b.Attempt,
		WorldSize: b.WorldSize, Participants: b.Participants,
	}
	writes, err := Writes(f.t, f.run, f.name, b.Checkpoint)
	if err != nil {
		return err
	}
	for _, w := range writes {
		c.count(Write{}, w)
	}
	if c.Trained, err = f.saveBegins(c.Attempt); err != nil {
		return err
	}
	return f.open(&c)
}

// open stores a new checkpoint and its index rows.
func (f *fold) open(c *Checkpoint) error {
	c.Run, c.Trial, c.State, c.BegunSeq, c.BegunAt = f.run, f.name, Open, f.r.Sequence, f.at()
	c.BegunStored = f.r.Stored.UTC()
	if err := store(f.t, idKey(f.run, f.name, c.ID), c.BegunSeq); err != nil {
		return err
	}
	if err := store(f.t, openKey(f.run, f.name, c.BegunSeq), true); err != nil {
		return err
	}
	return f.put(*c)
}

// close stores a checkpoint that is no longer in progress.
func (f *fold) close(c Checkpoint) error {
	if err := f.t.Delete(openKey(f.run, f.name, c.BegunSeq)); err != nil {
		return err
	}
	return f.put(c)
}

func (f *fold) staged(b *events.CheckpointStaged) error {
	return f.change(b.Checkpoint, func(c *Checkpoint) {
		if c.State == Open {
			c.State, c.StagedStored = Staged, f.r.Stored.UTC()
		}
	})
}

// writing folds a fact about parts of a checkpoint.
func (f *fold) writing(body events.Body) error {
	switch b := body.(type) {
	case *events.WriteSealed:
		return f.wrote(b.Checkpoint, b.Attempt, rankWrite{b.Rank, func(w *Write) bool { return w.seal(b, f.r) }})
	case *events.WriteCompleted:
		return f.wrote(b.Checkpoint, b.Attempt, rankWrite{b.Rank, func(w *Write) bool { return w.complete(b, f.r) }})
	case *events.WriteFailed:
		return f.wrote(b.Checkpoint, b.Attempt, rankWrite{b.Rank, func(w *Write) bool { return w.fail(b, f.r) }})
	case *events.NodeSeal:
		var each []rankWrite
		for of := range b.Each() {
			each = append(each, rankWrite{of.Rank, func(w *Write) bool { return w.seal(of, f.r) }})
		}
		return f.wrote(b.Checkpoint, b.Attempt, each...)
	case *events.NodeWrite:
		var each []rankWrite
		for of := range b.Each() {
			each = append(each, rankWrite{of.Rank, func(w *Write) bool { return w.complete(of, f.r) }})
		}
		return f.wrote(b.Checkpoint, b.Attempt, each...)
	}
	return nil
}

// rankWrite changes one rank's part, and reports whether it did.
type rankWrite struct {
	rank  int
	apply func(*Write) bool
}

// wrote folds changes of ranks' parts of a checkpoint. The numbers of a committed or
// aborted checkpoint no longer change.
func (f *fold) wrote(id string, attempt int, each ...rankWrite) error {
	c, begun, err := f.checkpoint(id)
	if err != nil || begun && !c.inProgress() {
		return err
	}
	if !begun {
		// A later attempt can no longer begin it.
		trial, _, err := load[Trial](f.t, trialKey(f.run, f.name))
		if err != nil || attempt < trial.Attempt {
			return err
		}
	}
	counted := false
	for _, part := range each {
		k := writeKey(f.run, f.name, id, part.rank)
		before, _, err := load[Write](f.t, k)
		if err != nil {
			return err
		}
		now := before
		now.Rank = part.rank
		if !part.apply(&now) {
			continue
		}
		if err := store(f.t, k, now); err != nil {
			return err
		}
		counted = true
		c.count(before, now)
	}
	if !begun || !counted {
		return nil
	}
	return f.put(c)
}

func (f *fold) committed(b *events.CheckpointCommitted) error {
	c, found, err := f.checkpoint(b.Checkpoint)
	if err != nil {
		return err
	}
	if !found {
		// The commit alone counts, so it stands without its begin.
		name := strings.TrimSuffix(b.Checkpoint, fmt.Sprintf(".a%d", b.Attempt))
		c = Checkpoint{ID: b.Checkpoint, Name: name, Attempt: b.Attempt}
		if err := f.open(&c); err != nil {
			return err
		}
	}
	if !c.inProgress() {
		return nil
	}
	c.State, c.Manifest, c.Bytes = Committed, b.Manifest, b.Bytes
	c.CommittedSeq, c.EndedAt = f.r.Sequence, f.at()
	c.EndedStored, c.ManifestTook = f.r.Stored.UTC(), b.ManifestTook
	if c.IsFile() {
		c.Parent, c.ParentSeq = "", 0
		return f.close(c)
	}
	if err := f.extend(&c); err != nil {
		return err
	}
	if err := f.newest(c); err != nil {
		return err
	}
	if err := f.tallySaved(c); err != nil {
		return err
	}
	return f.close(c)
}

// newest records an attempt's commit, unless a checkpoint that began later was
// committed before: saves overlap.
func (f *fold) newest(c Checkpoint) error {
	a, found, err := load[Attempt](f.t, attemptKey(f.run, f.name, c.Attempt))
	if err != nil {
		return err
	}
	if found && a.Committed != "" {
		last, found, err := f.checkpoint(a.Committed)
		if err != nil || found && last.BegunSeq > c.BegunSeq {
			return err
		}
	}
	return f.changeAttempt(c.Attempt, func(a *Attempt) { a.Committed, a.CommittedSeq = c.ID, c.CommittedSeq })
}

func (f *fold) aborted(b *events.CheckpointAborted) error {
	c, found, err := f.checkpoint(b.Checkpoint)
	if err != nil || !found || !c.inProgress() {
		return err
	}
	c.State, c.Reason, c.Ranks, c.EndedAt = Aborted, b.Reason, b.Ranks, f.at()
	c.EndedStored = f.r.Stored.UTC()
	return errors.Join(f.tallyAbort(c), f.close(c))
}

func (f *fold) superseded(b *events.CheckpointSuperseded) error {
	c, found, err := f.checkpoint(b.Checkpoint)
	if err != nil || !found {
		return err
	}
	c.Superseded, c.Withdrawn, c.Reason = true, true, b.Reason
	if err := f.put(c); err != nil {
		return err
	}
	return f.retreat(c)
}

// deleted ends a checkpoint for good. Its row stays as part of the line's history; the
// rows of its ranks' writes are removed.
func (f *fold) deleted(b *events.CheckpointDeleted) error {
	c, found, err := f.checkpoint(b.Checkpoint)
	if err != nil || !found || c.State == Deleted {
		return err
	}
	if c.State == Committed {
		if err := f.unvalue(c); err != nil {
			return err
		}
	}
	c.State, c.Reason, c.DeletedSeq = Deleted, b.Reason, f.r.Sequence
	writes, err := Writes(f.t, f.run, f.name, c.ID)
	if err != nil {
		return err
	}
	for _, w := range writes {
		if err := f.t.Delete(writeKey(f.run, f.name, c.ID, w.Rank)); err != nil {
			return err
		}
	}
	for _, tag := range c.Tags {
		if err := f.t.Delete(tagKey(f.run, f.name, tag)); err != nil {
			return err
		}
	}
	c.Tags = nil
	if err := f.close(c); err != nil {
		return err
	}
	return f.retreat(c)
}

// tagged moves a tag. Within a trial a tag names one checkpoint.
func (f *fold) tagged(b *events.CheckpointTagged) error {
	c, found, err := f.checkpoint(b.Checkpoint)
	if err != nil || !found || c.State == Deleted || slices.Contains(c.Tags, b.Tag) {
		return err
	}
	k := tagKey(f.run, f.name, b.Tag)
	owner, found, err := load[uint64](f.t, k)
	if err != nil {
		return err
	}
	if found {
		old, _, err := load[Checkpoint](f.t, checkpointKey(f.run, f.name, owner))
		if err != nil {
			return err
		}
		old.Tags = slices.DeleteFunc(old.Tags, func(tag string) bool { return tag == b.Tag })
		if err := f.put(old); err != nil {
			return err
		}
	}
	c.Tags = append(c.Tags, b.Tag)
	slices.Sort(c.Tags)
	if err := store(f.t, k, c.BegunSeq); err != nil {
		return err
	}
	return f.put(c)
}

// untagged removes a tag from its checkpoint.
func (f *fold) untagged(b *events.CheckpointUntagged) error {
	c, found, err := f.checkpoint(b.Checkpoint)
	if err != nil || !found || !slices.Contains(c.Tags, b.Tag) {
		return err
	}
	c.Tags = slices.DeleteFunc(c.Tags, func(tag string) bool { return tag == b.Tag })
	if len(c.Tags) == 0 {
		c.Tags = nil
	}
	if err := f.t.Delete(tagKey(f.run, f.name, b.Tag)); err != nil {
		return err
	}
	return f.put(c)
}
