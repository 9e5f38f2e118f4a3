package api

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/durable"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// UsersFile are the users of a file for [ReadUsers], as it is now: a change counts from the
// next call of [UsersFile.Of]. While the file cannot be read, no user is known. Its methods
// may be called concurrently.
type UsersFile struct {
	path string
	log  *slog.Logger

	mu  sync.Mutex
	was os.FileInfo
	has roster
	why string // the file cannot be read
}

var _ Known = (*UsersFile)(nil)

// OpenUsers opens a file of users, which must be readable now.
func OpenUsers(path string, log *slog.Logger) (*UsersFile, error) {
	if _, err := ReadUsers(path); err != nil {
		return nil, err
	}
	return &UsersFile{path: path, log: log}, nil
}

// Of implements [Known].
func (f *UsersFile) Of(digest [sha256.Size]byte) (User, error) { return f.now().Of(digest) }

// List implements [Known].
func (f *UsersFile) List() Users { return f.now().users }

// now returns the content of the file.
func (f *UsersFile) now() roster {
	f.mu.Lock()
	defer f.mu.Unlock()
	is, err := os.Stat(f.path)
	if err == nil && f.was != nil && os.SameFile(is, f.was) && is.ModTime().Equal(f.was.ModTime()) && is.Size() == f.was.Size() && is.Mode() == f.was.Mode() {
		return f.has
	}
	f.was, f.has = nil, roster{}
	if err == nil {
		f.has, err = readRoster(f.path)
	}
	why := ""
	if err != nil {
		why = err.Error()
	} else {
		f.was = is
	}
	if why != f.why && why != "" {
		f.log.Error("file of users cannot be read; no user is known", "error", err)
	}
	f.why = why
	return f.has
}

// both are the users of several sources.
type both []Known

// Of implements [Known]. An error names what happened to the token, if one of the sources knows.
func (b both) Of(digest [sha256.Size]byte) (u User, err error) {
	err = ErrUnknown
	for _, known := range b {
		had, why := known.Of(digest)
		switch {
		case why == nil:
			u, err = had, nil
		case err != nil && errors.Is(err, ErrUnknown):
			err = why
		}
	}
	return u, err
}

// List implements [Known].
func (b both) List() (all Users) {
	for _, known := range b {
		all = append(all, known.List()...)
	}
	return all
}

// Issue is a token to be made.
type Issue struct {
	Name    string
	Role    Role
	Token   string    // name of the token; may be empty
	Expires time.Time // zero: never
	// Keep, when set, is called first with the token. Its error leaves the file as it is.
	Keep func(token string) error
	// Record, when set, is called before the file has the token. Its error leaves the file as
	// it is.
	Record func(User) error
}

// IssueToken adds a token for a user to a file, which it makes if there is none, and returns
// the token. The file keeps only the digest.
func IssueToken(ctx context.Context, path string, i Issue) (token string, u User, err error) {
	bad := func(err error) (string, User, error) { return "", User{}, fmt.Errorf("issue a token: %w", err) }
	random := make([]byte, 32)
	_, _ = rand.Read(random) // never fails
	token = hex.EncodeToString(random)
	u = NewUser(i.Name, i.Role, token)
	u.Token, u.Expires = i.Token, i.Expires.UTC().Truncate(time.Second)
	if i.Expires.IsZero() {
		u.Expires = time.Time{}
	}
	if err := ValidUser(i.Name); err != nil {
		return bad(err)
	}
	if i.Token != "" && !userName.MatchString(i.Token) {
		return bad(problem.Errorf(problem.Invalid, "%q is no name of a token: want letters, digits and . _ -, at most 64", i.Token))
	}
	if _, err := parseUser(strings.TrimSpace(u.line())); err != nil {
		return bad(problem.Wrap(problem.Invalid, err))
	}
	if u.expired(time.Now()) {
		return bad(problem.Errorf(problem.Invalid, "the token would expire at %s, which has passed", u.Expires.Format(time.RFC3339)))
	}
	if i.Keep != nil {
		if err := i.Keep(token); err != nil {
			return bad(err)
		}
	}
	recorded := false
	err = changeUsers(ctx, path, func(r roster, lines []string) ([]string, error) {
		for _, had := range r.users {
			switch {
			case had.Name != u.Name:
			case had.Role != u.Role:
				return nil, problem.Errorf(problem.Conflict, "user %s is %s: revoke that first", u.Name, had.Role)
			case had.Token == u.Token && u.Token != "":
				return nil, problem.Errorf(problem.Conflict, "user %s has a token %s already: revoke it, or give another name", u.Name, u.Token)
			}
		}
		if i.Record != nil {
			if err := i.Record(u); err != nil {
				return nil, fmt.Errorf("nothing was issued, because the log does not have it: %w", err)
			}
			recorded = true
		}
		return append(lines, u.line()), nil
	})
	if err != nil && recorded {
		err = fmt.Errorf("%w; the log has the grant of the token %s, which was not issued", err, u.Hash())
	}
	if err != nil {
		return bad(err)
	}
	return token, u, nil
}

