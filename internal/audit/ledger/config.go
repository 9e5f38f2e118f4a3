// Package ledger keeps the tamper evidence of a store next to its log, and answers from
// it. Package audit has the formats.
//
//	STORE/audit/
//	  config.json   origin, verifier key, where the signing key is, the witnesses' policy
//	  salts         for each run the key of its salts, one line each, appended with fsync
//	  heads         {size, root} of each head, appended with fsync before it is signed
//	  checkpoint    the newest signed and witnessed note
//	  state         the right edge of the tree and the run map, signed: a cache, rebuilt from the log
//	  noted         in a copy of a store, the newest note of the original: see NewOrigin
//	  want          a request for a head with a new audit.sealed
//	  halted        why the owner makes no head any more
//	  tile/         full tiles and full bundles of entries, in the form of C2SP tlog-tiles
//
// The owner of the store makes a head in these steps, each durable before the next:
//
//	ack → fold (salts, full tiles) → listed in heads → anchored → signed → witnessed → published
//
// Anchored means that the head is in a file next to the key, outside the store.
//
// A crash between two of them never leads to two heads of one size with different
// roots: the next owner computes the root at the size of the newest line of heads again,
// and refuses the store if it differs.
package ledger

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/durable"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// Errors of a ledger.
var (
	// ErrOff reports a store without tamper evidence.
	ErrOff = problem.New(problem.Invalid, "audit is off for this store")
	// ErrDamaged reports that the log is not the one whose head was signed.
	ErrDamaged = problem.New(problem.Damage, "damaged")
)

// Names below the directory of a store.
const (
	dirName        = "audit"
	configName     = "config.json"
	saltsName      = "salts"
	headsName      = "heads"
	checkpointName = "checkpoint"
	stateName      = "state"
	notedName      = "noted"
	wantName       = "want"
	haltedName     = "halted"
)

// Config is the configuration of a ledger.
type Config struct {
	Origin   string `json:"origin"`
	Key      string `json:"key"`      // verifier key of C2SP signed-note
	Signer   string `json:"signer"`   // file with the signing key, outside the store
	Policy   string `json:"policy"`   // in the form of C2SP tlog-policy; its witnesses are asked
	Optional bool   `json:"optional"` // the store opens while no witness answers

	Earlier []Earlier `json:"earlier,omitempty"` // origins of the store before this one, the oldest first
}

// On reports whether a store keeps tamper evidence.
func On(store string) bool {
	_, err := os.Lstat(filepath.Join(store, dirName, configName))
	return err == nil
}

// ReadConfig reads the configuration of a store's ledger. It returns [ErrOff] without one.
func ReadConfig(store string) (c Config, err error) {
	text, err := read(store, configName)
	if errors.Is(err, fs.ErrNotExist) {
		return c, fmt.Errorf("%w: `ckptstore audit keygen` turns it on", ErrOff)
	}
	if err == nil {
		err = json.Unmarshal(text, &c)
	}
	if err != nil {
		return c, fmt.Errorf("%w: %s of the audit: %w", ErrDamaged, configName, err)
	}
	return c, nil
}

// Configure writes the configuration of a store's ledger, which turns it on.
func Configure(store string, c Config) error {
	text, err := json.MarshalIndent(c, "", "  ")
	if err != nil {
		return err
	}
	dir := filepath.Join(store, dirName)
	if err := beneath.At(store).MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("configure the audit: %w", err)
	}
	if err := durable.WriteBelow(beneath.At(store), filepath.Join(dir, configName), append(text, '\n')); err != nil {
		return fmt.Errorf("configure the audit: %w", err)
	}
	return durable.SyncDir(store)
}

func read(store, name string) ([]byte, error) {
	return beneath.At(store).ReadFile(filepath.Join(store, dirName, name))
}
