package launch_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"testing"
	"time"
)

// TestHalfOpenConnectionsEnd: the trainer closes a connection to a rank's socket
// that sends no request, or only the beginning of one, and serves the rank
// nevertheless.
func TestHalfOpenConnectionsEnd(t *testing.T) {
	t.Parallel()
	_, ds := doors(t, 1)
	d := ds[0]
	var conns []net.Conn
	for i := range 20 {
		c, err := net.Dial("unix", d.socket)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.Close() }()
		if i%2 == 1 {
			if _, err := fmt.Fprint(c, "POST /v1/hello HTTP/1.1\r\nHost: trainer\r\n"); err != nil {
				t.Fatal(err)
			}
		}
		conns = append(conns, c)
	}
	if status, reply := d.post("hello", `{"protocols":[3]}`); status != 200 {
		t.Errorf("hello in parallel: %d %s", status, reply)
	}
	for i, c := range conns {
		// Far longer than the trainer's limit.
		if err := c.SetReadDeadline(time.Now().Add(3 * time.Minute)); err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, c); err != nil {
			var timeout net.Error
			if errors.As(err, &timeout) && timeout.Timeout() {
				t.Fatalf("connection %d is still held", i)
			}
		}
	}
}
