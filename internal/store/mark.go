package store

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/projections"
)

// ErrTag says that a name cannot be a tag.
var ErrTag = problem.New(problem.Invalid, "bad tag")

// maxTag is the length in bytes of the longest tag.
const maxTag = 128

// decideAfter appends a decision about a checkpoint if the last one of its
// trial has the sequence after. Otherwise it is [jetlog.ErrConflict].
func (s *Store) decideAfter(ctx context.Context, c projections.Checkpoint, after uint64, body events.Body) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, attachTimeout)
	defer cancel()
	d, err := events.NewDecision(Stamp("ckptstore"), events.Aggregate{Run: c.Run, Trial: c.Trial}, body)
	if err != nil {
		return 0, err
	}
	return s.Log.Decide(ctx, d, after)
}

// mark appends a decision about the committed checkpoint that a reference
// stands for at that very moment. choose gives no decision if none is needed.
func (s *Store) mark(ctx context.Context, ref string, choose func(projections.Checkpoint) (events.Body, error)) (projections.Checkpoint, error) {
	q := Queries{s.Views()}
	for range collectTries {
		first, err := q.Resolve(ctx, ref)
		if err != nil {
			return first, err
		}
		// The lane comes first: what is read after it may be newer, and then
		// the decision conflicts.
		trial, err := q.Trial(ctx, first.Run, first.Trial)
		if err != nil {
			return first, err
		}
		c, err := q.Resolve(ctx, ref)
		if err != nil {
			return c, err
		}
		if c.Run != first.Run || c.Trial != first.Trial {
			continue
		}
		if c.State != projections.Committed {
			return c, &projections.NotFoundError{What: "committed checkpoint", Ref: ref, Hint: fmt.Sprintf("%q is %s", c.ID, c.State)}
		}
		body, err := choose(c)
		if err != nil || body == nil {
			return c, err
		}
		_, err = s.decideAfter(ctx, c, trial.LaneSeq, body)
		if errors.Is(err, jetlog.ErrConflict) {
			continue
		}
		if err != nil {
			return c, fmt.Errorf("%s of %s@%s: %w", body.Kind(), c.Run, c.ID, err)
		}
		return q.Resolve(ctx, c.Run+"/"+c.Trial+"@"+c.ID)
	}
	return projections.Checkpoint{}, fmt.Errorf("mark %s: other decisions came first %d times; try again when the run is quieter", ref, collectTries)
}

// Pin exempts a checkpoint from retention until [Store.Unpin]. The reason may
// be empty. The result is the checkpoint as it is then.
func (s *Store) Pin(ctx context.Context, ref, reason string) (projections.Checkpoint, error) {
	return s.mark(ctx, ref, func(c projections.Checkpoint) (events.Body, error) {
		if c.Pinned && c.PinReason == reason {
			return nil, nil
		}
		return &events.CheckpointPinned{Checkpoint: c.ID, Reason: reason}, nil
	})
}

// Unpin takes a pin back, if there is one.
func (s *Store) Unpin(ctx context.Context, ref string) (projections.Checkpoint, error) {
	return s.mark(ctx, ref, func(c projections.Checkpoint) (events.Body, error) {
		if !c.Pinned {
			return nil, nil
		}
		return &events.CheckpointUnpinned{Checkpoint: c.ID}, nil
	})
}

// Tag gives a checkpoint a further name, which it takes from the checkpoint of
// the trial that has it; from is the ID of that, or empty. A name that a
// reference would not be taken for is [ErrTag].
func (s *Store) Tag(ctx context.Context, ref, tag string) (c projections.Checkpoint, from string, err error) {
	if err := validTag(tag); err != nil {
		return c, "", err
	}
	c, err = s.mark(ctx, ref, func(c projections.Checkpoint) (events.Body, error) {
		from = ""
		all, err := query.Ask(ctx, s.Views(), query.Checkpoints, query.Params{Run: c.Run, All: true})
		if err != nil {
			return nil, err
		}
		for _, other := range all {
			switch {
			case other.Trial != c.Trial:
			case other.ID == tag || other.Name == tag:
				return nil, fmt.Errorf("%w %q: checkpoint %s of the trial is called so, and would be found instead: choose another", ErrTag, tag, other.ID)
			case slices.Contains(other.Tags, tag) && other.ID != c.ID:
				from = other.ID
			}
		}
		if slices.Contains(c.Tags, tag) {
			return nil, nil
		}
		return &events.CheckpointTagged{Checkpoint: c.ID, Tag: tag}, nil
	})
	return c, from, err
}

// Untag takes a tag back. A tag that the checkpoint does not have is
// [projections.ErrNotFound].
func (s *Store) Untag(ctx context.Context, ref, tag string) (projections.Checkpoint, error) {
	return s.mark(ctx, ref, func(c projections.Checkpoint) (events.Body, error) {
		if !slices.Contains(c.Tags, tag) {
			hint := "it has none"
			if len(c.Tags) > 0 {
				hint = "it has " + strings.Join(c.Tags, ", ")
			}
			return nil, &projections.NotFoundError{What: "tag of " + c.Run + "@" + c.ID, Ref: tag, Hint: hint}
		}
		return &events.CheckpointUntagged{Checkpoint: c.ID, Tag: tag}, nil
	})
}

func validTag(tag string) error {
	bad := func(why string) error { return fmt.Errorf("%w %q: %s", ErrTag, tag, why) }
	switch {
	case tag == "":
		return bad("it is empty")
	case len(tag) > maxTag:
		return bad(fmt.Sprintf("it has %d bytes, at most %d are allowed", len(tag), maxTag))
	case strings.ContainsFunc(tag, unicode.IsControl):
		return bad("it has a control character")
	case strings.ContainsAny(tag, "@/"):
		return bad(`"@" and "/" stand for something else in a reference`)
	case tag == "latest" || strings.HasPrefix(tag, "best:"):
		return bad("it has a meaning of its own in a reference")
	}
	return nil
}
