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

	mu    sync.Mutex
	was   os.FileInfo
	users Users
	why   string // the file cannot be read
}

var _ Known = (*UsersFile)(nil)

// OpenUsers opens a file of users, which must be readable now.
func OpenUsers(path string, log *slog.Logger) (*UsersFile, error) {
	users, err := ReadUsers(path)
	if err != nil {
		return nil, err
	}
	return &UsersFile{path: path, log: log, users: users}, nil
}

// Of implements [Known].
func (f *UsersFile) Of(digest [sha256.Size]byte) (User, bool) { return f.now().Of(digest) }

// now returns the users of the file.
func (f *UsersFile) now() Users {
	f.mu.Lock()
	defer f.mu.Unlock()
	is, err := os.Stat(f.path)
	if err == nil && f.was != nil && os.SameFile(is, f.was) && is.ModTime().Equal(f.was.ModTime()) && is.Size() == f.was.Size() && is.Mode() == f.was.Mode() {
		return f.users
	}
	f.was, f.users = nil, nil
	if err == nil {
		f.users, err = readUsers(f.path)
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
	return f.users
}

// both are the users of several sources.
type both []Known

// Of implements [Known].
func (b both) Of(digest [sha256.Size]byte) (u User, ok bool) {
	for _, known := range b {
		if had, found := known.Of(digest); found {
			u, ok = had, true
		}
	}
	return u, ok
}

// IssueToken adds a token for a user to a file, which it makes if there is none, and returns
// the token. The file keeps only the digest.
func IssueToken(ctx context.Context, path, name string, role Role) (token string, err error) {
	if len(strings.Fields(name)) != 1 || name != strings.TrimSpace(name) {
		return "", problem.Errorf(problem.Invalid, "issue a token: %q is no name of a user: want one word", name)
	}
	random := make([]byte, 32)
	_, _ = rand.Read(random) // never fails
	token = hex.EncodeToString(random)
	sum := sha256.Sum256([]byte(token))
	line := fmt.Sprintf("%s %s %x\n", name, role, sum)
	if _, err := parseUser(strings.TrimSpace(line)); err != nil {
		return "", problem.Errorf(problem.Invalid, "issue a token: %w", err)
	}
	err = changeUsers(ctx, path, func(lines [][]byte) ([][]byte, error) {
		users, err := parseUsers(lines)
		for _, u := range users {
			if u.Name == name && u.Role != role {
				err = problem.Errorf(problem.Conflict, "user %s is %s: revoke that first", name, u.Role)
			}
		}
		return append(lines, []byte(line)), err
	})
	if err != nil {
		return "", fmt.Errorf("issue a token: %w", err)
	}
	return token, nil
}

// RevokeTokens removes all tokens of a user from a file, and returns how many there were.
func RevokeTokens(ctx context.Context, path, name string) (n int, err error) {
	if _, err := os.Stat(path); err != nil {
		return 0, fmt.Errorf("revoke: %w", err)
	}
	err = changeUsers(ctx, path, func(lines [][]byte) (kept [][]byte, err error) {
		for _, line := range lines {
			if fields := strings.Fields(string(line)); len(fields) > 0 && fields[0] == name {
				n++
				continue
			}
			kept = append(kept, line)
		}
		if n == 0 {
			err = problem.Errorf(problem.NotFound, "%s has no user %s", path, name)
		}
		return kept, err
	})
	if err != nil {
		return 0, fmt.Errorf("revoke: %w", err)
	}
	return n, nil
}

func parseUsers(lines [][]byte) (users Users, err error) {
	for _, line := range lines {
		if text := strings.TrimSpace(string(line)); text != "" && !strings.HasPrefix(text, "#") {
			u, err := parseUser(text)
			if err != nil {
				return nil, problem.Errorf(problem.Invalid, "%w", err)
			}
			users = append(users, u)
		}
	}
	return users, nil
}

// lockWithin bounds the wait for another process that changes the file.
const lockWithin = 10 * time.Second

// changeUsers replaces a file of users. Only one process at a time changes it.
func changeUsers(ctx context.Context, path string, change func(lines [][]byte) ([][]byte, error)) (err error) {
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
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	} else if err == nil {
		_, err = readUsers(path) // also its mode
	}
	if err != nil {
		return err
	}
	if len(text) > 0 && !bytes.HasSuffix(text, []byte("\n")) {
		text = append(text, '\n')
	}
	var lines [][]byte
	for line := range bytes.Lines(text) {
		lines = append(lines, line)
	}
	if lines, err = change(lines); err != nil {
		return err
	}
	return durable.Write(path, bytes.Join(lines, nil))
}
