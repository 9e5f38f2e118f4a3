package api

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/problem/system"
)

// TestTokens issues and revokes tokens in a file that a server has open: each change counts
// at once, other lines stay, and no user is known while the file cannot be read.
func TestTokens(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "users")
	issue := func(name string, role Role) (string, error) {
		token, _, err := IssueToken(t.Context(), path, Issue{Name: name, Role: role})
		return token, err
	}
	first, err := issue("ada", Operator)
	if err != nil {
		t.Fatal(err)
	}
	var logged bytes.Buffer
	f, err := OpenUsers(path, slog.New(slog.NewTextHandler(&logged, nil)))
	if err != nil {
		t.Fatal(err)
	}
	knows := func(token, name string, role Role) {
		t.Helper()
		u, err := f.Of(sha256.Sum256([]byte(token)))
		if (err == nil) != (name != "") || u.Name != name || u.Role != role {
			t.Errorf("the token is of %+v, %v, want %q", u, err, name)
		}
	}
	knows(first, "ada", Operator)
	second, err := issue("ada", Operator)
	if err != nil {
		t.Fatal(err)
	}
	rosa, err := issue("rosa", Reader)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := issue("rosa", Admin); err == nil || !strings.Contains(err.Error(), "revoke that first") {
		t.Errorf("another role: %v", err)
	}
	if _, err := issue("a b", Reader); err == nil {
		t.Error("a name of two words")
	}
	knows(second, "ada", Operator)
	knows(rosa, "rosa", Reader)
	text, err := os.ReadFile(path)
	if err != nil || strings.Contains(string(text), rosa) {
		t.Errorf("the file has the token: %s, %v", text, err)
	}
	if gone, err := RevokeTokens(t.Context(), path, "ada", ""); err != nil || len(gone) != 2 {
		t.Errorf("revoked %v, %v", gone, err)
	}
	if _, err := f.Of(sha256.Sum256([]byte(first))); !errors.Is(err, ErrRevoked) {
		t.Errorf("a revoked token: %v", err)
	}
	knows(first, "", 0)
	knows(second, "", 0)
	knows(rosa, "rosa", Reader)
	hash := NewUser("ada", Operator, second).Hash()
	for want, h := range map[int]string{2: "", 1: hash, 0: "other"} {
		if got, err := RevokedTokens(path, "ada", h); err != nil || len(got) != want || want == 1 && got[0] != hash {
			t.Errorf("revoked of %q: %v, %v", h, got, err)
		}
	}
	if got, err := RevokedTokens(path, "rosa", ""); err != nil || len(got) != 0 {
		t.Errorf("revoked of another user: %v, %v", got, err)
	}
	if _, err := RevokeTokens(t.Context(), path, "ada", ""); err == nil {
		t.Error("revoked again")
	}
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	knows(rosa, "", 0)
	knows(rosa, "", 0)
	if n := strings.Count(logged.String(), "chmod 600"); n != 1 {
		t.Errorf("logged %d times: %s", n, logged.String())
	}
	if err := os.Chmod(path, 0o600); err != nil {
		t.Fatal(err)
	}
	knows(rosa, "rosa", Reader)
	if gone, err := RevokeTokens(t.Context(), path, "rosa", ""); err != nil || len(gone) != 1 {
		t.Errorf("revoked %v, %v", gone, err)
	}
	knows(rosa, "", 0)
	again, err := issue("rosa", Admin)
	if err != nil {
		t.Fatal(err)
	}
	knows(again, "rosa", Admin)
}

