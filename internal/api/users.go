package api

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/internal/problem"
)

// User is a user of the API, by one token.
type User struct {
	Name    string
	Role    Role
	Token   string    // name of the token; may be empty
	Expires time.Time // of the token; zero: never
	digest  [sha256.Size]byte
}

// Hash returns the beginning of the token's SHA-256, by which the log and commands name it.
func (u User) Hash() string { return hex.EncodeToString(u.digest[:hashBytes]) }

const hashBytes = 8

// Users are the users of a server.
type Users []User

// NewUser returns a user with a token that does not expire.
func NewUser(name string, role Role, token string) User {
	return User{Name: name, Role: role, digest: sha256.Sum256([]byte(token))}
}

// The errors of [Known].Of.
var (
	ErrUnknown = problem.New(problem.Unauthorized, "the token is not one of this server")
	ErrRevoked = problem.New(problem.Unauthorized, "the token was revoked")
	ErrExpired = problem.New(problem.Unauthorized, "the token has expired")
)

// Known knows users by the digest of their token. Its methods are called concurrently, and
// often: at each request, and for each open stream every [recheckEvery].
type Known interface {
	// Of returns the user of a token. The error is [ErrUnknown], [ErrRevoked] or [ErrExpired].
	Of(digest [sha256.Size]byte) (User, error)
	// List returns a user for each token, also for those that have expired.
	List() Users
}

var _ Known = Users(nil)

// bearer returns the user whose token a request bears.
func bearer(known Known, r *http.Request) (User, error) {
	token, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if !ok || token == "" {
		return User{}, problem.Errorf(problem.Unauthorized, "the header Authorization has no token of this server")
	}
	return known.Of(sha256.Sum256([]byte(token)))
}

// Of implements [Known]. It takes the same time for all wrong tokens: digests are compared,
// and all of them.
func (u Users) Of(digest [sha256.Size]byte) (User, error) {
	found := -1
	for i := range u {
		if subtle.ConstantTimeCompare(digest[:], u[i].digest[:]) == 1 {
			found = i
		}
	}
	switch {
	case found < 0:
		return User{}, ErrUnknown
	case u[found].expired(time.Now()):
		return User{}, fmt.Errorf("%w at %s", ErrExpired, u[found].Expires.UTC().Format(time.RFC3339))
	}
	return u[found], nil
}

// List implements [Known].
func (u Users) List() Users { return u }

func (u User) expired(now time.Time) bool { return !u.Expires.IsZero() && !now.Before(u.Expires) }

// userName is the form of a user's name: it becomes a part of events.
var userName = regexp.MustCompile(`^[A-Za-z0-9._-]{1,64}$`)

// ownPrefix begins the name of the server's own user, such as uid-1000. No user of a file has such
// a name: the source of an event is the user's name.
const ownPrefix = "uid-"

// ValidUser returns an error unless a name may be that of a user of a file.
func ValidUser(name string) error {
	if !userName.MatchString(name) {
		return problem.Errorf(problem.Invalid, "name %q: want letters, digits and . _ -, at most 64", name)
	}
	if strings.HasPrefix(name, ownPrefix) {
		return problem.Errorf(problem.Invalid, "name %q: names that begin with %s are for users of the server's machine: choose another", name, ownPrefix)
	}
	return nil
}

// Principal returns the user as a sender of events: user:NAME, or uid:N for the server's own.
func (u User) Principal() string {
	if id, own := strings.CutPrefix(u.Name, ownPrefix); own {
		return "uid:" + id
	}
	return "user:" + u.Name
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
