package ledger

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/durable"
)

// Copy copies the ledger of a store into a copy of the store whose log ends at a sequence:
// the configuration, the salts, and the heads up to there. Tiles and state are made again
// from the log. The two stores have one origin, so only one of them may continue it: a
// witness cosigns the heads of one. The other begins a new one: see [NewOrigin].
func Copy(from, to string, last uint64) error {
	if !On(from) {
		return nil
	}
	bad := func(err error) error { return fmt.Errorf("copy the audit: %w", err) }
	c, err := ReadConfig(from)
	if err != nil {
		return bad(err)
	}
	root := beneath.At(to)
	if err := root.MkdirAll(filepath.Join(to, dirName), 0o700); err != nil {
		return bad(err)
	}
	// The note is read before the salts: those of its events are durable before it.
	noted, err := c.notes(from, dirName, nil)
	if err == nil && len(noted) == 0 && len(c.Earlier) > 0 {
		noted, err = c.Earlier[len(c.Earlier)-1].notes(from, dirName)
	}
	if err != nil {
		return bad(err)
	}
	heads := []byte{}
	text, err := read(from, headsName)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return bad(err)
	}
	for line, l := range headLines(text) {
		if uint64(l.Size) <= last { //nolint:gosec // not negative
			heads = append(heads, line...)
		}
	}
	salts, err := read(from, saltsName)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return bad(err)
	}
	salts = salts[:bytes.LastIndexByte(salts, '\n')+1] // the owner may be appending a line
	copied := map[string][]byte{headsName: heads, saltsName: salts}
	if len(noted) > 0 { // also of later events: a new origin of the copy quotes it
		copied[notedName] = noted[0].signed
	}
	for name, text := range copied {
		if err := durable.WriteBelow(root, filepath.Join(to, dirName, name), text); err != nil {
			return bad(err)
		}
	}
	if err := Configure(to, c); err != nil {
		return bad(err)
	}
	return nil
}

// SetAside renames the ledger of a store whose log is replaced, so that its heads and
// notes stay as evidence about the log that had this identity. It returns the new name, ""
// without a ledger. [Keygen] finds it there. Files of a ledger without its configuration are moved too: they are of the old log, and
// a new ledger would take them for its own.
func SetAside(store, id string) (string, error) {
	if _, err := os.Lstat(filepath.Join(store, dirName)); errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	to := filepath.Join(store, asideName(id))
	if err := beneath.At(store).Rename(filepath.Join(store, dirName), to); err != nil {
		return "", fmt.Errorf("set the audit aside: %w", err)
	}
	return to, durable.SyncDir(store)
}

// Quote copies the configuration and the notes of a store's ledger into a store that was
// recovered from it, where [Keygen] finds them: the first audit.sealed of the new log quotes the
// newest note. The ledger stays where it is. Quote returns its directory, "" without a ledger.
func Quote(from, store, id string) (string, error) {
	source := filepath.Join(from, dirName)
	to := filepath.Join(store, asideName(id))
	for _, name := range append(slices.Clone(noteNames), configName) { // lost looks for the configuration
		text, err := beneath.At(from).ReadFile(filepath.Join(source, name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			err = beneath.At(store).MkdirAll(to, 0o700)
		}
		if err == nil {
			err = durable.WriteBelow(beneath.At(store), filepath.Join(to, name), text)
		}
		if err != nil {
			return "", fmt.Errorf("quote the audit of %s: %w", from, err)
		}
	}
	if _, err := os.Lstat(source); errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	return source, nil
}
