package audit

import (
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"github.com/ckptstore/ckptstore/internal/problem"
)

// Head is a state of a log: its first Size entries.
type Head struct {
	Origin string
	Size   int64
	Root   Hash
}

// String returns the head in one line, for messages.
func (h Head) String() string {
	return fmt.Sprintf("size %d, root %s", h.Size, h.Root)
}

// Tree returns the head as the tree of package tlog.
func (h Head) Tree() tlog.Tree { return tlog.Tree{N: h.Size, Hash: h.Root} }

// Text returns the text of the head's note. It has no extension lines: cosignatures of
// some kinds do not cover them.
func (h Head) Text() string {
	return h.Origin + "\n" + strconv.FormatInt(h.Size, 10) + "\n" + base64.StdEncoding.EncodeToString(h.Root[:]) + "\n"
}

// ParseHead is the inverse of [Head.Text].
func ParseHead(text string) (h Head, err error) {
	lines := strings.Split(text, "\n")
	if len(lines) != 4 || lines[0] == "" || lines[3] != "" {
		return h, errors.New("head: want three lines: origin, size and root")
	}
	h.Origin = lines[0]
	if h.Size, err = strconv.ParseInt(lines[1], 10, 64); err != nil || h.Size < 0 {
		return h, fmt.Errorf("head: %q is no size", lines[1])
	}
	root, err := base64.StdEncoding.DecodeString(lines[2])
	if err != nil || len(root) != len(h.Root) {
		return h, fmt.Errorf("head: %q is no root", lines[2])
	}
	h.Root = Hash(root)
	if h.Text() != text {
		return h, errors.New("head: it is not written canonically")
	}
	return h, nil
}

// Sign returns the signed note of a head.
func Sign(h Head, signer note.Signer) ([]byte, error) {
	return note.Sign(&note.Note{Text: h.Text()}, signer)
}

// OpenHead returns the head of a note that one of the logs has signed: the log that its
// origin names. The signature of another log does not count.
func OpenHead(signed []byte, logs ...note.Verifier) (Head, error) {
	n, err := note.Open(signed, note.VerifierList(logs...))
	if err != nil {
		return Head{}, fmt.Errorf("%w: the note of the head: %w", ErrTampered, err)
	}
	h, err := ParseHead(n.Text)
	if err != nil {
		return h, fmt.Errorf("%w: the note of the head: %w", ErrTampered, err)
	}
	for _, s := range slices.Concat(n.Sigs, n.UnverifiedSigs) {
		// Otherwise a change of the unused bits of the last character passes.
		if _, err := base64.StdEncoding.Strict().DecodeString(s.Base64); err != nil {
			return h, fmt.Errorf("%w: the note of the head: the signature of %s: %w", ErrTampered, s.Name, err)
		}
	}
	for _, s := range n.Sigs {
		if s.Name == h.Origin {
			return h, nil
		}
	}
	return h, fmt.Errorf("%w: the note is of the log %q, whose key in the policy has not signed it: %s has", ErrTampered, h.Origin, n.Sigs[0].Name)
}

// ForkError reports two heads of one log that exclude each other: the log was rewritten,
// or it shows different readers different histories. The two notes are the evidence.
type ForkError struct {
	Old, New Head
	At       Hash // the root of the new log at the size of the old head, if it is known
}

func (e *ForkError) Error() string {
	if e.New.Size < e.Old.Size {
		return fmt.Sprintf("%v: the log was rolled back: it had %v, and has %v", ErrTampered, e.Old, e.New)
	}
	text := fmt.Sprintf("%v: the log was rewritten: it had %v, and the log with %v does not continue it", ErrTampered, e.Old, e.New)
	if e.At != (Hash{}) {
		text += fmt.Sprintf(": its root at size %d is %s", e.Old.Size, e.At)
	}
	return text
}

// Is makes every ForkError an [ErrTampered].
func (e *ForkError) Is(target error) bool { return target == ErrTampered }

// ProblemKind returns [problem.Findings].
func (*ForkError) ProblemKind() problem.Kind { return problem.Findings }

// Consistency proves that a head continues an older one.
type Consistency struct {
	Size  int64  `json:"size"`            // of the older head
	Root  Hash   `json:"root"`            // of the newer log at that size
	Proof []Hash `json:"proof,omitempty"` // none for equal sizes

	// Follows are the decisions that began the origins since the older head, the newest
	// first; none if the origin is the same.
	Follows []Item `json:"follows,omitempty"`
}

// Check checks that now continues old. The proof is of now. Where old is of an earlier
// origin, logs are the keys of which one has signed the quoted notes. Its error is a
// [ForkError] or a [ReplacedError] if the log does not continue old.
func (c *Consistency) Check(old, now Head, logs ...note.Verifier) error {
	var replaced *ReplacedError
	if old.Origin != now.Origin {
		left, err := c.left(old, now, logs)
		if err != nil {
			return err
		}
		replaced = &ReplacedError{Old: old, New: now, Left: left}
		if uint64(old.Size) >= left { //nolint:gosec // not negative
			return replaced
		}
	}
	switch {
	case replaced == nil && (old.Size > now.Size || old.Size == now.Size && old.Root != now.Root):
		return &ForkError{Old: old, New: now}
	case old.Size == now.Size || old.Size == 0:
		return nil
	case c == nil || c.Size != old.Size:
		return problem.Errorf(problem.Policy, "no proof that the log continues the older head (%v): make this file again with --since", old)
	case c.Root == old.Root && tlog.CheckTree(c.Proof, now.Size, now.Root, old.Size, old.Root) == nil:
		return nil
	case replaced != nil:
		replaced.At = c.Root
		return replaced
	}
	return &ForkError{Old: old, New: now, At: c.Root}
}

// checkAll checks the proof by itself, and that now continues old, if there is one.
func (c *Consistency) checkAll(old *Head, now Head, logs []note.Verifier) error {
	if old != nil {
		if err := c.Check(*old, now, logs...); err != nil {
			return err
		}
	}
	if c != nil {
		if _, err := beginnings(c.Follows, now); err != nil {
			return err
		}
	}
	switch {
	case c == nil, c.Size == 0 && c.Root == (Hash{}) && len(c.Proof) == 0:
		return nil
	case c.Size == now.Size && c.Root == now.Root && len(c.Proof) == 0:
		return nil
	case c.Size <= 0 || c.Size >= now.Size || tlog.CheckTree(c.Proof, now.Size, now.Root, c.Size, c.Root) != nil:
		return fmt.Errorf("%w: the proof of an older head of size %d is wrong", ErrTampered, c.Size)
	}
	return nil
}
