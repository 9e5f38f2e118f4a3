package audit

import (
	"fmt"
	"strings"

	"golang.org/x/mod/sumdb/note"

	"github.com/ckptstore/ckptstore/internal/problem"
)

// A store begins a new origin, with a new key, where the old one cannot continue: after a
// backup was restored whose key has signed later events, after the log was lost and made
// of the receipts, or because the key is replaced. The first audit.sealed of the new
// origin quotes the newest known note of the old one, so that a reader who has a note of
// the old log can tell what became of it:
//
//	restored, or a new key   the first events are the same, and so is the root over them
//	made of the receipts     the events are others; the quoted note is all that follows

// ErrReplaced reports a head of an earlier origin, with events that the log does not have.
var ErrReplaced = problem.New(problem.Findings, "log replaced")

// ReplacedError reports that a log follows another one by a decision of its own, and does
// not have the events of an older head of that.
type ReplacedError struct {
	Old, New Head
	Left     uint64 // sequence of the decision that began the origin after that of Old
	At       Hash   // the root of the new log at the size of the old head, if it is known
}

func (e *ReplacedError) Error() string {
	has := fmt.Sprintf("has %d events from before it", e.Left-1)
	if e.At != (Hash{}) {
		has = fmt.Sprintf("has the root %s at size %d", e.At, e.Old.Size)
	}
	return fmt.Sprintf("%v: the log %s had %v; the log %s, which follows it by event %d, does not have these events: it %s",
		ErrReplaced, e.Old.Origin, e.Old, e.New.Origin, e.Left, has)
}

// Is makes every ReplacedError an [ErrReplaced].
func (*ReplacedError) Is(target error) bool { return target == ErrReplaced }

// ProblemKind returns [problem.Findings].
func (*ReplacedError) ProblemKind() problem.Kind { return problem.Findings }

// Beginning is what a decision audit.sealed tells about a new origin.
type Beginning struct {
	Sequence uint64 // of the decision
	Origin   string // that begins
	Quoted   Head   // of the log before
	Note     []byte // the quoted note; its signature is not checked
}

// ParseBeginning returns the beginning in an audit.sealed that quotes a note.
func ParseBeginning(s SealedMap, sequence uint64) (b Beginning, err error) {
	bad := func(err error) (Beginning, error) {
		return b, fmt.Errorf("%w: event %d begins an origin, and is malformed: %w", ErrTampered, sequence, err)
	}
	key, err := note.NewVerifier(s.Key)
	if err != nil {
		return bad(err)
	}
	text, _, _ := strings.Cut(s.Previous, "\n\n")
	quoted, err := ParseHead(text + "\n")
	if err != nil {
		return bad(err)
	}
	return Beginning{Sequence: sequence, Origin: key.Name(), Quoted: quoted, Note: []byte(s.Previous)}, nil
}

// beginnings checks items that are decisions which began the origin of a head, the one
// before, and so on.
func beginnings(items []Item, now Head) (out []Beginning, err error) {
	origin, before := now.Origin, uint64(now.Size)+1 //nolint:gosec // not negative
	for _, it := range items {
		leaf, m, err := it.opened(now, true)
		if err != nil {
			return nil, err
		}
		s, err := ParseSealed(m, leaf.Sequence)
		if err != nil {
			return nil, err
		}
		b, err := ParseBeginning(s, leaf.Sequence)
		if err != nil {
			return nil, err
		}
		if b.Origin != origin || leaf.Sequence >= before {
			return nil, fmt.Errorf("%w: event %d begins the origin %s, want the decision that began %s", ErrTampered, leaf.Sequence, b.Origin, origin)
		}
		out = append(out, b)
		origin, before = b.Quoted.Origin, leaf.Sequence
	}
	return out, nil
}

// left returns the sequence of the decision by which the log of now left the origin of old.
func (c *Consistency) left(old, now Head, logs []note.Verifier) (uint64, error) {
	var list []Beginning
	if c != nil {
		var err error
		if list, err = beginnings(c.Follows, now); err != nil {
			return 0, err
		}
	}
	for _, b := range list {
		if _, err := b.Open(logs...); err != nil {
			return 0, err
		}
		if b.Quoted.Origin == old.Origin {
			return b.Sequence, nil
		}
	}
	return 0, fmt.Errorf("%w: the older head is of the log %q, this one of %q, and nothing here shows that the one follows the other", ErrTampered, old.Origin, now.Origin)
}

// Open returns the quoted head if one of the keys has signed the note. Its error matches
// [ErrPolicy] where no key is of that log.
func (b Beginning) Open(logs ...note.Verifier) (Head, error) {
	for _, v := range logs {
		if v.Name() == b.Quoted.Origin {
			return OpenHead(b.Note, logs...)
		}
	}
	return Head{}, fmt.Errorf("%w: event %d quotes a note of the log %s, and the policy has no line `log` with its key", ErrPolicy, b.Sequence, b.Quoted.Origin)
}
