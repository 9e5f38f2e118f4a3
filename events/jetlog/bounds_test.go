package jetlog

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/front"
)

// caller is a client's raw connection to a listener.
type caller struct {
	t    *testing.T
	conn net.Conn
	in   *bufio.Reader
}

func call(t *testing.T, addr string) *caller {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	return &caller{t, conn, bufio.NewReader(conn)}
}

func (c *caller) say(format string, args ...any) {
	c.t.Helper()
	if _, err := fmt.Fprintf(c.conn, format, args...); err != nil {
		c.t.Fatal(err)
	}
}

// hears reads lines until one contains text. The end of the connection counts as a
// line.
func (c *caller) hears(text string) {
	c.t.Helper()
	var all []string
	for {
		line, err := c.in.ReadString('\n')
		if err != nil {
			line = "END"
		}
		if all = append(all, line); strings.Contains(line, text) {
			return
		}
		if err != nil {
			c.t.Fatalf("it heard %q (%v), want %q", all, err, text)
		}
		if line == "PING\r\n" {
			_, _ = io.WriteString(c.conn, "PONG\r\n")
		}
	}
}

// enter sends the token.
func (c *caller) enter() {
	c.t.Helper()
	c.say("CONNECT {\"auth_token\":%q,\"headers\":true,\"no_responders\":true}\r\nPING\r\n", token)
	c.hears("PONG")
}

// TestBounds checks that the costs of clients to the owner are limited, and that a
// client beyond a limit gets an error.
func TestBounds(t *testing.T) {
	t.Parallel()
	within := func(t *testing.T, b front.Limits, admit func() error) string {
		t.Helper()
		s, err := StartServer(t.Context(), ServerOptions{Dir: t.TempDir(), Listen: &Listen{Address: "127.0.0.1:0", Token: token}, Bounds: b, Admit: admit})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(s.Shutdown)
		l := connectTo(t, Options{Dial: dial(s)})
		if err := l.Create(t.Context(), created(t, "store-1")); err != nil {
			t.Fatal(err)
		}
		addr, err := s.Listen(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return addr.String()
	}
	const private = "_INBOX.0123456789abcdef"
	t.Run("connections", func(t *testing.T) {
		t.Parallel()
		for _, b := range []front.Limits{{Connections: 2}, {PerAddress: 2}} {
			addr := within(t, b, nil)
			first, second := call(t, addr), call(t, addr)
			first.enter()
			second.enter()
			call(t, addr).hears("maximum connections exceeded")
			_ = second.conn.Close()
			for again := true; again; { // until its end has arrived
				c := call(t, addr)
				line, err := c.in.ReadString('\n')
				again = err != nil || !strings.HasPrefix(line, "INFO")
			}
			first.say("PING\r\n")
			first.hears("PONG")
		}
	})
	t.Run("unauthenticated connections make room", func(t *testing.T) {
		t.Parallel()
		addr := within(t, front.Limits{Waiting: 2, Greeting: time.Hour}, nil)
		silent := call(t, addr)
		silent.hears("INFO")
		known := call(t, addr)
		known.enter()
		call(t, addr).hears("INFO")
		call(t, addr).hears("INFO")
		silent.hears("END")
		known.say("PING\r\n")
		known.hears("PONG")
	})
	t.Run("time to authenticate", func(t *testing.T) {
		t.Parallel()
		addr := within(t, front.Limits{Greeting: 50 * time.Millisecond}, nil)
		call(t, addr).hears("Authentication Timeout")
	})
	t.Run("silence", func(t *testing.T) {
		t.Parallel()
		addr := within(t, front.Limits{Idle: 300 * time.Millisecond}, nil)
		c := call(t, addr)
		c.enter()
		line, err := c.in.ReadString('\n')
		if err != nil || line != "PING\r\n" {
			t.Fatalf("%q, %v", line, err)
		}
		c.hears("Stale Connection") // nothing answered
	})
	t.Run("frames", func(t *testing.T) {
		t.Parallel()
		addr := within(t, front.Limits{Frame: 50 * time.Millisecond}, nil)
		for text, says := range map[string]string{
			"PUB ckpt.a 2000000\r\n":                      "Maximum Payload Violation",
			"HPUB ckpt.a 100000 100000\r\n":               "Maximum Payload Violation",
			strings.Repeat("x", 5000) + "\r\n":            "maximum control line",
			"PUB " + strings.Repeat("x", 3000) + " 0\r\n": "maximum control line",
			"EVIL\r\n":                     "Unknown Protocol Operation",
			"PING\nPING\r\n":               "Parser Error",
			"PUB ckpt.a 1\r\nxyz\r\n":      "Parser Error",
			"PUB ckpt.a 100\r\nhalf of it": "Stale Connection",
		} {
			c := call(t, addr)
			c.enter()
			c.say("%s", text)
			c.hears(says)
			c.hears("END")
		}
	})
	t.Run("subscriptions and consumers", func(t *testing.T) {
		t.Parallel()
		addr := within(t, front.Limits{Subscriptions: 2, Consumers: 1}, nil)
		c := call(t, addr)
		c.enter()
		c.say("SUB %s.* 1\r\nSUB %s.x 2\r\nSUB %s.y 3\r\n", private, private, private)
		c.hears("maximum subscriptions exceeded")
		consumer := func(name string) {
			body := fmt.Sprintf(`{"stream_name":"CKPT","config":{"name":%q,"deliver_policy":"by_start_sequence","opt_start_seq":1,"ack_policy":"none","replay_policy":"instant","num_replicas":1,"mem_storage":true,"inactive_threshold":60000000000},"action":"create"}`, name)
			c.say("PUB $JS.API.CONSUMER.CREATE.CKPT.%s %s.z %d\r\n%s\r\n", name, private, len(body), body)
		}
		consumer("one")
		c.hears(`"name":"one"`)
		consumer("two")
		c.hears("maximum consumers limit reached")
		c.say("PUB $JS.API.CONSUMER.DELETE.CKPT.one %s.z 0\r\n\r\n", private)
		c.hears(`"success":true`)
		consumer("two")
		c.hears(`"name":"two"`)
		// A consumer of another session is invisible.
		other := call(t, addr)
		other.enter()
		other.say("SUB %sx.* 1\r\nPUB $JS.API.CONSUMER.DELETE.CKPT.two %sx.z 0\r\n\r\n", private, private)
		other.hears("consumer not found")
	})
	t.Run("a full disk", func(t *testing.T) {
		t.Parallel()
		addr := within(t, front.Limits{}, func() error { return fmt.Errorf("the disk is full: %w", syscall.ENOSPC) })
		l := connectTo(t, Options{URL: "nats://" + addr, Token: token})
		if _, _, err := l.Open(t.Context()); err != nil {
			t.Fatal(err)
		}
		for n := range 2 {
			if _, err := l.Append(t.Context(), factsOf(t, 1+20*n)...); !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "the disk is full") {
				t.Errorf("%d facts: %v", 1+20*n, err)
			}
		}
		if _, err := l.Decide(t.Context(), begun(t, "step-1"), 0); err != nil {
			t.Errorf("a decision: %v", err)
		}
	})
	t.Run("a batch", func(t *testing.T) {
		t.Parallel()
		addr := within(t, front.Limits{Batch: 64 << 10, Payload: 32 << 10, Bytes: 256 << 10}, nil)
		l := connectTo(t, Options{URL: "nats://" + addr, Token: token})
		if _, err := l.Append(t.Context(), factsOf(t, 500)...); !errors.Is(err, ErrRefused) {
			t.Errorf("a batch that is too large: %v", err)
		}
		if _, err := l.Append(t.Context(), factsOf(t, 20)...); err != nil {
			t.Errorf("a batch: %v", err)
		}
	})
}

