package doctor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
)

// longestRuntime is the longest path of a store's runtime directory: with it, the
// socket paths below it fit the system's limit.
const longestRuntime = 67

func (e *examination) sockets(ctx context.Context) {
	e.check(ctx, "net.loopback", loopback)
	e.check(ctx, "net.unix", func(ctx context.Context) answer { return unixSocket(ctx, os.Getenv("XDG_RUNTIME_DIR"), os.TempDir()) })
}

func loopback(ctx context.Context) answer {
	var listen net.ListenConfig
	l, err := listen.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return problem("bring up the interface lo, and check what keeps this user from it", "listen on 127.0.0.1: %v", err)
	}
	defer func() { _ = l.Close() }()
	var dial net.Dialer
	c, err := dial.DialContext(ctx, "tcp", l.Addr().String())
	if err != nil {
		return problem("check the firewall of this machine", "connect to 127.0.0.1: %v", err)
	}
	_ = c.Close()
	return ok("listening on 127.0.0.1 and connecting works")
}

// unixSocket tries a socket where a store's sockets will be, and checks the
// length of their paths.
func unixSocket(ctx context.Context, runtime, temporary string) answer {
	const do = "set XDG_RUNTIME_DIR to a short directory of this user's own, such as /run/user/$UID"
	name := "ckptstore-" + strings.Repeat("x", 12)
	base, where := runtime, "XDG_RUNTIME_DIR"
	if info, err := os.Stat(base); base == "" || err != nil || !info.IsDir() || len(filepath.Join(base, name)) > longestRuntime {
		base, where = filepath.Join(temporary, fmt.Sprintf("ckptstore-%d", os.Getuid())), "the directory for temporary files"
	}
	if n := len(filepath.Join(base, name)); n > longestRuntime {
		return problem(do, "the runtime directory would be in %s, with a path of %d bytes: sockets need one of at most %d", base, n, longestRuntime)
	}
	at, err := nearest(base)
	if err != nil {
		return problem(do, "%v", err)
	}
	dir, err := os.MkdirTemp(at, probeName)
	if err != nil {
		return problem(do, "create a directory for sockets: %v", err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	var listen net.ListenConfig
	l, err := listen.Listen(ctx, "unix", filepath.Join(dir, "s"))
	if err != nil {
		return problem(do, "listen on a socket in %s: %v", at, err)
	}
	var dial net.Dialer
	c, err := dial.DialContext(ctx, "unix", l.Addr().String())
	if err == nil {
		err = c.Close()
	}
	if err = errors.Join(err, l.Close()); err != nil {
		return problem(do, "use a socket in %s: %v", at, err)
	}
	return ok("a socket works in %s (%s)", at, where)
}
