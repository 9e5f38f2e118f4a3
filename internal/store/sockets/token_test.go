package sockets

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestTokenModes: no umask lets another user read the token.
func TestTokenModes(t *testing.T) {
	for _, umask := range []int{0, 0o002, 0o022, 0o077} {
		t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
		was := syscall.Umask(umask)
		token, err := ShareToken("127.0.0.1:1", strings.Repeat("0a1b", 16))
		syscall.Umask(was)
		if err != nil {
			t.Fatal(err)
		}
		info, err := os.Lstat(token.Path)
		dir, derr := os.Lstat(filepath.Dir(token.Path))
		if err != nil || derr != nil || info.Mode() != 0o600 || dir.Mode().Perm() != 0o700 {
			t.Errorf("umask %03o: %v, %v, %v, %v", umask, info.Mode(), err, dir.Mode(), derr)
		}
		if err := token.Withdraw(); err != nil {
			t.Error(err)
		}
	}
}

// TestTokenSearch: the search covers only URLs for which a token can be for that server alone.
func TestTokenSearch(t *testing.T) {
	for url, want := range map[string]string{
		"nats://127.0.0.1:4222":                       "127.0.0.1:4222",
		"tls://127.0.0.1":                             "127.0.0.1:4222",
		"nats://[::1]:1":                              "[::1]:1",
		"nats://localhost:1":                          "127.0.0.1:1 [::1]:1",
		"nats://token@127.0.0.1:1":                    "",
		"nats://127.0.0.1:1,nats://127.0.0.1:2":       "",
		"nats://10.0.0.1:1":                           "",
		"nats://example.org:1":                        "",
		"nats://127.0.0.1.example.org:1":              "",
		"nats://localhost.example.org:1":              "",
		"nats://..%2f..%2fetc:1":                      "",
		"nats://user:password@localhost:4222/ignored": "",
	} {
		if got := strings.Join(SearchToken(url).addresses, " "); got != want {
			t.Errorf("%s: %q, want %q", url, got, want)
		}
	}
}
