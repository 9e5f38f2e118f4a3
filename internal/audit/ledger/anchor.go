package ledger

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/ckptstore/ckptstore/internal/audit"
	"github.com/ckptstore/ckptstore/internal/durable"
)

// anchor is the newest head that the key has signed, in a file next to the key. A user who
// can write the store, but not there, could otherwise delete the ledger's heads, rewrite
// the log, and have the next owner sign it. Without the file, such as for a key in a
// directory that the owner cannot write, nothing is compared.
type anchor struct {
	anchored
	path string
	next anchored // that a write may have left, though it failed
	off  bool     // it cannot be written
}

// anchored is the content of the file.
type anchored struct {
	Key  string     `json:"key"` // verifier key; the head of an earlier key is ignored
	Size int64      `json:"size"`
	Root audit.Hash `json:"root"`
}

func readAnchor(c Config) (a anchor, err error) {
	a.path = c.Signer + ".head"
	text, err := os.ReadFile(a.path)
	if errors.Is(err, fs.ErrNotExist) {
		return a, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &a.anchored)
	}
	if err == nil && a.Size < 0 {
		err = fmt.Errorf("its size is %d", a.Size)
	}
	if err != nil {
		return a, fmt.Errorf("%w: the newest head of the key, %s: %w", ErrDamaged, a.path, err)
	}
	if a.Key != c.Key {
		a.anchored = anchored{}
	}
	return a, nil
}

// reached checks that the log is as long as the head.
func (a anchor) reached(last uint64) error {
	if last >= uint64(a.Size) { //nolint:gosec // not negative
		return nil
	}
	return fmt.Errorf("%w: the key has signed a head of size %d (%s), and the log has %d events: an older state of the store was put back: put the newest one back; if that is lost, such as to continue a restored backup, begin a new origin: `ckptstore audit keygen FILE --new-origin`", ErrRolledBack, a.Size, a.path, last)
}

// checkAnchor compares the log with the head of the key.
func (k *Keeper) checkAnchor(ctx context.Context) (err error) {
	a := k.anchor
	root := k.head.Root
	switch {
	case a.Size == 0:
		return nil
	case a.Size > k.head.Size: // heads lost its end
		if err := k.foldUntil(ctx, uint64(a.Size)); err != nil { //nolint:gosec // not negative
			return err
		}
		root, err = k.tree.Root()
	case a.Size < k.head.Size: // a crash, or an owner without the key
		root, err = tlog.TreeHash(a.Size, k.hashes(ctx, k.head))
		err = tampered(err)
	}
	if err != nil {
		return err
	}
	if root != a.Root {
		return fmt.Errorf("%w: the log was rewritten, or the key signs for another copy of the store: the log leads to the root %s at size %d, and the key has signed %s (%s): restore log/ from a backup; both roots are the evidence", ErrDamaged, root, a.Size, a.Root, a.path)
	}
	k.vouched = true
	return nil
}

// keepAnchor makes the head of the key durable before it is signed. It returns
// [ErrDamaged] if another process has signed one meanwhile.
func (k *Keeper) keepAnchor(h audit.Head) error {
	next := anchored{k.config.Key, h.Size, h.Root}
	if k.anchor.off || k.anchor.anchored == next {
		return nil
	}
	now, err := readAnchor(k.config)
	if err != nil {
		return err
	}
	if now.Size > 0 && now.anchored != k.anchor.anchored && now.anchored != k.anchor.next {
		return fmt.Errorf("%w: another process has signed a head of size %d, root %s, with the key of this store (%s): two copies of the store use one key: end one, and open the other again", ErrDamaged, now.Size, now.Root, now.path)
	}
	text, err := json.Marshal(next)
	if err == nil {
		k.anchor.next = next
		err = k.disk.do(stepAnchored, func() error { return durable.Write(k.anchor.path, append(text, '\n')) })
	}
	if errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EROFS) {
		k.anchor.off = true
		k.o.Logger.Warn("audit: newest head not kept next to the key; a rewritten log is noticed by notes and witnesses only", "error", err)
		return nil
	}
	if err == nil {
		k.anchor.anchored = next
	}
	return err
}
