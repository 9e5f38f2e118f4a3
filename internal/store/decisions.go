package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"unicode"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/audit"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/front"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/signing"
	"github.com/ckptstore/ckptstore/internal/store/collection"
	"github.com/ckptstore/ckptstore/planner/retention"
	"github.com/ckptstore/ckptstore/projections"
)

// ErrTag reports a name that cannot be a tag.
var ErrTag = problem.New(problem.Invalid, "bad tag")

// maxTag is the length in bytes of the longest tag.
const maxTag = 128

// decideTries is how often a decision is retried after a conflict. With each conflict another
// process made progress.
const decideTries = 100

// Terms are the conditions of a decision that another program has asked for.
type Terms struct {
	// After, when set, is where the lane of the trial must end: the caller has not seen later
	// decisions. Otherwise the decision is refused with a [MovedError].
	After *uint64
	// ID of the decision's event, by which a repetition is recognized; empty: a new one.
	ID string
	// By is the event's source; empty: ckptstore.
	By string
	// Principal is the sender, whom the caller has authenticated; see [events.Event]. Empty: this
	// process. An owner in another process replaces it by the principal of this process, unless
	// it names a user of a token and both are processes of one Unix user.
	Principal string
}

// origin returns the terms of a further decision of the same sender.
func (t Terms) origin() Terms { return Terms{By: t.By, Principal: t.Principal} }

type termsKey struct{}

// WithTerms returns a context whose decisions are made on these terms.
func WithTerms(ctx context.Context, t Terms) context.Context {
	return context.WithValue(ctx, termsKey{}, t)
}

func termsOf(ctx context.Context) Terms {
	t, _ := ctx.Value(termsKey{}).(Terms)
	return t
}

// holds returns a [MovedError] unless a lane ends where the terms require it.
func (t Terms) holds(run, trial string, end uint64) error {
	if t.After == nil || *t.After == end {
		return nil
	}
	return &MovedError{Run: run, Trial: trial, After: *t.After, Actual: end}
}

// MovedError reports that a trial has other decisions than the caller has seen.
type MovedError struct {
	Run, Trial    string
	After, Actual uint64 // sequences: where the lane was expected to end, and where it ends
}

func (e *MovedError) Error() string {
	return fmt.Sprintf("trial %s/%s changed: its last decision is event %d, not %d: look at it again, then repeat the request", e.Run, e.Trial, e.Actual, e.After)
}

// ProblemKind returns [problem.Moved].
func (*MovedError) ProblemKind() problem.Kind { return problem.Moved }

// repeatWindow is how many events of the log [Store.Decided] looks back.
const repeatWindow = 50_000

// Decided returns the decision of an aggregate with an event ID, and whether there is one
// among the last 50,000 events of the log.
func (s *Store) Decided(ctx context.Context, agg events.Aggregate, id string) (found events.Recorded, ok bool, err error) {
	end, err := s.Log.LaneEnd(ctx, agg)
	if err != nil || end == 0 {
		return found, false, err
	}
	for r, err := range s.Log.ReadLane(ctx, agg, max(1, end-min(end, repeatWindow)), end) {
		if err != nil {
			return found, false, err
		}
		if r.ID == id {
			return r, true, nil
		}
	}
	return found, false, nil
}

// UnrecordedRevocations returns those of the hashes of revoked tokens of a user for which the log has no
// access.revoked. It reads the lane of the store.
func (s *Store) UnrecordedRevocations(ctx context.Context, user string, hashes []string) ([]string, error) {
	left := slices.Clone(hashes)
	end, err := s.Log.LaneEnd(ctx, events.Aggregate{})
	if err != nil || end == 0 {
		return left, err
	}
	for r, err := range s.Log.ReadLane(ctx, events.Aggregate{}, 1, end) {
		if err != nil {
			return nil, err
		}
		if r.Kind != (events.AccessRevoked{}).Kind() {
			continue
		}
		if body, err := r.Body(); err != nil {
			return nil, err
		} else if b, ok := body.(*events.AccessRevoked); ok && b.User == user {
			left = slices.DeleteFunc(left, func(hash string) bool { return slices.Contains(b.Hashes, hash) })
		}
	}
	return left, nil
}

