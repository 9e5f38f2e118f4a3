package store

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/private"
)

// maxRuntime limits the length of a runtime directory's path. The path of a socket may have 107
// bytes at most, and the sockets of a job's workers are one directory deeper.
const maxRuntime = 107 - 40

// runtimeDir returns this user's directory for a store's sockets: in XDG_RUNTIME_DIR or, if that
// is missing or too long, in the directory for temporary files.
func runtimeDir(id string) (string, error) {
	if err := uuid.Validate(id); err != nil {
		return "", fmt.Errorf("%w: invalid identity %q: %w", ErrDamaged, id, err)
	}
	name := "ckptstore-" + id[len(id)-12:]
	base := sessionDir()
	if base == "" || len(filepath.Join(base, name)) > maxRuntime {
		var err error
		if base, err = temporaryDir(); err != nil {
			return "", err
		}
	}
	dir := filepath.Join(base, name)
	if len(dir) > maxRuntime {
		return "", fmt.Errorf("runtime directory %s: the path has %d bytes, sockets need one of at most %d: set XDG_RUNTIME_DIR to a shorter one", dir, len(dir), maxRuntime)
	}
	return dir, makePrivate(dir)
}

// sessionDir returns XDG_RUNTIME_DIR, or "" if that is not a directory.
func sessionDir() string {
	dir := os.Getenv("XDG_RUNTIME_DIR")
	if info, err := os.Stat(dir); dir == "" || err != nil || !info.IsDir() {
		return ""
	}
	return dir
}

// temporaryDir makes this user's directory below the one for temporary files.
func temporaryDir() (string, error) {
	dir := filepath.Join(os.TempDir(), fmt.Sprintf("ckptstore-%d", os.Getuid()))
	return dir, makePrivate(dir)
}

// makePrivate makes a directory that only this user can open. In a shared parent, another user
// may have put something in its place first.
func makePrivate(dir string) error {
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("make the runtime directory: %w: set XDG_RUNTIME_DIR to another", err)
	}
	err := isPrivate(dir)
	if errors.Is(err, os.ErrNotExist) {
		return makePrivate(dir) // another process has just removed it
	}
	return err
}

// isPrivate returns an error unless a directory is accessible only to this user.
func isPrivate(dir string) error {
	info, err := os.Lstat(dir)
	if err != nil {
		return fmt.Errorf("runtime directory: %w", err)
	}
	if err := private.Directory(dir, info, "remove it, or set XDG_RUNTIME_DIR"); err != nil {
		return fmt.Errorf("runtime directory: %w", err)
	}
	return nil
}

// heldRuntime is the runtime directory of an open store. Every process that has the store open
// holds a shared flock(2) on the directory. A process that removes the directory holds the
// exclusive lock, so that it never removes the directory of an open store. A process that opens
// the store at that moment makes the directory again.
type heldRuntime struct {
	dir  string
	lock *os.File // nil after release
}

// holdLimit is how long another process may keep the exclusive lock.
const holdLimit = 10 * time.Second

// holdRuntime makes the runtime directory of a store and protects it from removal.
func holdRuntime(id string) (*heldRuntime, error) {
	for end := time.Now().Add(holdLimit); ; {
		dir, err := runtimeDir(id)
		if err != nil {
			return nil, err
		}
		lock, err := lockRuntime(dir, unix.LOCK_SH)
		if lock != nil {
			return &heldRuntime{dir, lock}, nil
		}
		if err != nil {
			return nil, fmt.Errorf("hold the runtime directory: %w", err)
		}
		if time.Now().After(end) {
			return nil, fmt.Errorf("hold the runtime directory: another process keeps %s locked for %v: end it, or set XDG_RUNTIME_DIR to another directory", dir, holdLimit)
		}
		<-time.After(5 * time.Millisecond) // bounded by holdLimit
	}
}