// TestNamedTokens: a token can have a name and an end. One is revoked without the others. What
// was revoked or has expired is refused for that reason, and forgotten after a month. Nothing is
// issued that cannot be recorded.
func TestNamedTokens(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "users")
	var recorded []string
	issue := func(token string, expires time.Time) (string, error) {
		secret, _, err := IssueToken(t.Context(), path, Issue{Name: "ada", Role: Auditor, Token: token, Expires: expires, Record: func(u User) error {
			if _, err := os.Stat(path); err == nil && strings.Contains(read(t, path), u.Hash()) {
				t.Error("recorded after the file has the token")
			}
			recorded = append(recorded, u.Token+" "+u.Hash())
			return nil
		}})
		return secret, err
	}
	laptop, err := issue("laptop", time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	phone, err := issue("phone", time.Now().Add(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	for what, err := range map[string]error{
		"has a token laptop already": second(issue("laptop", time.Time{})),
		"which has passed":           second(issue("old", time.Now().Add(-time.Second))),
		"no name of a token":         second(issue("a b", time.Time{})),
	} {
		if err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("%v, want %s", err, what)
		}
	}
	before := read(t, path)
	_, _, err = IssueToken(t.Context(), path, Issue{Name: "eva", Role: Reader, Record: func(User) error { return errors.New("no log") }})
	if err == nil || !strings.Contains(err.Error(), "nothing was issued") || read(t, path) != before {
		t.Errorf("without a record: %v", err)
	}
	f, err := OpenUsers(path, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	of := func(token string) (User, error) { return f.Of(sha256.Sum256([]byte(token))) }
	u, err := of(phone)
	if err != nil || u.Token != "phone" || u.Expires.IsZero() || fmt.Sprint(recorded[1]) != "phone "+u.Hash() {
		t.Errorf("%+v, %v; recorded %v", u, err, recorded)
	}
	if gone, err := RevokeTokens(t.Context(), path, "ada", "laptop"); err != nil || len(gone) != 1 || gone[0].Token != "laptop" {
		t.Errorf("revoked %+v, %v", gone, err)
	}
	if _, err := of(laptop); !errors.Is(err, ErrRevoked) {
		t.Errorf("revoked: %v", err)
	}
	if _, err := of(phone); err != nil {
		t.Errorf("the other token: %v", err)
	}
	if _, err := RevokeTokens(t.Context(), path, "ada", "laptop"); err == nil || !strings.Contains(err.Error(), "no token laptop") {
		t.Errorf("revoked again: %v", err)
	}
	age := func(by time.Duration) { // both lines
		t.Helper()
		text := read(t, path)
		now := time.Now()
		text = strings.ReplaceAll(text, u.Expires.Format(time.RFC3339), now.Add(-by).UTC().Format(time.RFC3339))
		for line := range strings.Lines(text) {
			if gone, ok := parseRevoked(strings.TrimSpace(line)); ok {
				gone.at = now.Add(-by)
				text = strings.ReplaceAll(text, line, gone.line())
			}
		}
		if u.Expires = now.Add(-by).UTC().Truncate(time.Second); os.WriteFile(path, []byte(text), 0o600) != nil {
			t.Fatal("not written")
		}
	}
	age(time.Minute)
	if _, err := of(phone); !errors.Is(err, ErrExpired) {
		t.Errorf("expired: %v", err)
	}
	if _, err := of("another"); !errors.Is(err, ErrUnknown) {
		t.Errorf("unknown: %v", err)
	}
	age(keepRevoked + time.Hour)
	if _, err := issue("new", time.Time{}); err != nil {
		t.Fatal(err)
	}
	for _, token := range []string{laptop, phone} {
		if _, err := of(token); !errors.Is(err, ErrUnknown) {
			t.Errorf("after a month: %v", err)
		}
	}
	if n := strings.Count(read(t, path), "\n"); n != 1 {
		t.Errorf("the file has %d lines: %s", n, read(t, path))
	}
}

func second(_ string, err error) error { return err }

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// TestRoster: a line that could confine a token is not passed over.
func TestRoster(t *testing.T) {
	t.Parallel()
	sum := strings.Repeat("ab", 32)
	for line, want := range map[string]string{
		"ada reader " + sum: "",
		"ada auditor " + sum + " token=a expires=2026-12-24T12:00:00Z": "",
		"# revoked ada " + sum + " 2026-12-24T12:00:00Z":               "",
		"# a note":                                 "",
		"# revoked ada":                            "",
		"ada reader":                               "got 2 words",
		"ada root " + sum:                          "want reader, operator, admin or auditor",
		"ada reader " + sum[:62]:                   "64 hexadecimal digits",
		"a/b reader " + sum:                        "want letters",
		"ada reader " + sum + " x":                 "want token=NAME or expires=TIME",
		"ada reader " + sum + " runs=a*":           "want token=NAME or expires=TIME",
		"ada reader " + sum + " expires=tomorrow":  "want a time such as",
		"ada reader " + sum + " token=":            "want letters",
		"ada reader " + sum + "\nada admin " + sum: "another role",
	} {
		r, err := parseRoster(line)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%q: %v, want %q", line, err, want)
		}
		for _, u := range r.users {
			if again, err := parseUser(strings.TrimSpace(u.line())); err != nil || again != u {
				t.Errorf("%q is written as %q: %v", line, u.line(), err)
			}
		}
	}
}

// TestUsersFileByLink: the file that a link names is changed, and the link stays. The lock of all
// names is that of the file.
func TestUsersFileByLink(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file, link := filepath.Join(dir, "real"), filepath.Join(dir, "users")
	if err := os.Symlink("real", link); err != nil {
		t.Fatal(err)
	}
	if _, _, err := IssueToken(t.Context(), link, Issue{Name: "ada", Role: Reader}); err == nil || !strings.Contains(err.Error(), "a link to a file that does not exist") {
		t.Errorf("a link to nothing: %v", err)
	}
	token, _, err := IssueToken(t.Context(), file, Issue{Name: "ada", Role: Reader})
	if err != nil {
		t.Fatal(err)
	}
	f, err := OpenUsers(file, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := RevokeTokens(t.Context(), link, "ada", ""); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Of(sha256.Sum256([]byte(token))); !errors.Is(err, ErrRevoked) {
		t.Errorf("revoked by the link: %v", err)
	}
	if info, err := os.Lstat(link); err != nil || info.Mode().Type() != os.ModeSymlink {
		t.Errorf("the link: %v, %v", info, err)
	}
	if _, err := os.Lstat(link + ".lock"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a second lock: %v", err)
	}
}

// TestUsersFileOfGroup: a file of users is its owner's alone, also in a directory where files are a
// group's. When root changes it, it stays its owner's.
func TestUsersFileOfGroup(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Fatal("this test gives files to another user: run it as root")
	}
	const another = 20002
	dir := t.TempDir()
	path := filepath.Join(dir, "users")
	if err := os.Chmod(dir, os.ModeSetgid|0o770); err != nil {
		t.Fatal(err)
	}
	issue := func(name string) {
		t.Helper()
		if _, _, err := IssueToken(t.Context(), path, Issue{Name: name, Role: Reader}); err != nil {
			t.Fatal(err)
		}
	}
	issue("ada")
	if err := errors.Join(os.Chown(path, another, -1), os.Remove(path+".lock")); err != nil {
		t.Fatal(err)
	}
	issue("rosa")
	issue("eva") // by a lock that is the owner's
	if users, err := ReadUsers(path); err != nil || len(users) != 3 {
		t.Errorf("%v, %v", users, err)
	}
	for _, name := range []string{path, path + ".lock"} {
		info, err := os.Stat(name)
		if err != nil || info.Mode() != 0o600 || ownerOf(info) != another {
			t.Errorf("%s: %v of %d, %v", name, info.Mode(), ownerOf(info), err)
		}
	}
}

// TestPlantedLockOfUsers: a lock that another user has put there is neither followed nor taken.
func TestPlantedLockOfUsers(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Fatal("this test gives files to another user: run it as root")
	}
	for what, plant := range map[string]func(lock, other string) error{
		"is a link": func(lock, other string) error { return os.Symlink(other, lock) },
		"belongs to user 20002": func(lock, _ string) error {
			return errors.Join(os.WriteFile(lock, nil, 0o600), os.Chown(lock, 20002, -1))
		},
		"is no file": func(lock, _ string) error { return syscall.Mkfifo(lock, 0o600) },
	} {
		dir := t.TempDir()
		path, other := filepath.Join(dir, "users"), filepath.Join(dir, "other")
		if err := plant(path+".lock", other); err != nil {
			t.Fatal(err)
		}
		if _, _, err := IssueToken(t.Context(), path, Issue{Name: "ada", Role: Reader}); system.KindOf(err) != problem.Denied || !strings.Contains(err.Error(), what) {
			t.Errorf("%s: %v", what, err)
		}
		for _, name := range []string{path, other} {
			if _, err := os.Lstat(name); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("%s: %s: %v", what, name, err)
			}
		}
	}
}

