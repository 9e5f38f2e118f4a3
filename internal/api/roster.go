package api

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/internal/private"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// A file of users has a line for each token:
//
//	NAME ROLE SHA256 [token=NAME] [expires=TIME]
//	# revoked NAME SHA256 TIME
//
// SHA256 is the digest of the token in hexadecimal, TIME is RFC 3339. The second form is a
// comment for versions of this program that do not know it. A user with several tokens has
// several lines. Empty lines and other lines that begin with # are left out.

// roster is the content of a file of users.
type roster struct {
	users   Users
	revoked []revoked
}

// revoked is a token that was revoked.
type revoked struct {
	name   string
	digest [sha256.Size]byte
	at     time.Time
}

// revokedMark begins the line of a revoked token.
const revokedMark = "# revoked "

// keepRevoked is how long a file keeps the digest of a token that was revoked or has expired, so
// that its holder is refused with the reason. Older ones are dropped at the next change of the
// file.
const keepRevoked = 30 * 24 * time.Hour

// line returns the line of a revoked token.
func (r revoked) line() string {
	return fmt.Sprintf("%s%s %x %s\n", revokedMark, r.name, r.digest, r.at.UTC().Format(time.RFC3339))
}

// line returns the line of a token.
func (u User) line() string {
	text := fmt.Sprintf("%s %s %x", u.Name, u.Role, u.digest)
	if u.Token != "" {
		text += " token=" + u.Token
	}
	if !u.Expires.IsZero() {
		text += " expires=" + u.Expires.UTC().Format(time.RFC3339)
	}
	return text + "\n"
}

// Of implements [Known].
func (r roster) Of(digest [sha256.Size]byte) (User, error) {
	u, err := r.users.Of(digest)
	if err == nil {
		return u, nil
	}
	for _, gone := range r.revoked {
		if gone.digest == digest {
			return User{}, fmt.Errorf("%w at %s", ErrRevoked, gone.at.UTC().Format(time.RFC3339))
		}
	}
	return User{}, err
}

// ReadUsers reads a file of users, which may have none. Only its owner may be able to read the
// file. The error's kind is [problem.NotFound] if there is no file.
func ReadUsers(path string) (Users, error) {
	r, err := readRoster(path)
	return r.users, err
}

func readRoster(path string) (roster, error) {
	bad := func(err error) (roster, error) {
		return roster{}, problem.Errorf(problem.Invalid, "file of users: %w", err)
	}
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return roster{}, noUsers(path)
	}
	if err == nil {
		err = private.Secret(path, info, "chmod 600 "+path)
	}
	if err != nil {
		return bad(err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return bad(err)
	}
	r, err := parseRoster(string(text))
	if err != nil {
		return bad(fmt.Errorf("%s:%w", path, err))
	}
	return r, nil
}

// noUsers reports a file of users that does not exist.
func noUsers(path string) error {
	return problem.Errorf(problem.NotFound, "file of users: %s does not exist: check the path, or make the file by `ckptstore access issue NAME --users %s`", path, path)
}

// parseRoster parses the text of a file of users. An error begins with the number of the line.
func parseRoster(text string) (r roster, err error) {
	n := 0
	for line := range strings.Lines(text) {
		n++
		line = strings.TrimSpace(line)
		if gone, ok := parseRevoked(line); ok {
			r.revoked = append(r.revoked, gone)
			continue
		}
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		u, err := parseUser(line)
		if err == nil && slices.ContainsFunc(r.users, func(other User) bool { return other.Name == u.Name && other.Role != u.Role }) {
			err = fmt.Errorf("user %s has another role already in another line", u.Name)
		}
		if err != nil {
			return roster{}, fmt.Errorf("%d: %w", n, err)
		}
		r.users = append(r.users, u)
	}
	return r, nil
}

// parseRevoked parses the line of a revoked token. Any other line is none.
func parseRevoked(line string) (r revoked, ok bool) {
	rest, ok := strings.CutPrefix(line, revokedMark)
	fields := strings.Fields(rest)
	if !ok || len(fields) != 3 {
		return r, false
	}
	digest, err := parseDigest(fields[1])
	if err != nil {
		return r, false
	}
	at, err := time.Parse(time.RFC3339, fields[2])
	return revoked{fields[0], digest, at}, err == nil
}

func parseDigest(text string) (digest [sha256.Size]byte, err error) {
	raw, err := hex.DecodeString(text)
	if err != nil || len(raw) != len(digest) {
		return digest, fmt.Errorf("digest %q: want the SHA-256 of the token in 64 hexadecimal digits: printf %%s \"$TOKEN\" | sha256sum", text)
	}
	return [sha256.Size]byte(raw), nil
}

func parseUser(line string) (u User, err error) {
	fields := strings.Fields(line)
	if len(fields) < 3 {
		return u, fmt.Errorf("want NAME ROLE SHA256, got %d words", len(fields))
	}
	u.Name = fields[0]
	if err := ValidUser(u.Name); err != nil {
		return u, err
	}
	var known bool
	if u.Role, known = RoleOf(fields[1]); !known {
		return u, fmt.Errorf("role %q of %s: want reader, operator, admin or auditor", fields[1], u.Name)
	}
	if u.digest, err = parseDigest(fields[2]); err != nil {
		return u, fmt.Errorf("user %s: %w", u.Name, err)
	}
	for _, field := range fields[3:] {
		name, value, _ := strings.Cut(field, "=")
		switch name {
		case "token":
			if u.Token = value; !userName.MatchString(value) {
				return u, fmt.Errorf("token %q of %s: want letters, digits and . _ -, at most 64", value, u.Name)
			}
		case "expires":
			if u.Expires, err = time.Parse(time.RFC3339, value); err != nil {
				return u, fmt.Errorf("user %s: expires %q: want a time such as 2026-12-24T12:00:00Z", u.Name, value)
			}
		default: // it may confine the token
			return u, fmt.Errorf("user %s: %q: want token=NAME or expires=TIME", u.Name, field)
		}
	}
	return u, nil
}
