package jetlog

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// The options that durability depends on, as the running server has them.
func TestServerOptions(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "log")
	s := startServer(t, dir)
	c := s.ns.JetStreamConfig()
	if !c.SyncAlways || c.StoreDir != filepath.Join(dir, "jetstream") || c.MaxStore < 1<<40 {
		t.Errorf("server runs with %+v", c)
	}
	if addr := s.ns.Addr(); addr != nil {
		t.Errorf("server listens on %s", addr)
	}
	info, err := os.Stat(dir)
	if err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("directory: %v, %v", info.Mode(), err)
	}
}

// A started server answers for its streams at once.
func TestServerIsReady(t *testing.T) {
	dir := t.TempDir()
	s := startServer(t, dir)
	l := connectTo(t, Options{Dial: dial(s)})
	if err := l.Create(t.Context(), created(t, "store-1")); err != nil {
		t.Fatal(err)
	}
	for range 10 {
		l.Close()
		s.Shutdown()
		s = startServer(t, dir)
		l = connectTo(t, Options{Dial: dial(s)})
		if _, err := l.streamInfo(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

func TestServerNotStarted(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	// The directory of the streams is a file: the server starts and then dies.
	blocked := t.TempDir()
	if err := os.WriteFile(filepath.Join(blocked, "jetstream"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for name, tc := range map[string]struct {
		ctx context.Context
		dir string
	}{
		"no directory": {t.Context(), ""},
		"a file":       {t.Context(), file},
		"blocked":      {t.Context(), blocked},
		"too late":     {ended, t.TempDir()},
	} {
		begin := time.Now()
		s, err := StartServer(tc.ctx, ServerOptions{Dir: tc.dir})
		if err == nil {
			s.Shutdown()
		}
		if err == nil || !strings.Contains(err.Error(), tc.dir) || time.Since(begin) > 5*time.Second {
			t.Errorf("%s: %v after %s", name, err, time.Since(begin))
		}
	}
}

// Clients on a unix socket share the server, and find the next owner of the socket by
// themselves.
func TestServe(t *testing.T) {
	dir, sockets := t.TempDir(), t.TempDir()
	path, first := filepath.Join(sockets, "owner.sock"), created(t, "store-1")
	own := func() (*Server, chan error) {
		s := startServer(t, dir)
		owner := connectTo(t, s.OwnerOptions())
		if err := owner.Create(t.Context(), first); err != nil {
			t.Fatal(err)
		}
		if err := owner.CreateBuckets(t.Context()); err != nil {
			t.Fatal(err)
		}
		owner.Close()
		listener, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() { ended <- s.Serve(listener) }()
		return s, ended
	}
	s, ended := own()
	lost := make(chan error, 10)
	l := connectTo(t, Options{
		Dial: func(ctx context.Context) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", path)
		},
		OnDisconnect: func(err error) { lost <- err },
	})
	if _, _, err := l.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	facts := factsOf(t, 100)
	if _, err := l.Append(t.Context(), facts...); err != nil {
		t.Fatal(err)
	}

	s.Shutdown()
	if err := <-ended; err != nil {
		t.Fatalf("serve: %v", err)
	}
	if err, ok := <-lost; !ok {
		t.Fatal(err)
	}
	pending := make(chan error, 1)
	go func() {
		seqs, err := l.Append(context.Background(), facts[0], fact(t, 101))
		if err == nil && (seqs[0] != 2 || seqs[1] != 102) {
			err = errors.New("wrong sequences")
		}
		pending <- err
	}()
	_, ended = own()
	if err := <-pending; err != nil {
		t.Fatal(err)
	}
	if got := readAll(t, l, 1, 102); got[101].Sequence != 102 {
		t.Fatalf("read %d events", len(got))
	}
	_ = ended
}

func TestServeAfterShutdown(t *testing.T) {
	s := startServer(t, t.TempDir())
	s.Shutdown()
	s.Shutdown()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Serve(listener); err != nil {
		t.Fatal(err)
	}
	if _, err := listener.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Fatalf("the listener is not closed: %v", err)
	}
	if _, err := s.Dial(); err == nil {
		t.Fatal("a connection to a server that is down")
	}
}
