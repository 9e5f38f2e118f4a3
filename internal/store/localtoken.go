package store

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/private"
)

// An owner that listens on loopback and was given no token makes one. It keeps
// it, for the clients of its user, in a file of the user's runtime directory:
//
//	ckptstore-listeners/    0700
//	  127.0.0.1:4222        0600: the token of the owner that listens there
//
// The owner holds an exclusive flock(2) on the file while it listens. A file
// without the lock is that of an owner that was killed: its token opens nothing
// any more, and is shown to no server. Every owner makes a new token.
const tokensName = "ckptstore-listeners"

// localToken is the file of a token that this process has made.
type localToken struct {
	path string
	file *os.File // locked
}

// withToken gives a listener on loopback a new token, unless it has one or asks
// for certificates. made tells whether it did.
func withToken(l jetlog.Listen) (_ jetlog.Listen, made bool) {
	if !l.Open() || !l.Local() {
		return l, false
	}
	random := make([]byte, 32)
	_, _ = rand.Read(random) // never fails
	l.Token = hex.EncodeToString(random)
	return l, true
}

// TokenFile is where an owner that listens on a HOST:PORT keeps the token that
// it has made.
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

// shareToken keeps the token of the listener at an address where clients of this
// user find it, until withdraw.
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

// withdraw removes the file. It is nothing for a listener without one.
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

// newToken starts the name of a file that is not complete.
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
			continue // its owner removes it, or completes it
		}
		f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
		if err != nil {
			continue // it is removed, or nothing of ours
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

// tokenSearch is where a client looks for the token of a server on loopback.
type tokenSearch struct {
	addresses []string // that the URL stands for
	dirs      []string
}

// searchToken prepares the search for a URL. It looks for nothing if the URL is
// not that of one server on loopback, or has credentials of its own.
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
	// The owner may have another environment than this process, as a service has.
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

// find returns the token of a living owner, and the address that it is for. It
// reads files alone: no server is asked.
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

// apply has the client show the token that is found. The address takes the place
// of a name: the token is for that server alone.
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
		token, _, _ := s.find() // without one the server refuses, and is tried again
		return token
	}
	return nil
}

// hint says where no token was found, after a server has refused this client.
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

// readToken reads the token of the owner that listens on an address now. It
// returns an error for a file that another user may have written.
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
		return "", errors.Join(fmt.Errorf("%s is that of an owner that was killed", path), unix.Flock(int(f.Fd()), unix.LOCK_UN))
	}
	if !errors.Is(err, unix.EWOULDBLOCK) {
		return "", fmt.Errorf("%s: %w", path, err)
	}
	text, err := io.ReadAll(io.LimitReader(f, 1<<10))
	return strings.TrimSpace(string(text)), err
}