// TestInboxOfALiveClient checks that an inbox belongs to its client while that lives,
// and to the same client on a new connection.
func TestInboxOfALiveClient(t *testing.T) {
	t.Parallel()
	_, addr := listening(t, Listen{Token: token})
	const private = "_INBOX.0123456789abcdef"
	first := call(t, addr)
	first.enter()
	first.say("SUB %s.* 1\r\nPING\r\n", private)
	first.hears("PONG")
	go func() { // alive: it answers
		for {
			line, err := first.in.ReadString('\n')
			if err != nil {
				return
			}
			if line == "PING\r\n" {
				_, _ = io.WriteString(first.conn, "PONG\r\n")
			}
		}
	}()
	thief := call(t, addr)
	thief.enter()
	thief.say("SUB %s.* 1\r\n", private)
	thief.hears(`Permissions Violation for Subscription to "` + private + `.*"`)

	// A connection that is half open answers nothing.
	const other = "_INBOX.fedcba9876543210"
	silent := call(t, addr)
	silent.enter()
	silent.say("SUB %s.* 1\r\nPING\r\n", other)
	silent.hears("PONG")
	again := call(t, addr)
	again.enter()
	again.say("SUB %s.* 1\r\nPUB $JS.API.STREAM.NAMES %s.x 20\r\n{\"subject\":\"ckpt.>\"}\r\n", other, other)
	again.hears("MSG " + other + ".x 1")
	silent.hears("END")
}
