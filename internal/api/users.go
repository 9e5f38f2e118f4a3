package api

import (
	"bufio"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"fmt"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/internal/private"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// Role is what a user may do. A role may do everything that the roles before it may.
type Role int

// The roles.
const (
	Reader   Role = iota + 1 // reads
	Operator                 // also decides: stop, preempt, fork, pin, tag
	Admin                    // also what concerns other users
)

var roleNames = map[Role]string{Reader: "reader", Operator: "operator", Admin: "admin"}

// String returns the role's name.
func (r Role) String() string { return roleNames[r] }

// User is a user of the API.
type User struct {
	Name   string
	Role   Role
	digest [sha256.Size]byte // of the token
}

// Users are the users of a server.
type Users []User

// NewUser returns a user with a token.
func NewUser(name string, role Role, token string) User {
	return User{name, role, sha256.Sum256([]byte(token))}
}

// Known knows users by the digest of their token. Its method is called concurrently.
type Known interface {
	Of(digest [sha256.Size]byte) (User, bool)
}

var _ Known = Users(nil)

// bearer returns the user whose token a request bears.
func bearer(known Known, r *http.Request) (User, bool) {
	token, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if !ok || token == "" {
		return User{}, false
	}
	return known.Of(sha256.Sum256([]byte(token)))
}

// Of implements [Known]. It takes the same time for all wrong tokens: digests are compared,
// and all of them.
func (u Users) Of(digest [sha256.Size]byte) (User, bool) {
	found := -1
	for i := range u {
		if subtle.ConstantTimeCompare(digest[:], u[i].digest[:]) == 1 {
			found = i
		}
	}
	if found < 0 {
		return User{}, false
	}
	return u[found], true
}

// userName is the form of a user's name: it becomes a part of events.
var userName = regexp.MustCompile(`^[A-Za-z0-9._-]{1,64}$`)

// ReadUsers reads a file of users: NAME ROLE SHA256 in each line, the digest of the token in
// hexadecimal. A user with several tokens has several lines. Empty lines and lines that
// begin with # are left out. Only this user may be able to read the file.
func ReadUsers(path string) (Users, error) {
	users, err := readUsers(path)
	if err == nil && len(users) == 0 {
		err = problem.Errorf(problem.Invalid, "users of the HTTP API: %s names no user: write NAME ROLE SHA256 in a line", path)
	}
	return users, err
}

// readUsers is ReadUsers of a file that may have no user.
func readUsers(path string) (Users, error) {
	bad := func(err error) (Users, error) {
		return nil, problem.Errorf(problem.Invalid, "users of the HTTP API: %w", err)
	}
	f, err := os.Open(path)
	if err != nil {
		return bad(err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return bad(err)
	}
	if err := private.Secret(path, info, "chmod 600 "+path); err != nil {
		return bad(err)
	}
	var users Users
	lines := bufio.NewScanner(f)
	for n := 1; lines.Scan(); n++ {
		text := strings.TrimSpace(lines.Text())
		if text == "" || strings.HasPrefix(text, "#") {
			continue
		}
		u, err := parseUser(text)
		if err == nil && slices.ContainsFunc(users, func(other User) bool { return other.Name == u.Name && other.Role != u.Role }) {
			err = fmt.Errorf("user %s has another role already in another line", u.Name)
		}
		if err != nil {
			return bad(fmt.Errorf("%s:%d: %w", path, n, err))
		}
		users = append(users, u)
	}
	if err := lines.Err(); err != nil {
		return bad(err)
	}
	return users, nil
}

func parseUser(line string) (u User, err error) {
	fields := strings.Fields(line)
	if len(fields) != 3 {
		return u, fmt.Errorf("want NAME ROLE SHA256, got %d words", len(fields))
	}
	u.Name = fields[0]
	if !userName.MatchString(u.Name) {
		return u, fmt.Errorf("name %q: want letters, digits and . _ -, at most 64", u.Name)
	}
	for role, name := range roleNames {
		if name == fields[1] {
			u.Role = role
		}
	}
	if u.Role == 0 {
		return u, fmt.Errorf("role %q of %s: want reader, operator or admin", fields[1], u.Name)
	}
	digest, err := hex.DecodeString(fields[2])
	if err != nil || len(digest) != len(u.digest) {
		return u, fmt.Errorf("the digest of %s: want the SHA-256 of the token in 64 hexadecimal digits: printf %%s \"$TOKEN\" | sha256sum", u.Name)
	}
	copy(u.digest[:], digest)
	return u, nil
}

type userKey struct{}

func withUser(ctx context.Context, u User) context.Context {
	return context.WithValue(ctx, userKey{}, u)
}

// userOf returns the user who made a request.
func userOf(ctx context.Context) User {
	u, _ := ctx.Value(userKey{}).(User)
	return u
}
