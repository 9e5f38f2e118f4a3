package jetlog

import (
	"crypto/sha256"
	"errors"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nats-io/nats-server/v2/server"
)

// encrypted starts a foreign server on a directory that it encrypts.
func encrypted(t *testing.T, dir, key string, port int) *server.Server {
	t.Helper()
	ns, err := server.NewServer(&server.Options{
		ServerName: "theirs", Host: "127.0.0.1", Port: port, NoSigs: true, NoLog: true,
		JetStream: true, StoreDir: dir, SyncAlways: true, JetStreamKey: key, JetStreamCipher: server.ChaCha,
	})
	if err != nil {
		t.Fatal(err)
	}
	ns.Start()
	t.Cleanup(func() {
		ns.Shutdown()
		ns.WaitForShutdown()
	})
	return ns
}

// sums returns the digests of the stream's files.
func sums(t *testing.T, dir string) map[string][sha256.Size]byte {
	t.Helper()
	all := map[string][sha256.Size]byte{}
	err := filepath.WalkDir(filepath.Join(dir, "jetstream"), func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() || !strings.Contains(path, Stream) || filepath.Base(path) == "index.db" {
			return err // the index is a cache
		}
		text, err := os.ReadFile(path)
		all[path] = sha256.Sum256(text)
		return err
	})
	if err != nil || len(all) < 3 {
		t.Fatalf("files of the stream: %d, %v", len(all), err)
	}
	return all
}

// TestWrongKey opens a server's encrypted directory with another key. The server then
// shows no stream, and would destroy the files if a stream were created.
func TestWrongKey(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	ns := encrypted(t, dir, "right", server.RANDOM_PORT)
	addr, err := netip.ParseAddrPort(ns.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	restart := func(key string) {
		ns.Shutdown()
		ns.WaitForShutdown()
		ns = encrypted(t, dir, key, int(addr.Port()))
	}
	o := Options{URL: ns.ClientURL()}
	was := connectTo(t, o)
	if err := was.Create(t.Context(), created(t, "store-1")); err != nil {
		t.Fatal(err)
	}
	facts := factsOf(t, 50)
	if _, err := was.Append(t.Context(), facts...); err != nil {
		t.Fatal(err)
	}
	ns.Shutdown()
	ns.WaitForShutdown()
	before := sums(t, dir)

	restart("wrong")
	// A client that has known the log, and a client that connects now.
	now := connectTo(t, o)
	_, _, open := now.Open(t.Context())
	_, info := was.Info(t.Context())
	_, appended := was.Append(t.Context(), fact(t, 99))
	_, decided := was.Decide(t.Context(), begun(t, "step-1"), 0)
	_, leased := was.Lease(t.Context(), "run.x", nil, 1e9)
	for what, err := range map[string]error{"open": open, "info": info, "append": appended, "decide": decided, "lease": leased} {
		if !errors.Is(err, ErrNoLog) || !strings.Contains(err.Error(), "another encryption key; nothing was created or changed") {
			t.Errorf("%s: %v", what, err)
		}
	}
	for name := range now.js.StreamNames(t.Context()).Name() {
		t.Errorf("stream %s was made", name)
	}
	if after := sums(t, dir); !maps.Equal(before, after) {
		t.Errorf("the files of the log were changed: %d before, %d after", len(before), len(after))
	}

	restart("right")
	if _, err := was.Append(t.Context(), fact(t, 51)); err != nil {
		t.Fatal(err)
	}
	if got := readAll(t, connectTo(t, o), 1, 52); len(got) != 52 || got[50].ID != facts[49].ID {
		t.Errorf("%d events", len(got))
	}
}
