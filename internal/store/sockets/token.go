package sockets

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

// Token is the file of a token that this process has made.
type Token struct {
	Path string
	file *os.File // locked
}

// WithToken gives a listener on loopback a new token, unless it has a token or asks for
// certificates. It reports whether it made one.
func WithToken(l jetlog.Listen) (_ jetlog.Listen, made bool) {
	if !l.Open() || !l.Local() {
		return l, false
	}
	random := make([]byte, 32)
	_, _ = rand.Read(random) // never fails
	l.Token = hex.EncodeToString(random)
	return l, true
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

// ShareToken stores the token of a listener where clients of this user find it, until [Token.Withdraw].
func ShareToken(address, token string) (_ *Token, err error) {
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
	return &Token{path, f}, nil
}

// Withdraw removes the file. On nil it does nothing.
func (t *Token) Withdraw() error {
	if t == nil {
		return nil
	}
	var err error
	mine, serr := t.file.Stat()
	if now, lerr := os.Lstat(t.Path); serr == nil && lerr == nil && os.SameFile(mine, now) {
		err = removed(t.Path)
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
		if err != nil || strings.HasPrefix(e.Name(), newToken) && time.Since(info.ModTime()) < SweepAge {
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

// Search is a client's search for the token of a server on loopback.
type Search struct {
	addresses []string // addresses that the URL means
	dirs      []string
}

// SearchToken prepares the search for a URL. It returns an empty search unless the URL is that of
// one server on loopback without credentials.
func SearchToken(text string) Search {
	at, err := url.Parse(text)
	if err != nil || at.User != nil || strings.Contains(text, ",") {
		return Search{}
	}
	port := at.Port()
	if port == "" {
		port = "4222"
	}
	var s Search
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

// Find returns the token of a living owner, and its address. It only reads files: it asks no
// server.
func (s Search) Find() (token, address string, err error) {
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

// Apply makes the client send the token that is found. It replaces a host name by the token's
// address: the token is valid for that server alone.
func (s Search) Apply(o *jetlog.Options) error {
	_, address, err := s.Find()
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
		token, _, _ := s.Find() // without a token the server refuses, and the client retries
		return token
	}
	return nil
}

// Hint names the places without a token, after a server has refused this client.
func (s Search) Hint(why error) string {
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

// removed removes a file that may be missing.
func removed(path string) error {
	if err := os.Remove(path); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// unlock releases a lock. Closing the file is not enough: a child that is being started shares
// it until it executes its program.
func unlock(f *os.File) error {
	return errors.Join(unix.Flock(int(f.Fd()), unix.LOCK_UN), f.Close())
}