// RecordAccess appends access.granted or access.revoked to the lane of the store. Where this
// process is the owner itself, the principal is its user.
func (s *Store) RecordAccess(ctx context.Context, body events.Body) (uint64, error) {
	return s.recordAccess(ctx, events.Aggregate{}, body)
}

// DecideKeys appends access.granted or access.revoked about keys that sign decisions. This
// process must have the key of an admin; for the first key of the store, that key itself. It
// returns [signing.ErrLastAdmin] for a decision after which no admin had a key that does not expire.
func (s *Store) DecideKeys(ctx context.Context, body events.Body) (uint64, error) {
	if s.signs.Signer() == nil {
		return 0, problem.Errorf(problem.Denied, "%s about keys: this process has no key: set $%s to the file of an admin's", body.Kind(), signing.EnvKey)
	}
	k, err := signing.ReadKeys(ctx, s.Log)
	if err == nil {
		err = k.MayDecide(body)
	}
	if err != nil {
		return 0, err
	}
	return s.recordAccess(ctx, events.Aggregate{Trial: events.Keys}, body)
}

// Signer returns the key by which this process signs its decisions, nil if it has none.
func (s *Store) Signer() *audit.Signer { return s.signs.Signer() }

// recordAccess appends a decision to a lane of no run.
func (s *Store) recordAccess(ctx context.Context, lane events.Aggregate, body events.Body) (uint64, error) {
	d, err := events.NewDecision(Stamp("ckptstore"), lane, body)
	if err != nil {
		return 0, err
	}
	if s.owned() != nil {
		d.Principal = front.OfUser(uint32(os.Geteuid())).Name //nolint:gosec // of this process
	}
	for range decideTries {
		end, err := s.Log.LaneEnd(ctx, lane)
		if err != nil {
			return 0, err
		}
		seq, err := s.Log.Decide(ctx, d, end)
		if !errors.Is(err, jetlog.ErrConflict) {
			return seq, err
		}
	}
	return 0, problem.Errorf(problem.Conflict, "%s: other decisions of the store came first %d times: repeat the command", body.Kind(), decideTries)
}

// decideAfter appends a decision about a checkpoint if the trial's last decision has the
// sequence after. Otherwise it returns [jetlog.ErrConflict].
func (s *Store) decideAfter(ctx context.Context, c projections.Checkpoint, after uint64, body events.Body) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, attachTimeout)
	defer cancel()
	t := termsOf(ctx)
	stamp := Stamp(cmp.Or(t.By, "ckptstore"))
	stamp.ID = cmp.Or(t.ID, stamp.ID)
	d, err := events.NewDecision(stamp, events.Aggregate{Run: c.Run, Trial: c.Trial}, body)
	if err != nil {
		return 0, err
	}
	d.Principal = t.Principal
	seq, err := s.Log.Decide(ctx, d, after)
	if err == nil && seq <= after {
		return 0, problem.Errorf(problem.Conflict, "%s of run %q: the ID %s is that of event %d: use another", body.Kind(), c.Run, stamp.ID, seq)
	}
	return seq, err
}

