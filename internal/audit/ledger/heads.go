package ledger

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"iter"

	"github.com/ckptstore/ckptstore/internal/audit"
)

// headLine is a line of heads.
type headLine struct {
	Size int64      `json:"size"`
	Root audit.Hash `json:"root"`
}

// newest returns the head of the largest size in heads, which need not be the last line:
// an owner that was paused while another took the store may have appended its own. It
// returns [ErrDamaged] if heads has two roots of one size. A line that is cut off was
// never signed.
func (k *Keeper) newest() (h audit.Head, err error) {
	h.Origin = k.config.Origin
	text, err := read(k.store, headsName)
	if errors.Is(err, fs.ErrNotExist) {
		return h, nil
	}
	if err != nil {
		return h, err
	}
	roots := map[int64]audit.Hash{}
	for _, l := range headLines(text) {
		if had, ok := roots[l.Size]; ok && had != l.Root {
			return h, fmt.Errorf("%w: %s of the audit has two heads of size %d, with the roots %s and %s: two owners appended to two logs: both roots are the evidence; restore audit/ and log/ from one backup", ErrDamaged, headsName, l.Size, had, l.Root)
		}
		roots[l.Size] = l.Root
		if l.Size > h.Size {
			h.Size, h.Root = l.Size, l.Root
		}
	}
	k.listed = len(text)
	return h, nil
}

// headLines yields the lines of heads, and the heads that they list. It leaves out lines
// that a crash cut off, also the last one without its line feed: their heads were never
// signed.
func headLines(text []byte) iter.Seq2[[]byte, headLine] {
	return func(yield func([]byte, headLine) bool) {
		for line := range bytes.Lines(text[:bytes.LastIndexByte(text, '\n')+1]) {
			var l headLine
			if json.Unmarshal(line, &l) == nil && l.Size > 0 && !yield(line, l) {
				return
			}
		}
	}
}

// list appends a head to heads, and keeps the newest half of a file that is too long.
func (k *Keeper) list(h audit.Head) error {
	line, err := json.Marshal(headLine{h.Size, h.Root})
	if err == nil {
		err = k.disk.append(stepListed, headsName, line)
	}
	if err != nil {
		return err
	}
	k.head, k.signed = h, false
	if k.listed += len(line) + 1; k.listed <= headsMost {
		return nil
	}
	text, err := read(k.store, headsName)
	if err != nil {
		return err
	}
	text = text[len(text)/2:]
	text = text[bytes.IndexByte(text, '\n')+1:]
	if err := k.disk.replace(stepShortened, headsName, text); err != nil {
		return err
	}
	k.listed = len(text)
	return nil
}

// published compares the published note with the newest head, and with the log.
func (k *Keeper) published(ctx context.Context) error {
	_, h, err := k.Checkpoint()
	if errors.Is(err, ErrOff) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	if h.Size > k.head.Size || h.Size == k.head.Size && h.Root != k.head.Root {
		return fmt.Errorf("%w: the published head has %v, and %s has %v: restore audit/ and log/ from one backup", ErrDamaged, h, headsName, k.head)
	}
	if h.Size > 0 && h.Size < k.head.Size {
		root, err := k.rootAt(ctx, h.Size)
		if err != nil {
			return err
		}
		if root != h.Root {
			return fmt.Errorf("%w: the log was rewritten: it leads to the root %s at size %d, and the published head has %v: restore log/ from a backup; both roots are the evidence", ErrDamaged, root, h.Size, h)
		}
	}
	k.signed, k.vouched = h == k.head, true
	return nil
}

// makeHead lists, signs, has witnessed and publishes a head of all folded events. Where
// the newest head was not published, it continues with that or with a later one.
func (k *Keeper) makeHead(ctx context.Context) error {
	var state []byte // if it is due
	k.mu.Lock()
	h := audit.Head{Origin: k.config.Origin, Size: k.tree.Size}
	root, err := k.tree.Root()
	if err == nil && k.stateDue(h.Size) {
		state, err = k.snapshot()
	}
	k.mu.Unlock()
	if err != nil || h.Size == 0 || h.Size == k.head.Size && k.signed {
		return err
	}
	h.Root = root
	if err := k.flush(); err != nil {
		return err
	}
	if err := k.disk.step(stepFolded, true); err != nil {
		return err
	}
	if h.Size != k.head.Size {
		if err := k.list(h); err != nil {
			return err
		}
	}
	if k.signer == nil {
		return nil
	}
	if err := k.keepAnchor(h); err != nil {
		return err
	}
	if err := k.save(state, h.Size); err != nil {
		return err
	}
	signed, err := audit.Sign(h, k.signer)
	if err == nil {
		err = k.disk.step(stepSigned, true)
	}
	if err != nil {
		return err
	}
	if signed, err = k.witness(ctx, h, signed); err != nil {
		return err
	}
	if err := k.disk.step(stepWitnessed, true); err != nil {
		return err
	}
	if err := k.disk.replace(stepPublished, checkpointName, signed); err != nil {
		return err
	}
	k.signed = true
	return nil
}
