package natstest

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"
)

// Client speaks the server's protocol directly and follows no rule of the log. A
// failure ends its test.
type Client struct {
	t     testing.TB
	conn  net.Conn
	lines *bufio.Reader
}

// Connect connects to a server by its URL, until the test ends.
func Connect(t testing.TB, url string) *Client {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(url, "nats://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(2 * time.Minute)); err != nil {
		t.Fatal(err)
	}
	c := &Client{t: t, conn: conn, lines: bufio.NewReader(conn)}
	fmt.Fprint(conn, "CONNECT {\"verbose\":false,\"pedantic\":false,\"headers\":true}\r\nSUB acks 1\r\n")
	return c
}

// Publish returns the sequence at which the stream has stored a message. A nil header
// is none.
func (c *Client) Publish(subject string, header map[string][]string, data []byte) uint64 {
	c.t.Helper()
	head := ""
	if header != nil {
		head = "NATS/1.0\r\n"
		for name, values := range header {
			for _, v := range values {
				head += name + ": " + v + "\r\n"
			}
		}
		head += "\r\n"
	}
	return c.Send(subject, head, data)
}

// Send publishes with a raw header; "" is none.
func (c *Client) Send(subject, head string, data []byte) uint64 {
	c.t.Helper()
	if head == "" {
		fmt.Fprintf(c.conn, "PUB %s acks %d\r\n%s\r\n", subject, len(data), data)
	} else {
		fmt.Fprintf(c.conn, "HPUB %s acks %d %d\r\n%s%s\r\n", subject, len(head), len(head)+len(data), head, data)
	}
	for {
		line, err := c.lines.ReadString('\n')
		if err != nil {
			c.t.Fatalf("publish to %s: %v", subject, err)
		}
		var n int
		switch {
		case strings.HasPrefix(line, "-ERR"):
			c.t.Fatalf("publish to %s: %s", subject, line)
		case !strings.HasPrefix(line, "MSG acks 1 "):
			continue
		}
		if _, err := fmt.Sscanf(line, "MSG acks 1 %d", &n); err != nil {
			c.t.Fatal(line, err)
		}
		text := make([]byte, n)
		if _, err := io.ReadFull(c.lines, text); err != nil {
			c.t.Fatal(err)
		}
		var ack struct {
			Seq   uint64          `json:"seq"`
			Error json.RawMessage `json:"error"`
		}
		if err := json.Unmarshal(text, &ack); err != nil || ack.Seq == 0 {
			c.t.Fatalf("publish to %s: %s", subject, text)
		}
		return ack.Seq
	}
}
