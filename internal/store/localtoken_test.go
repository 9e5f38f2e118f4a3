package store

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/store/sockets"
)

// onLoopback opens a store that listens with a token it has made.
func onLoopback(t *testing.T, dir string) (s *Store, url, token string) {
	t.Helper()
	s, addr := listening(t, dir, &jetlog.Listen{Address: "127.0.0.1:0"})
	path, err := sockets.TokenFile(addr)
	if err != nil {
		t.Fatal(err)
	}
	return s, "nats://" + addr, path
}

// TestTokenMade: a listener on loopback makes a token. Clients of this user find it, and clients
// without it are refused.
func TestTokenMade(t *testing.T) {
	t.Parallel()
	dir := made(t)
	owner, url, path := onLoopback(t, dir)
	for name, want := range map[string]os.FileMode{path: 0o600, filepath.Dir(path): os.ModeDir | 0o700} {
		if info, err := os.Lstat(name); err != nil || info.Mode() != want {
			t.Errorf("%s: %v, %v, want %v", name, info.Mode(), err, want)
		}
	}
	if log, err := jetlog.Connect(t.Context(), jetlog.Options{URL: url}); !errors.Is(err, jetlog.ErrNotAllowed) {
		t.Errorf("without the token: %v, %v", log, err)
	}
	refused(t, Options{Location: url, Access: &Access{Token: secretToken}}, jetlog.ErrNotAllowed, "does not know this token")
	remote := openWith(t, Options{Location: url, Access: &Access{}})
	defer shut(t, remote)
	// The address replaces the host name: the token is not for other servers that the name may
	// stand for.
	shut(t, openWith(t, Options{Location: strings.Replace(url, "127.0.0.1", "localhost", 1), Access: &Access{}}))

	// The next owner there makes another token, which connected clients find too.
	before := read(t, path)
	address := strings.TrimPrefix(url, "nats://")
	bound := make(chan net.Addr, 1)
	next := openWith(t, Options{Location: dir, Listen: &jetlog.Listen{Address: address}, Bound: func(a net.Addr) { bound <- a }})
	defer shut(t, next)
	shut(t, owner)
	<-bound
	if after := read(t, path); after == before || len(strings.TrimSpace(after)) < 64 {
		t.Errorf("the next owner has the token %q", after)
	}
	must(t, remote, "run", begun("step-1"))
}

// TestTokenWithdrawn: the token of a former listener opens nothing.
func TestTokenWithdrawn(t *testing.T) {
	t.Setenv("XDG_RUNTIME_DIR", shortDir(t, "run")) // owners in other tests sweep their own
	dir := made(t)
	s, url, path := onLoopback(t, dir)
	left := read(t, path)
	shut(t, s)
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the token outlives its owner: %v", err)
	}
	// The token of a killed owner is not locked. It is not sent, and is swept.
	write(t, path, left)
	if _, at, err := sockets.SearchToken(url).Find(); at != "" || err == nil || !strings.Contains(err.Error(), "was killed") {
		t.Errorf("the token of a dead owner is found for %q: %v", at, err)
	}
	onLoopback(t, made(t))
	if text, err := os.ReadFile(path); err == nil && string(text) == left {
		t.Error("the token of a dead owner stays")
	}
}

// TestTokenNotPrivate: a file that another user may have written is not used, and the refusal
// names the reason.
func TestTokenNotPrivate(t *testing.T) {
	if os.Getuid() != 0 {
		t.Fatal("this test gives files to another user: run it as root")
	}
	const other = 20002
	for name, tc := range map[string]struct {
		spoil func(path string) error
		says  string
	}{
		"another user's file":      {func(path string) error { return os.Chown(path, other, other) }, "not private"},
		"a file that others see":   {func(path string) error { return os.Chmod(path, 0o644) }, "not private"},
		"another user's directory": {func(path string) error { return os.Chown(filepath.Dir(path), other, other) }, "not private"},
		"a directory others write": {func(path string) error { return os.Chmod(filepath.Dir(path), 0o777) }, "not private"},
		"a link": {func(path string) error {
			return errors.Join(os.Rename(path, path+"x"), os.Symlink(path+"x", path))
		}, "too many levels"},
		"no file": {os.Remove, "no token of this user was found"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("XDG_RUNTIME_DIR", shortDir(t, "run"))
			t.Setenv("TMPDIR", shortDir(t, "tmp"))
			_, url, path := onLoopback(t, made(t))
			if err := tc.spoil(path); err != nil {
				t.Fatal(err)
			}
			refused(t, Options{Location: url, Access: &Access{}}, jetlog.ErrNotAllowed,
				"none was given", tc.says, os.Getenv("XDG_RUNTIME_DIR"), "`ckptstore serve` prints the path", EnvTokenFile)
		})
	}
}

// TestTokenOfAService: clients find an owner in another environment than theirs, such as a
// service.
func TestTokenOfAService(t *testing.T) {
	tmp := shortDir(t, "tmp")
	t.Setenv("XDG_RUNTIME_DIR", "")
	t.Setenv("TMPDIR", tmp)
	_, url, path := onLoopback(t, made(t))
	if !strings.HasPrefix(path, tmp) {
		t.Fatalf("the token is in %s", path)
	}
	t.Setenv("XDG_RUNTIME_DIR", shortDir(t, "session"))
	shut(t, openWith(t, Options{Location: url, Access: &Access{}}))
}
