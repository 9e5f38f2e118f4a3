package ledger

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"

	"golang.org/x/mod/sumdb/note"

	"github.com/ckptstore/ckptstore/internal/audit"
)

// state is the content of the file state: what folding the log has led to at the size of
// a listed head. The file is the state as JSON in one line, and a signed note of its
// digest: a user who can write the store cannot change the run map between two owners.
type state struct {
	Tree   audit.Tree  `json:"tree"`
	Rows   []audit.Row `json:"rows"`
	Sealed int64       `json:"sealed"`
	Others int64       `json:"others"`
	Bundle []byte      `json:"bundle"`
}

// stateText returns the text of the note. It has two lines, so it is no head.
func stateText(line []byte) string {
	sum := sha256.Sum256(line)
	return "ckptstore-state/v1\n" + hex.EncodeToString(sum[:]) + "\n"
}

// openState returns the state in a file whose note verifies.
func openState(text []byte, key string) (s state, err error) {
	line, signed, _ := bytes.Cut(text, []byte("\n"))
	v, err := note.NewVerifier(key)
	if err != nil {
		return s, err
	}
	n, err := note.Open(signed, note.VerifierList(v))
	if err != nil {
		return s, fmt.Errorf("its signature: %w", err)
	}
	if n.Text != stateText(line) {
		return s, errors.New("its signature is of another state")
	}
	if err := json.Unmarshal(line, &s); err != nil {
		return s, err
	}
	_, err = s.Tree.Root()
	return s, err
}

// load reads the saved state. It is a cache: without a fitting one, which the log's key
// has signed, the log is folded from its beginning. It returns [ErrDamaged] if the salts
// of a run are missing.
func (k *Keeper) load() error {
	text, err := read(k.store, stateName)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	s, err := openState(text, k.config.Key)
	if err == nil && s.Tree.Size > k.head.Size {
		err = fmt.Errorf("it is of size %d, and the newest head has %v", s.Tree.Size, k.head)
	}
	var bundle [][]byte
	for rest := s.Bundle; err == nil && len(rest) > 0; {
		var entry []byte
		entry, rest, err = audit.CutBundle(rest)
		bundle = append(bundle, entry)
	}
	if err != nil {
		k.o.Logger.Warn("state of the audit unusable; folding the log again", "error", err)
		return nil
	}
	from := s.Tree.Size / audit.TileWidth * audit.TileWidth
	for i, entry := range bundle {
		k.remember(from, uint64(from+int64(i))+1, entry) //nolint:gosec // not negative
	}
	k.tree, k.runs, k.sealed, k.others, k.bundle, k.saved = s.Tree, audit.RunsOf(s.Rows), s.Sealed, s.Others, s.Bundle, s.Tree.Size
	k.begun, k.vouched = true, true // the key has signed it, after the origin began
	return k.salts.covers(s.Rows)
}

// snapshot returns the state as JSON. The caller holds mu.
func (k *Keeper) snapshot() ([]byte, error) {
	return json.Marshal(state{Tree: k.tree, Rows: k.runs.Rows(), Sealed: k.sealed, Others: k.others, Bundle: k.bundle})
}

// stateDue reports whether the owner saves the state at a size. An owner without the key
// leaves the state that another has signed. The caller holds mu.
func (k *Keeper) stateDue(size int64) bool {
	return k.signer != nil && size-k.saved >= max(stateEvents, int64(4*k.runs.Len()))
}

// save saves a snapshot of a size that is listed in heads.
func (k *Keeper) save(snapshot []byte, size int64) error {
	if snapshot == nil {
		return nil
	}
	signed, err := note.Sign(&note.Note{Text: stateText(snapshot)}, k.signer)
	if err != nil {
		return err
	}
	if err := k.disk.replace(stepSaved, stateName, append(append(snapshot, '\n'), signed...)); err != nil {
		return err
	}
	k.saved = size
	return nil
}

// saveLast saves the state at the end, if it is that of the newest head.
func (k *Keeper) saveLast() error {
	if k.signer == nil {
		return nil
	}
	k.mu.Lock()
	size := k.tree.Size
	snapshot, err := k.snapshot()
	k.mu.Unlock()
	if err != nil || size != k.head.Size || size == k.saved {
		return err
	}
	return k.save(snapshot, size)
}
