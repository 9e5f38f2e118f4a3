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
	"strings"
	"sync"
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
	if len(strings.Fields(i.Name)) != 1 || i.Name != strings.TrimSpace(i.Name) {
		return bad(problem.Errorf(problem.Invalid, "%q is no name of a user: want one word", i.Name))
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
	if _, err := os.Stat(path); err != nil {
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

// lockWithin bounds the wait for another process that changes the file.
const lockWithin = 10 * time.Second

// changeUsers replaces a file of users. Only one process at a time changes it.
func changeUsers(ctx context.Context, path string, change func(has roster, lines []string) ([]string, error)) (err error) {
	lock, err := os.OpenFile(path+".lock", os.O_CREATE|os.O_RDWR, 0o600)
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
		if !errors.Is(err, unix.EWOULDBLOCK) || ctx.Err() != nil {
			return fmt.Errorf("lock %s.lock: %w", path, err)
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
	return durable.Write(path, []byte(strings.Join(lines, "")))
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