// RevokeTokens removes tokens of a user from a file, and returns them: the one with a name or
// hash, or all if that is empty. The file keeps their digests for a month.
func RevokeTokens(ctx context.Context, path, name, token string) (gone Users, err error) {
	if err := ValidUser(name); err != nil {
		return nil, fmt.Errorf("revoke: %w", err)
	}
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("revoke: %w", noUsers(path))
	} else if err != nil {
		return nil, fmt.Errorf("revoke: %w", err)
	}
	err = changeUsers(ctx, path, func(_ roster, lines []string) (kept []string, err error) {
		for _, line := range lines {
			u, err := parseUser(strings.TrimSpace(line))
			if err != nil || u.Name != name || token != "" && u.Token != token && u.Hash() != token {
				kept = append(kept, line)
				continue
			}
			gone = append(gone, u)
			kept = append(kept, revoked{u.Name, u.digest, time.Now()}.line())
		}
		switch {
		case len(gone) == 0 && token != "":
			err = problem.Errorf(problem.NotFound, "%s has no token %s of user %s: `ckptstore access list --output wide` lists tokens", path, token, name)
		case len(gone) == 0:
			err = problem.Errorf(problem.NotFound, "%s has no user %s", path, name)
		}
		return kept, err
	})
	if err != nil {
		return nil, fmt.Errorf("revoke: %w", err)
	}
	return gone, nil
}

// RevokedTokens returns the hashes of the tokens of a user that a file has as revoked: of the one with
// a hash, or of all if that is empty.
func RevokedTokens(path, name, hash string) (hashes []string, err error) {
	r, err := readRoster(path)
	for _, gone := range r.revoked {
		if h := (User{digest: gone.digest}).Hash(); gone.name == name && (hash == "" || hash == h) {
			hashes = append(hashes, h)
		}
	}
	return hashes, err
}

// lockWithin bounds the wait for another process that changes the file.
const lockWithin = 10 * time.Second

// fileOf returns the file of users that a path names, which may be a link. There may be no file.
func fileOf(path string) (string, error) {
	file, err := filepath.EvalSymlinks(path)
	if !errors.Is(err, fs.ErrNotExist) {
		return file, err
	}
	if _, err := os.Lstat(path); err == nil {
		return "", problem.Errorf(problem.Invalid, "file of users: %s is a link to a file that does not exist: name the file itself, or remove the link", path)
	}
	return path, nil
}

// openLock opens the file that processes lock to change a file of users. It follows no link, and
// takes no file of a user other than this one and the owner of the file of users.
func openLock(path, users string) (*os.File, error) {
	bad := func(why string) error {
		return problem.Errorf(problem.Denied, "lock of a file of users: %s %s: remove it, and keep the file in a directory where only its owner writes", path, why)
	}
	lock, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
	if errors.Is(err, unix.ELOOP) {
		return nil, bad("is a link")
	}
	if err != nil {
		return nil, err
	}
	owner := os.Geteuid()
	if info, err := os.Stat(users); err == nil {
		owner = ownerOf(info)
	}
	info, err := lock.Stat()
	switch {
	case err != nil:
	case !info.Mode().IsRegular():
		err = bad("is no file")
	case ownerOf(info) == owner:
	case ownerOf(info) != os.Geteuid():
		err = bad(fmt.Sprintf("belongs to user %d", ownerOf(info)))
	default: // root has made it
		err = lock.Chown(owner, -1)
	}
	if err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	return lock, nil
}

func ownerOf(info os.FileInfo) int { return int(info.Sys().(*syscall.Stat_t).Uid) }

// changeUsers replaces a file of users, by a file that only its owner can read. Only one process at a
// time changes it.
func changeUsers(ctx context.Context, path string, change func(has roster, lines []string) ([]string, error)) (err error) {
	if path, err = fileOf(path); err != nil {
		return err
	}
	lock, err := openLock(path+".lock", path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lock.Close()) }()
	ctx, cancel := context.WithTimeout(ctx, lockWithin)
	defer cancel()
	for {
		err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			break
		}
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return fmt.Errorf("lock %s.lock: %w", path, err)
		}
		if ctx.Err() != nil {
			return problem.Errorf(problem.Locked, "lock %s.lock: another process holds it: repeat the command when that has ended", path)
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
		}
	}
	var has roster
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	} else if err == nil {
		has, err = readRoster(path) // also its mode
	}
	if err != nil {
		return err
	}
	if len(text) > 0 && !bytes.HasSuffix(text, []byte("\n")) {
		text = append(text, '\n')
	}
	var lines []string
	for line := range strings.Lines(string(text)) {
		if !bygone(strings.TrimSpace(line)) {
			lines = append(lines, line)
		}
	}
	if lines, err = change(has, lines); err != nil {
		return err
	}
	return durable.WritePrivate(path, []byte(strings.Join(lines, "")))
}

// bygone reports whether a line is of a token that was revoked, or has expired, long ago.
func bygone(line string) bool {
	before := time.Now().Add(-keepRevoked)
	if gone, ok := parseRevoked(line); ok {
		return gone.at.Before(before)
	}
	u, err := parseUser(line)
	return err == nil && u.expired(before)
}
