package store

import (
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"time"
)

// TestOwnerEndsHalfOpenConnections: the owner closes connections to its sockets
// that send no request.
func TestOwnerEndsHalfOpenConnections(t *testing.T) {
	t.Parallel()
	dir := made(t)
	open(t, dir)
	c, err := readCard(dir)
	if err != nil {
		t.Fatal(err)
	}
	// One test waits for both: a subtest would start after most other tests, and all would wait
	// for it.
	var wait sync.WaitGroup
	defer wait.Wait()
	for name, path := range map[string]string{"log": c.Log, "api": c.API} {
		conn, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		wait.Go(func() {
			defer func() { _ = conn.Close() }()
			// Far longer than the owner's limits.
			if err := conn.SetReadDeadline(time.Now().Add(3 * time.Minute)); err != nil {
				t.Error(err)
				return
			}
			_, err := io.Copy(io.Discard, conn)
			var timeout net.Error
			if errors.As(err, &timeout) && timeout.Timeout() {
				t.Errorf("%s: the connection is still held", name)
			}
		})
	}
}