// lockRuntime locks a directory. It returns nil if another process holds a conflicting lock, or if
// the path leads to another directory by now.
func lockRuntime(dir string, how int) (*os.File, error) {
	lock, err := os.Open(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	err = unix.Flock(int(lock.Fd()), how|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil, lock.Close()
	}
	if err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	if !samePlace(lock) {
		return nil, lock.Close()
	}
	return lock, nil
}

// samePlace reports whether an open file still has its path.
func samePlace(f *os.File) bool {
	mine, err := f.Stat()
	if err != nil {
		return false
	}
	now, err := os.Lstat(f.Name())
	return err == nil && os.SameFile(mine, now)
}

// release unlocks the directory, and removes it if it is empty and no other process has the store
// open. Otherwise the next owner of any store sweeps what remains in it.
func (h *heldRuntime) release() error {
	if h == nil || h.lock == nil {
		return nil
	}
	lock := h.lock
	h.lock = nil
	// The kernel drops the shared lock before it takes the exclusive one, so the path may
	// lead to another process's new directory by now.
	if unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil && samePlace(lock) {
		// The removal fails while a job's or an agent's files are in it.
		_ = os.Remove(h.dir)
	}
	return lock.Close()
}

// sweepRuntimes removes the runtime directories next to own that dead processes have left. It
// leaves those that it cannot remove to the next owner.
func sweepRuntimes(own string, log *slog.Logger) {
	dirs, err := filepath.Glob(filepath.Join(filepath.Dir(own), "ckptstore-????????????"))
	if err != nil {
		return // only for a bad pattern
	}
	for _, dir := range dirs {
		if dir == own {
			continue
		}
		if err := sweepRuntime(dir); err != nil {
			log.Debug("runtime directory not removed", "directory", dir, "error", err)
		}
	}
}

// sweepRuntime removes a runtime directory that no living process uses: no process has the store
// open, all sockets refuse, and no file in it is locked. It holds the exclusive lock meanwhile.
func sweepRuntime(dir string) error {
	info, err := os.Lstat(dir)
	if err != nil || !info.IsDir() || !ownedByMe(info) || time.Since(info.ModTime()) < sweepAge {
		return err
	}
	lock, err := lockRuntime(dir, unix.LOCK_EX)
	if err != nil || lock == nil {
		return err
	}
	defer lock.Close()
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		switch {
		case e.Type() == os.ModeSocket:
			conn, err := net.Dial("unix", path)
			if err == nil {
				_ = conn.Close()
			}
			if !errors.Is(err, unix.ECONNREFUSED) {
				return err // it answers, or has just disappeared
			}
		case e.IsDir():
			// A job of a version without the directory lock has no sockets between two
			// attempts.
			info, err := e.Info()
			sockets, dead := socketsIn(path)
			if err != nil || !dead || sockets == 0 && time.Since(info.ModTime()) < 24*time.Hour {
				return err
			}
		case e.Type().IsRegular():
			f, err := os.Open(path)
			if err != nil {
				return err
			}
			defer f.Close()
			if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
				return err // an agent uses it
			}
		default:
			return fmt.Errorf("%s is a %v, which ckptstore does not make", path, e.Type())
		}
	}
	for _, e := range entries {
		if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	return os.Remove(dir) // fails, as it should, if a new entry has appeared
}

// An owner that listens on loopback without a given token makes one. For the clients of its user,
// it keeps the token in a file of the user's runtime directory:
//
//	ckptstore-listeners/    0700
//	  127.0.0.1:4222        0600: the token of the owner that listens there
//
// The owner holds an exclusive flock(2) on the file while it listens. A file without the lock
// belongs to a killed owner: its token is invalid, and clients do not send it. Every owner makes a
// new token.
const tokensName = "ckptstore-listeners"

// localToken is the file of a token that this process has made.
type localToken struct {
	path string
	file *os.File // locked
}

// withToken gives a listener on loopback a new token, unless it has a token or asks for
// certificates. It reports whether it made one.
func withToken(l jetlog.Listen) (_ jetlog.Listen, made bool) {
	if !l.Open() || !l.Local() {
		return l, false
	}
	random := make([]byte, 32)
	_, _ = rand.Read(random) // never fails
	l.Token = hex.EncodeToString(random)
	return l, true
}

// UserRuntime makes a directory of this user's runtime directory, which only this user can open,
// and returns its path.
func UserRuntime(name string) (string, error) {
	base := sessionDir()
	if base == "" {
		var err error
		if base, err = temporaryDir(); err != nil {
			return "", err
		}
	}
	dir := filepath.Join(base, name)
	return dir, makePrivate(dir)
}

// TokenFile returns the path of the token of an owner that listens on HOST:PORT and made its
// token itself.
func TokenFile(address string) (string, error) {
	base := sessionDir()
	if base == "" {
		var err error
		if base, err = temporaryDir(); err != nil {
			return "", err
		}
	}
	return filepath.Join(base, tokensName, address), nil
}

// shareToken stores the token of a listener where clients of this user find it, until withdraw.
func shareToken(address, token string) (_ *localToken, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("keep the token of %s: %w; or give one with --token-file", address, err)
		}
	}()
	path, err := TokenFile(address)
	if err != nil {
		return nil, err
	}
	dir := filepath.Dir(path)
	if err := makePrivate(dir); err != nil {
		return nil, err
	}
	if err := sweepTokens(dir); err != nil {
		return nil, err
	}
	f, err := os.CreateTemp(dir, newToken+"*")
	if err != nil {
		return nil, err
	}
	_, err = f.WriteString(token + "\n")
	if err == nil {
		err = f.Chmod(0o600)
	}
	if err == nil {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close(), os.Remove(f.Name()))
	}
	return &localToken{path, f}, nil
}

