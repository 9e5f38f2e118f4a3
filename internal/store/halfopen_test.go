package store

import (
	"errors"
	"io"
	"net"
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
	for name, path := range map[string]string{"log": c.Log, "api": c.API} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conn, err := net.Dial("unix", path)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = conn.Close() }()
			// Far longer than the owner's limits.
			if err := conn.SetReadDeadline(time.Now().Add(3 * time.Minute)); err != nil {
				t.Fatal(err)
			}
			_, err = io.Copy(io.Discard, conn)
			var timeout net.Error
			if errors.As(err, &timeout) && timeout.Timeout() {
				t.Error("the connection is still held")
			}
		})
	}
}
