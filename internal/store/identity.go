package store

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/internal/beneath"
)

// identity is store.json.
type identity struct {
	Product string    `json:"product"`
	Store   string    `json:"store"`
	Format  int       `json:"format"`
	Created time.Time `json:"created"`
	// Of a store that was recovered from receipts: its identities before, the
	// newest first, and the sequence at which its log ended then.
	Formerly  []string `json:"formerly,omitempty"`
	Recovered uint64   `json:"recovered,omitempty"`
	// Copy names a backup or a restored store: Store is the identity that its log
	// has, which it shares with the one that it was made of.
	Copy string `json:"copy,omitempty"`
	// Owner is who made the directory what it is; nil in a store of an earlier
	// version. Those versions pass over it.
	Owner *ownerRecord `json:"owner,omitempty"`
}

// runtime names the directory of sockets: those of a copy are its own.
func (id identity) runtime() string {
	if id.Copy != "" {
		return id.Copy
	}
	return id.Store
}

const product = "ckptstore"

// readIdentity reads and checks DIR/store.json. A recovery that was cut must be
// finished first.
func readIdentity(dir string) (identity, error) {
	if err := recovering(dir); err != nil {
		return identity{}, err
	}
	return identityIn(dir)
}

func recovering(dir string) error {
	if path := filepath.Join(dir, recoverName); exists(path) {
		return fmt.Errorf("%w: %s says that a recovery was cut: run the same `ckptstore recover` again, which finishes it", ErrDamaged, path)
	}
	return nil
}

func identityIn(dir string) (identity, error) {
	path := filepath.Join(dir, "store.json")
	data, err := readFile(path)
	if errors.Is(err, os.ErrNotExist) {
		if cut := unfinished(dir); cut != nil {
			return identity{}, cut
		}
	}
	if errors.Is(err, os.ErrNotExist) && hasData(dir) {
		return identity{}, fmt.Errorf("%w in %s: store.json is not there, and data/ is: restore that file from a backup, or run `ckptstore recover --store %s`; `ckptstore ls --offline` lists the checkpoints", ErrNoStore, dir, dir)
	}
	if errors.Is(err, syscall.ENOTDIR) {
		return identity{}, fmt.Errorf("%w in %s: it is a file: name a directory with --store", ErrNoStore, dir)
	}
	if errors.Is(err, os.ErrNotExist) {
		return identity{}, fmt.Errorf("%w in %s: make one with `ckptstore init --store %s`, or name another with --store", ErrNoStore, dir, dir)
	}
	if err != nil {
		return identity{}, fmt.Errorf("open store: %w", err)
	}
	var id identity
	if err := json.Unmarshal(data, &id); err != nil {
		return id, fmt.Errorf("%w: %s is not valid JSON: %w: restore the file from a backup, or run `ckptstore recover`; `ckptstore ls --offline` still lists the checkpoints", ErrDamaged, path, err)
	}
	switch {
	case id.Product != product:
		return id, fmt.Errorf("%w: %s was written by %q, not by %s: name another directory with --store", ErrForeign, path, id.Product, product)
	case id.Format > Format:
		return id, fmt.Errorf("%w: %s has format %d, this program knows format %d: upgrade it", ErrNewer, path, id.Format, Format)
	case id.Format < 1 || id.Store == "":
		return id, fmt.Errorf("%w: %s has no identity or format: restore the file from a backup, or run `ckptstore recover`", ErrDamaged, path)
	}
	return id, nil
}

// hasData reports whether a directory has what may be checkpoints. One whose
// making was cut has none.
func hasData(dir string) bool {
	entries, err := beneath.At(dir).ReadDir(filepath.Join(dir, "data"))
	return err == nil && len(entries) > 0
}
