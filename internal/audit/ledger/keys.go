package ledger

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"unicode"

	fnote "github.com/transparency-dev/formats/note"
	"golang.org/x/mod/sumdb/note"

	"github.com/ckptstore/ckptstore/internal/audit"
	"github.com/ckptstore/ckptstore/internal/durable"
	"github.com/ckptstore/ckptstore/internal/private"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// KeygenOptions configure [Keygen].
type KeygenOptions struct {
	Store    string // its directory
	File     string // for the signing key; it must not exist
	Origin   string
	Policy   string // witnesses to ask, in the form of C2SP tlog-policy; empty: none
	Optional bool   // see [Config]

	// Formerly are the identities of the store before it was recovered, the newest first:
	// the new log quotes the newest note of theirs.
	Formerly []string
}

// Keygen makes a signing key and turns the evidence of a store on: the next owner that
// writes begins to keep it. The key must lie outside the store, because a user
// who can rewrite the log could otherwise sign the new one. Keygen refuses a store that has a
// ledger.
func Keygen(o KeygenOptions) (c Config, err error) {
	bad := func(format string, args ...any) (Config, error) {
		return c, fmt.Errorf("audit keygen: %w", problem.Errorf(problem.Invalid, format, args...))
	}
	if o.Policy == "" {
		o.Policy = noWitness
	}
	if _, err := audit.ParsePolicy(o.Policy); err != nil {
		return c, fmt.Errorf("audit keygen: %w", err)
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
	c = Config{Origin: o.Origin, Policy: withoutLogs(o.Policy), Optional: o.Optional}
	if c.Earlier, err = lost(o.Store, o.Formerly); err != nil {
		return c, fmt.Errorf("audit keygen: %w", err)
	}
	return c.begin(o.Store, file)
}

// begin makes the key of a configuration, and writes both.
func (c Config) begin(store, file string) (Config, error) {
	private, public, err := newPair(c.Origin)
	if err != nil {
		return c, fmt.Errorf("audit keygen: origin: %w", err)
	}
	c.Key, c.Signer = public, file
	if err := writeNew(file, []byte(private+"\n")); err != nil {
		return c, fmt.Errorf("audit keygen: %w", err)
	}
	err = c.keepFollowed()
	if err == nil {
		err = Configure(store, c)
	}
	if err != nil {
		if had, rerr := ReadConfig(store); !On(store) || rerr == nil && had.Key != c.Key {
			err = errors.Join(err, os.Remove(file)) // no configuration names the key
			if rerr := os.Remove(file + followedSuffix); !errors.Is(rerr, fs.ErrNotExist) {
				err = errors.Join(err, rerr)
			}
		}
		return c, fmt.Errorf("audit keygen: %w", err)
	}
	return c, nil
}

// NewKey makes a key for a witness, in a file that must not exist, and returns its
// verifier key.
func NewKey(file, name string) (string, error) {
	private, public, err := newPair(name)
	if err != nil {
		return "", fmt.Errorf("make key: %w", err)
	}
	if err := writeNew(file, []byte(private+"\n")); err != nil {
		return "", fmt.Errorf("make key: %w", err)
	}
	return public, nil
}

// newPair makes a key. It refuses a name that signed notes cannot have: a key with one
// would never be read again.
func newPair(name string) (private, public string, err error) {
	if private, public, err = note.GenerateKey(rand.Reader, name); err != nil {
		return "", "", err
	}
	_, err = note.NewSigner(private)
	if _, err2 := note.NewVerifier(public); err != nil || err2 != nil || strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return "", "", problem.Errorf(problem.Invalid, "the name %q: want one without spaces, control characters and +, such as example.org/NAME", name)
	}
	return private, public, nil
}

// writeNew writes a private file that does not exist yet.
func writeNew(path string, text []byte) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	if err = errors.Join(err, f.Sync(), f.Close(), durable.SyncDir(filepath.Dir(path))); err != nil {
		err = errors.Join(err, os.Remove(path))
	}
	return err
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

// ReadKey reads a file with a signing key. It returns [private.ErrNotPrivate] for a key
// that others have rights to, and [fs.ErrPermission] alone for a key of another user.
func ReadKey(file string) (string, error) {
	f, err := os.OpenFile(file, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if errors.Is(err, syscall.ELOOP) {
		return "", fmt.Errorf("%s: %w: it is a symbolic link: name the file itself", file, private.ErrNotPrivate)
	}
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err == nil {
		err = private.Secret(file, info, "make it readable by its owner only: chmod 600")
	}
	if err != nil {
		return "", err
	}
	if err := private.File(file, info, "use a key of this user"); err != nil {
		return "", fmt.Errorf("%s belongs to another user: %w", file, fs.ErrPermission)
	}
	text, err := io.ReadAll(io.LimitReader(f, keyMost))
	return strings.TrimSpace(string(text)), err
}

// ReadSigner reads a file with a key that signs decisions. It must be private to this user,
// and outside of the store, if that is a directory: see [ReadKey].
func ReadSigner(store, file string) (*audit.Signer, error) {
	if store != "" {
		if err := outside(store, file); err != nil {
			return nil, err
		}
	}
	text, err := ReadKey(file)
	if err != nil {
		return nil, err
	}
	s, err := audit.NewSigner(text)
	if err != nil {
		return nil, problem.Errorf(problem.Invalid, "%s: %w", file, err)
	}
	return s, nil
}

// keyMost bounds the file of a signing key. The largest kind has about 4 KB.
const keyMost = 1 << 16

// signer reads the signing key of the ledger. Its error matches [fs.ErrNotExist] or
// [fs.ErrPermission], and not [private.ErrNotPrivate], where this process has no key.
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

// CosignatureKey returns the verifier key of the cosignatures that a key makes, for
// policies.
func CosignatureKey(key string) (string, error) { return fnote.VKeyToCosignatureV1(key) }