// withdraw removes the file. On nil it does nothing.
func (t *localToken) withdraw() error {
	if t == nil {
		return nil
	}
	var err error
	mine, serr := t.file.Stat()
	if now, lerr := os.Lstat(t.path); serr == nil && lerr == nil && os.SameFile(mine, now) {
		err = removed(t.path)
	}
	return errors.Join(err, unlock(t.file))
}

// newToken starts the name of an incomplete token file.
const newToken = ".new-"

// sweepTokens removes the tokens of owners that were killed.
func sweepTokens(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		info, err := e.Info()
		if err != nil || strings.HasPrefix(e.Name(), newToken) && time.Since(info.ModTime()) < sweepAge {
			continue // its owner removes or completes it
		}
		f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
		if err != nil {
			continue // removed meanwhile, or not a token file
		}
		if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			err = removed(path)
		}
		if err := errors.Join(err, unlock(f)); err != nil {
			return err
		}
	}
	return nil
}

// tokenSearch is a client's search for the token of a server on loopback.
type tokenSearch struct {
	addresses []string // addresses that the URL means
	dirs      []string
}

// searchToken prepares the search for a URL. It returns an empty search unless the URL is that of
// one server on loopback without credentials.
func searchToken(text string) tokenSearch {
	at, err := url.Parse(text)
	if err != nil || at.User != nil || strings.Contains(text, ",") {
		return tokenSearch{}
	}
	port := at.Port()
	if port == "" {
		port = "4222"
	}
	var s tokenSearch
	if addr, err := netip.ParseAddr(at.Hostname()); err == nil && addr.IsLoopback() {
		s.addresses = []string{net.JoinHostPort(addr.String(), port)}
	} else if at.Hostname() == "localhost" {
		s.addresses = []string{net.JoinHostPort("127.0.0.1", port), net.JoinHostPort("::1", port)}
	}
	// The owner, such as a service, may have another environment than this process.
	temporary := fmt.Sprintf("ckptstore-%d", os.Getuid())
	for _, base := range []string{
		sessionDir(), filepath.Join("/run/user", fmt.Sprint(os.Getuid())),
		filepath.Join(os.TempDir(), temporary), filepath.Join("/tmp", temporary),
	} {
		if dir := filepath.Join(base, tokensName); base != "" && !slices.Contains(s.dirs, dir) {
			s.dirs = append(s.dirs, dir)
		}
	}
	return s
}

// find returns the token of a living owner, and its address. It only reads files: it asks no
// server.
func (s tokenSearch) find() (token, address string, err error) {
	var errs []error
	for _, address := range s.addresses {
		for _, dir := range s.dirs {
			token, err := readToken(dir, address)
			if err == nil {
				return token, address, nil
			}
			if !errors.Is(err, os.ErrNotExist) {
				errs = append(errs, err)
			}
		}
	}
	return "", "", errors.Join(errs...)
}

// apply makes the client send the token that is found. It replaces a host name by the token's
// address: the token is valid for that server alone.
func (s tokenSearch) apply(o *jetlog.Options) error {
	_, address, err := s.find()
	if address == "" {
		return err
	}
	at, err := url.Parse(o.URL)
	if err != nil {
		return err
	}
	at.Host = address
	o.URL = at.String()
	s.addresses = []string{address}
	o.FindToken = func() string {
		token, _, _ := s.find() // without a token the server refuses, and the client retries
		return token
	}
	return nil
}

// hint names the places without a token, after a server has refused this client.
func (s tokenSearch) hint(why error) string {
	if len(s.addresses) == 0 {
		return ""
	}
	text := fmt.Sprintf("; no token of this user was found for %s in %s", strings.Join(s.addresses, " or "), strings.Join(s.dirs, ", "))
	if why != nil {
		text += " (" + why.Error() + ")"
	}
	return text + ": `ckptstore serve` prints the path of a token that it makes"
}

// readToken reads the token of the owner that listens on an address now. It returns an error for a
// file that another user may have written.
func readToken(dir, address string) (string, error) {
	if err := isPrivate(dir); err != nil {
		return "", err
	}
	path := filepath.Join(dir, address)
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return "", err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return "", err
	}
	if err := private.File(path, info, "remove it, and start the owner again"); err != nil {
		return "", err
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB)
	if err == nil {
		return "", errors.Join(fmt.Errorf("%s belongs to an owner that was killed", path), unix.Flock(int(f.Fd()), unix.LOCK_UN))
	}
	if !errors.Is(err, unix.EWOULDBLOCK) {
		return "", fmt.Errorf("%s: %w", path, err)
	}
	text, err := io.ReadAll(io.LimitReader(f, 1<<10))
	return strings.TrimSpace(string(text)), err
}