// TestRevokeLast: a file without users is right, and a server opens it. A name that no user can
// have, and a file that does not exist, are errors with the next step.
func TestRevokeLast(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "users")
	if _, err := RevokeTokens(t.Context(), path, "ada", ""); system.KindOf(err) != problem.NotFound || !strings.Contains(err.Error(), "access issue") {
		t.Errorf("no file: %v", err)
	}
	if _, err := OpenUsers(path, slog.New(slog.DiscardHandler)); system.KindOf(err) != problem.NotFound || !strings.Contains(err.Error(), "access issue") {
		t.Errorf("no file: %v", err)
	}
	if _, err := os.Lstat(path + ".lock"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a lock of no file: %v", err)
	}
	if err := os.WriteFile(path, []byte("# a note\n#\n# another\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	token, _, err := IssueToken(t.Context(), path, Issue{Name: "ada", Role: Reader})
	if err != nil {
		t.Fatal(err)
	}
	before := read(t, path)
	for _, name := range []string{"#", "", "a b", "uid-0"} {
		if _, err := RevokeTokens(t.Context(), path, name, ""); system.KindOf(err) != problem.Invalid || read(t, path) != before {
			t.Errorf("%q: %v", name, err)
		}
	}
	if _, err := RevokeTokens(t.Context(), path, "ada", ""); err != nil {
		t.Fatal(err)
	}
	if users, err := ReadUsers(path); err != nil || len(users) != 0 {
		t.Errorf("%v, %v", users, err)
	}
	f, err := OpenUsers(path, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Of(sha256.Sum256([]byte(token))); !errors.Is(err, ErrRevoked) {
		t.Errorf("revoked: %v", err)
	}
}
