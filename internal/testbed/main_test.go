//go:build testbed || outlive

package testbed_test

import (
	"context"
	"io"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/ckptstore/ckptstore/internal/testbed"
)

func TestMain(m *testing.M) {
	testbed.Main()
	if os.Getenv(abandoned) != "" {
		abandon()
	}
	goleak.VerifyTestMain(m)
}

// limit bounds every wait of a test.
const limit = 30 * time.Second

// newBed returns a testbed and its context. A machine that cannot have one fails the
// test with what it lacks.
func newBed(t testing.TB, o testbed.Options) (context.Context, *testbed.Testbed) {
	t.Helper()
	bed, err := testbed.New(o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	t.Cleanup(func() {
		cancel()
		if err := bed.Close(); err != nil {
			t.Error(err)
		}
	})
	return ctx, bed
}

// start powers on nodes of these names.
func start(ctx context.Context, t testing.TB, bed *testbed.Testbed, names ...string) (nodes []*testbed.Node) {
	t.Helper()
	for _, name := range names {
		n, err := bed.Start(ctx, testbed.Config{Name: name})
		if err != nil {
			t.Fatal(err)
		}
		nodes = append(nodes, n)
	}
	return nodes
}

// output runs a shell script on a node.
func output(ctx context.Context, t testing.TB, n *testbed.Node, script string) string {
	t.Helper()
	out, err := n.Command(ctx, "/bin/sh", "-ec", script).CombinedOutput()
	if err != nil {
		t.Fatalf("%s on %s: %v\n%s", script, n.Name(), err, out)
	}
	return string(out)
}

// eventually polls until done returns true.
func eventually(t testing.TB, what string, done func() bool) {
	t.Helper()
	deadline := time.NewTimer(limit)
	defer deadline.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !done() {
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatalf("%s: not within %v", what, limit)
		}
	}
}

// read returns a file of a node.
func read(t testing.TB, n *testbed.Node, name string) (string, error) {
	t.Helper()
	path, err := n.Path(name)
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(path)
	return string(text), err
}

// closeLater closes a connection or a listener when the test ends.
func closeLater(t testing.TB, c io.Closer) {
	t.Helper()
	t.Cleanup(func() { c.Close() })
}

// connect returns the two ends of a TCP connection from one node to another.
func connect(ctx context.Context, t testing.TB, from, to *testbed.Node) (dialed, accepted net.Conn) {
	t.Helper()
	l, err := to.Listen(ctx, "tcp", netip.AddrPortFrom(to.Addr(), 0).String())
	if err != nil {
		t.Fatal(err)
	}
	closeLater(t, l)
	dialed, err = from.Dial(ctx, "tcp", l.Addr().String())
	if err != nil {
		t.Fatalf("%s does not reach %s: %v", from.Name(), to.Name(), err)
	}
	closeLater(t, dialed)
	accepted, err = l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	closeLater(t, accepted)
	for _, c := range []net.Conn{dialed, accepted} {
		if err := c.SetDeadline(time.Now().Add(limit)); err != nil {
			t.Fatal(err)
		}
	}
	return dialed, accepted
}
