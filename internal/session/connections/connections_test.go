package connections

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"
)

// TestSettle: a request that is being served, and one on a connection that has sent none
// yet, are waited for; an idle connection is not.
func TestSettle(t *testing.T) {
	var c Tracker
	begun, end := make(chan struct{}), make(chan struct{})
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/slow" {
			close(begun)
			<-end
		}
		_, _ = fmt.Fprint(w, "answered")
	}))
	server.Config.ConnState = c.Track
	server.Start()
	defer server.Close()
	dial := func() net.Conn {
		conn, err := net.Dial("tcp", server.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		return conn
	}
	send := func(conn net.Conn, path string) {
		if _, err := fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: x\r\n\r\n", path); err != nil {
			t.Fatal(err)
		}
	}
	answered := func(conn net.Conn) {
		t.Helper()
		reply, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil || reply.StatusCode != http.StatusOK {
			t.Fatalf("reply %v, %v", reply, err)
		}
		_ = reply.Body.Close()
	}
	idle := dial()
	send(idle, "/")
	answered(idle)
	slow := dial()
	send(slow, "/slow")
	<-begun
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := c.Settle(ctx); err == nil {
		t.Error("a request that is being served was not waited for")
	}
	settled := make(chan error, 1)
	go func() { settled <- c.Settle(t.Context()) }()
	close(end)
	answered(slow)
	select {
	case err := <-settled:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Error("the idle connections are waited for")
	}
}
