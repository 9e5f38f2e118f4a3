package store

import (
	"bufio"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"
)

// TestSocketCannotRewriteTheLog: a process that reaches the owner's socket can append and
// read, but cannot delete, purge, update or restore a stream.
func TestSocketCannotRewriteTheLog(t *testing.T) {
	t.Parallel()
	dir := made(t)
	s := open(t, dir)
	must(t, s, "run", begun("step-1"))
	before, err := s.Log.Last(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	c, err := readCard(dir)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := net.Dial("unix", c.Log)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(conn, "CONNECT {\"verbose\":false,\"pedantic\":false,\"headers\":true}\r\nSUB _INBOX.0123456789abcdef.* 1\r\n")
	attacks := 0
	for _, stream := range []string{"CKPT", "KV_CKPT_LEASES", "KV_CKPT_CURSORS", "any"} {
		for _, verb := range []string{"DELETE", "PURGE", "UPDATE", "RESTORE", "MSG.DELETE", "PEER.REMOVE"} {
			attacks++
			const body = `{"name":"CKPT","subjects":["ckpt.>"],"seq":1}`
			fmt.Fprintf(conn, "PUB $JS.API.STREAM.%s.%s _INBOX.0123456789abcdef.x %d\r\n%s\r\n", verb, stream, len(body), body)
		}
	}
	// Each gets an error answer, since a client may not read permission denials; a refused
	// event gets only that answer.
	const roll = "NATS/1.0\r\nNats-Rollup: all\r\n\r\n"
	fmt.Fprintf(conn, "HPUB ckpt._._.s.store.created _INBOX.0123456789abcdef.x %d %d\r\n%s{}\r\n", len(roll), len(roll)+2, roll)
	attacks++
	const less = `{"name":"CKPT","subjects":["ckpt.>"],"max_msgs":1}`
	fmt.Fprintf(conn, "PUB $JS.API.STREAM.CREATE.CKPT _INBOX.0123456789abcdef.x %d\r\n%s\r\n", len(less), less)

	denied, answered := 0, 0
	lines := bufio.NewScanner(conn)
	for (denied < attacks || answered <= attacks) && lines.Scan() {
		line := lines.Text()
		switch {
		case strings.HasPrefix(line, "-ERR 'Permissions Violation for Publish"):
			denied++
		case strings.HasPrefix(line, "MSG _INBOX"):
			if lines.Scan(); !strings.Contains(lines.Text(), `"error"`) {
				t.Errorf("an attack was answered: %s", lines.Text())
			}
			answered++
		}
	}
	if err := lines.Err(); err != nil || denied != attacks || answered != attacks+1 {
		t.Errorf("%d of %d attacks denied, %d answered with an error, want one more than that; %v", denied, attacks, answered, err)
	}
	if after, err := s.Log.Last(t.Context()); err != nil || after != before {
		t.Errorf("the log had %d events and has %d, %v", before, after, err)
	}
	must(t, s, "run", begun("step-2"))
	shut(t, s)
	s = open(t, dir)
	if after, err := s.Log.Last(t.Context()); err != nil || after != before+1 {
		t.Errorf("opened again, the log has %d events, want %d, %v", after, before+1, err)
	}
}
