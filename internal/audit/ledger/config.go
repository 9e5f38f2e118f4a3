// Package ledger keeps the tamper evidence of a store next to its log, and answers from
// it. Package audit has the formats.
//
//	STORE/audit/
//	  config.json   origin, verifier key, where the signing key is, the witnesses' policy
//	  salts         for each run the key of its salts, one line each, appended with fsync
//	  heads         {size, root} of each head, appended with fsync before it is signed
//	  checkpoint    the newest signed and witnessed note
//	  state         the right edge of the tree and the run map, signed: a cache, rebuilt from the log
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
	"bytes"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/mod/sumdb/note"

	"github.com/ckptstore/ckptstore/internal/audit"
	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/durable"
	"github.com/ckptstore/ckptstore/internal/private"
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
	wantName       = "want"
	haltedName     = "halted"
)

// Config is the configuration of a ledger.
type Config struct {
	Origin string `json:"origin"`
	Key    string `json:"key"`      // verifier key of C2SP signed-note
	Signer string `json:"signer"`   // file with the signing key, outside the store
	Policy string `json:"policy"`   // in the form of C2SP tlog-policy; its witnesses are asked
	Lax    bool   `json:"optional"` // the store opens while no witness answers
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

// KeygenOptions configure [Keygen].
type KeygenOptions struct {
	Store  string // its directory
	File   string // for the signing key; it must not exist
	Origin string
	Policy string // witnesses to ask, in the form of C2SP tlog-policy; empty: none
	Lax    bool
}

// Keygen makes a signing key and turns the evidence of a store on: the next owner that
// writes begins to keep it. The key must lie outside the store, because a user
// who can rewrite the log could otherwise sign the new one. Keygen refuses a store that has a
// ledger.
func Keygen(o KeygenOptions) (c Config, err error) {
	bad := func(format string, args ...any) (Config, error) {
		return c, fmt.Errorf("audit keygen: %w", problem.Errorf(problem.Invalid, format, args...))
	}
	if o.Policy != "" {
		if _, err := audit.ParsePolicy(o.Policy); err != nil {
			return c, fmt.Errorf("audit keygen: %w", err)
		}
	} else {
		o.Policy = "quorum none\n"
	}
	file, err := filepath.Abs(o.File)
	if err != nil {
		return c, fmt.Errorf("audit keygen: %w", err)
	}
	if err := outside(o.Store, file); err != nil {
		return c, fmt.Errorf("audit keygen: %w", err)
	}
	if On(o.Store) {
		return bad("the store has an audit already: see %s", filepath.Join(o.Store, dirName, configName))
	}
	if strings.ContainsAny(o.Origin, "+ \t\n") || o.Origin == "" {
		return bad("--origin %q: want a name without spaces and +, such as example.org/NAME", o.Origin)
	}
	private, public, err := note.GenerateKey(rand.Reader, o.Origin)
	if err != nil {
		return c, fmt.Errorf("audit keygen: %w", err)
	}
	c = Config{Origin: o.Origin, Key: public, Signer: file, Policy: o.Policy, Lax: o.Lax}
	if err := writeNew(file, []byte(private+"\n")); err != nil {
		return c, fmt.Errorf("audit keygen: %w", err)
	}
	return c, Configure(o.Store, c)
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

// NewKey makes a key for a witness, in a file that must not exist, and returns its
// verifier key.
func NewKey(file, name string) (string, error) {
	private, public, err := note.GenerateKey(rand.Reader, name)
	if err != nil {
		return "", fmt.Errorf("make key: %w", err)
	}
	if err := writeNew(file, []byte(private+"\n")); err != nil {
		return "", fmt.Errorf("make key: %w", err)
	}
	return public, nil
}

// writeNew writes a private file that does not exist yet.
func writeNew(path string, text []byte) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	return errors.Join(err, f.Sync(), f.Close(), durable.SyncDir(filepath.Dir(path)))
}

// outside refuses a file inside the store, also by a link.
func outside(store, file string) error {
	store, err := filepath.EvalSymlinks(store)
	if err == nil {
		store, err = filepath.Abs(store)
	}
	if err != nil {
		return err
	}
	dir, err := filepath.EvalSymlinks(filepath.Dir(file))
	if err != nil {
		return err
	}
	if resolved, err := filepath.EvalSymlinks(file); err == nil {
		dir = filepath.Dir(resolved)
	}
	if rel, err := filepath.Rel(store, dir); err != nil || rel != ".." && !strings.HasPrefix(rel, "../") {
		return problem.Errorf(problem.Invalid, "the key %s is inside the store %s: a user who can rewrite the log could sign the new one: choose a place that other users of the store cannot read", file, store)
	}
	return nil
}

// ReadKey reads a private file with a signing key.
func ReadKey(file string) (string, error) {
	info, err := os.Lstat(file)
	if err == nil {
		err = private.File(file, info, "make it readable by its owner only: chmod 600")
	}
	if err != nil {
		return "", err
	}
	text, err := os.ReadFile(file)
	return strings.TrimSpace(string(text)), err
}

// signer reads the signing key of the ledger.
func (c Config) signer(store string) (note.Signer, error) {
	if err := outside(store, c.Signer); err != nil {
		return nil, err
	}
	text, err := ReadKey(c.Signer)
	if err != nil {
		return nil, fmt.Errorf("key of the audit: %w", err)
	}
	s, err := note.NewSigner(text)
	if err != nil {
		return nil, fmt.Errorf("key of the audit %s: %w", c.Signer, err)
	}
	v, err := note.NewVerifier(c.Key)
	if err != nil {
		return nil, fmt.Errorf("%w: the verifier key of the audit: %w", ErrDamaged, err)
	}
	if s.Name() != v.Name() || s.KeyHash() != v.KeyHash() {
		return nil, fmt.Errorf("key of the audit %s: it is not the one of %s", c.Signer, c.Key)
	}
	return s, nil
}

func read(store, name string) ([]byte, error) {
	return beneath.At(store).ReadFile(filepath.Join(store, dirName, name))
}

// Copy copies the ledger of a store into a copy of the store whose log ends at a sequence:
// the configuration, the salts, and the heads up to there. Tiles and state are made again
// from the log. The two stores have one origin, so only one of them may continue: a
// witness cosigns the heads of one.
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
	heads := []byte{}
	text, err := read(from, headsName)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return bad(err)
	}
	for line := range bytes.Lines(text[:bytes.LastIndexByte(text, '\n')+1]) {
		var l headLine
		if json.Unmarshal(line, &l) == nil && l.Size >= 0 && uint64(l.Size) <= last { //nolint:gosec // not negative
			heads = append(heads, line...)
		}
	}
	salts, err := read(from, saltsName)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return bad(err)
	}
	salts = salts[:bytes.LastIndexByte(salts, '\n')+1] // the owner may be appending
	for name, text := range map[string][]byte{headsName: heads, saltsName: salts} {
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
// notes stay as evidence about the old log. It returns the new name, "" without a ledger.
func SetAside(store, name string) (string, error) {
	if !On(store) {
		return "", nil
	}
	to := filepath.Join(store, name)
	if err := beneath.At(store).Rename(filepath.Join(store, dirName), to); err != nil {
		return "", fmt.Errorf("set the audit aside: %w", err)
	}
	return to, durable.SyncDir(store)
}
