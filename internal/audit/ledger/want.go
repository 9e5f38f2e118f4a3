package ledger

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/internal/audit"
	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/durable"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// A process that is not the owner asks for a head with a new audit.sealed by the file
// want, whose content is a text of its own. The owner removes it when the head is
// published. An owner that cannot continue writes the reason into the file halted, which
// the next owner removes.

// request returns the content of want, "" without the file.
func (k *Keeper) request() (string, error) {
	text, err := read(k.store, wantName)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	return "request " + string(text), err
}

// grant removes want, unless another request has replaced it.
func (k *Keeper) grant(request string) error {
	if now, err := k.request(); err != nil || now != request {
		return err
	}
	err := k.disk.do(stepGranted, func() error { return remove(k.store, wantName) })
	if err == nil {
		k.granted = ""
	}
	return err
}

// halt reports that the log contradicts the ledger: to the log of the process at once,
// and to other processes.
func (k *Keeper) halt(why error) {
	k.o.Logger.Error("audit halted: no head includes later events", "error", why)
	if err := k.disk.replace(stepHalted, haltedName, []byte(why.Error()+"\n")); err != nil {
		k.o.Logger.Error("audit: the halt is not recorded", "error", err)
	}
}

// resume forgets that an earlier owner halted.
func (k *Keeper) resume() error { return remove(k.store, haltedName) }

// Halted returns why the owner makes no head any more, "" if it does.
func (b *Book) Halted() (string, error) {
	text, err := read(b.store, haltedName)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	return strings.TrimSpace(string(text)), err
}

// remove removes a file of the ledger, if there is one.
func remove(store, name string) error {
	err := beneath.At(store).Remove(filepath.Join(store, dirName, name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// wantEvery is how often [Book.Want] looks.
const wantEvery = 20 * time.Millisecond

// Want asks the owner for a head that includes a new audit.sealed of all events that are
// in the log now, and returns its note. It waits until ctx ends, and then takes the
// request back. It returns [ErrDamaged] if the owner has halted.
func (b *Book) Want(ctx context.Context) (_ []byte, _ audit.Head, err error) {
	bad := func(err error) ([]byte, audit.Head, error) {
		return nil, audit.Head{}, fmt.Errorf("audit checkpoint: %w", err)
	}
	last, err := b.log.Last(ctx)
	if err != nil {
		return bad(err)
	}
	request := []byte(rand.Text())
	ask := func() error {
		return durable.WriteBelow(beneath.At(b.store), filepath.Join(b.store, dirName, wantName), request)
	}
	if err := ask(); err != nil {
		return bad(err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.takeBack(request))
		}
	}()
	for {
		_, err := read(b.store, wantName)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return bad(err)
		}
		if err != nil {
			signed, h, covered, err := b.covers(ctx, last)
			if err == nil && covered {
				return signed, h, nil
			}
			if err == nil {
				err = ask() // the owner granted another request
			}
			if err != nil {
				return bad(err)
			}
		}
		why, err := b.Halted()
		if err != nil {
			return bad(err)
		}
		if why != "" {
			return bad(fmt.Errorf("%w: the owner of the store makes no head any more: %s", ErrDamaged, why))
		}
		if !pause(ctx, wantEvery) {
			return bad(problem.Errorf(problem.Late, "the owner of the store has published no head of event %d: its log tells why, such as a witness that does not answer or a key that it cannot read; %w", last, ctx.Err()))
		}
	}
}

// covers returns the newest head, and whether its last audit.sealed covers an event.
func (b *Book) covers(ctx context.Context, sequence uint64) (signed []byte, h audit.Head, covered bool, err error) {
	signed, h, err = b.Checkpoint()
	if errors.Is(err, ErrOff) || err == nil && h.Size <= int64(sequence) { //nolint:gosec // not that long
		return nil, h, false, nil
	}
	if err != nil {
		return nil, h, false, err
	}
	_, s, err := b.lastSealed(ctx, h)
	if slices.Contains(problem.Kinds(err), problem.NotFound) {
		err = nil
	}
	return signed, h, s.Size >= int64(sequence), err //nolint:gosec // as above
}

// takeBack removes the request of this process, and not that of another.
func (b *Book) takeBack(request []byte) error {
	now, err := read(b.store, wantName)
	if errors.Is(err, fs.ErrNotExist) || err == nil && string(now) != string(request) {
		return nil
	}
	if err != nil {
		return err
	}
	return remove(b.store, wantName)
}
