package api

import (
	"bytes"
	"crypto/sha256"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestTokens issues and revokes tokens in a file that a server has open: each change counts
// at once, other lines stay, and no user is known while the file cannot be read.
func TestTokens(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "users")
	first, err := IssueToken(t.Context(), path, "ada", Operator)
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
		u, ok := f.Of(sha256.Sum256([]byte(token)))
		if ok != (name != "") || u.Name != name || u.Role != role {
			t.Errorf("the token is of %+v, %v, want %q", u, ok, name)
		}
	}
	knows(first, "ada", Operator)
	second, err := IssueToken(t.Context(), path, "ada", Operator)
	if err != nil {
		t.Fatal(err)
	}
	rosa, err := IssueToken(t.Context(), path, "rosa", Reader)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := IssueToken(t.Context(), path, "rosa", Admin); err == nil || !strings.Contains(err.Error(), "revoke that first") {
		t.Errorf("another role: %v", err)
	}
	if _, err := IssueToken(t.Context(), path, "a b", Reader); err == nil {
		t.Error("a name of two words")
	}
	knows(second, "ada", Operator)
	knows(rosa, "rosa", Reader)
	text, err := os.ReadFile(path)
	if err != nil || strings.Contains(string(text), rosa) {
		t.Errorf("the file has the token: %s, %v", text, err)
	}
	if n, err := RevokeTokens(t.Context(), path, "ada"); err != nil || n != 2 {
		t.Errorf("revoked %d, %v", n, err)
	}
	knows(first, "", 0)
	knows(second, "", 0)
	knows(rosa, "rosa", Reader)
	if _, err := RevokeTokens(t.Context(), path, "ada"); err == nil {
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
	if n, err := RevokeTokens(t.Context(), path, "rosa"); err != nil || n != 1 {
		t.Errorf("revoked %d, %v", n, err)
	}
	knows(rosa, "", 0)
	again, err := IssueToken(t.Context(), path, "rosa", Admin)
	if err != nil {
		t.Fatal(err)
	}
	knows(again, "rosa", Admin)
}