// mark appends a decision about the committed checkpoint that a reference means at that
// moment. choose returns nil if no decision is needed.
func (s *Store) mark(ctx context.Context, ref string, choose func(projections.Checkpoint) (events.Body, error)) (projections.Checkpoint, error) {
	q := Queries{s.Views()}
	for range decideTries {
		first, err := q.Resolve(ctx, ref)
		if err != nil {
			return first, err
		}
		// Read the lane first: later reads may be newer, and then the decision
		// conflicts.
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
		if err := termsOf(ctx).holds(c.Run, c.Trial, trial.LaneSeq); err != nil {
			return c, err
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
	return projections.Checkpoint{}, fmt.Errorf("mark %s: other decisions came first %d times; try again when the run is quieter", ref, decideTries)
}

// Pin exempts a checkpoint from retention until [Store.Unpin]. The reason may be empty.
// Pin returns the checkpoint as it was when it decided.
func (s *Store) Pin(ctx context.Context, ref, reason string) (projections.Checkpoint, error) {
	return s.mark(ctx, ref, func(c projections.Checkpoint) (events.Body, error) {
		if c.Pinned && c.PinReason == reason {
			return nil, nil
		}
		return &events.CheckpointPinned{Checkpoint: c.ID, Reason: reason}, nil
	})
}

// Unpin removes a checkpoint's pin, if it has one.
func (s *Store) Unpin(ctx context.Context, ref string) (projections.Checkpoint, error) {
	return s.mark(ctx, ref, func(c projections.Checkpoint) (events.Body, error) {
		if !c.Pinned {
			return nil, nil
		}
		return &events.CheckpointUnpinned{Checkpoint: c.ID}, nil
	})
}

// Tag gives a checkpoint a further name. Another checkpoint of the trial with that name
// loses it; from is its ID, or empty. A name that cannot be used in a reference is
// [ErrTag].
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

// Untag removes a tag from a checkpoint. It returns [projections.ErrNotFound] if the
// checkpoint does not have the tag.
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

// Attached records a file that [data.Root.Attach] has added to a checkpoint. The file
// belongs to the checkpoint from then on and replaces an attachment of the same name.
func (s *Store) Attached(ctx context.Context, c projections.Checkpoint, name string, digest checkpoint.Digest, size int64) error {
	err := s.decide(ctx, events.Aggregate{Run: c.Run, Trial: c.Trial}, &events.CheckpointAttached{
		Checkpoint: c.ID, Name: name, Digest: digest.String(), Size: size,
	})
	if err != nil {
		return fmt.Errorf("record %s of checkpoint %s@%s: %w", name, c.Run, c.ID, err)
	}
	return nil
}

// Collect deletes the checkpoints of the store that a policy does not keep, and removes the
// files of those that ended before: see [collection.Collect].
func (s *Store) Collect(ctx context.Context, o collection.Options) (collection.Collection, error) {
	return collection.Collect(ctx, collection.Store{
		ID: s.ID, Data: s.Data, Log: s.Log, Views: s.Views(), Logger: s.opts.Logger, Memory: &s.collected,
		Decide: s.decideAfter, HasFiles: s.hasFiles,
	}, o)
}

// Withdraw takes committed checkpoints of one run out of its line and deletes them, on
// behalf of the program that saved them or a user. It returns the outcome for each
// checkpoint. A checkpoint that is held, such as by a pin, keeps its files until the
// first collection after the hold ends. Deletions that had to wait before are done too.
func (s *Store) Withdraw(ctx context.Context, all []projections.Checkpoint, reason string) ([]collection.Collected, error) {
	if len(all) == 0 {
		return nil, nil
	}
	for _, c := range all {
		_, err := s.mark(ctx, c.Run+"/"+c.Trial+"@"+c.ID, func(now projections.Checkpoint) (events.Body, error) {
			if now.Withdrawn {
				return nil, nil
			}
			return &events.CheckpointSuperseded{Checkpoint: now.ID, Reason: reason}, nil
		})
		if err != nil {
			return nil, err
		}
	}
	done, err := s.Collect(ctx, collection.Options{Runs: []string{all[0].Run}, Policy: retention.Policy{}, Apply: true})
	return slices.DeleteFunc(done.Checkpoints, func(c collection.Collected) bool {
		return !slices.ContainsFunc(all, func(one projections.Checkpoint) bool { return one.Trial == c.Trial && one.ID == c.ID })
	}), err
}
