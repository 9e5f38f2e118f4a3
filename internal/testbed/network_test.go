//go:build testbed || outlive

package testbed_test

import (
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/testbed"
	"github.com/ckptstore/ckptstore/internal/testbed/ethernet"
)

// TestTCP: nodes reach each other through the switch, and no other host.
func TestTCP(t *testing.T) {
	t.Run("segments", func(t *testing.T) { testTCP(t, testbed.Options{}) })
	t.Run("offload", func(t *testing.T) { testTCP(t, testbed.Options{Offload: true}) })
}

func testTCP(t *testing.T, o testbed.Options) {
	ctx, bed := newBed(t, o)
	nodes := start(ctx, t, bed, "a", "b")
	a, b := nodes[0], nodes[1]
	from, to := connect(ctx, t, b, a)
	if host, _, _ := net.SplitHostPort(to.RemoteAddr().String()); host != b.Addr().String() {
		t.Errorf("a sees a connection of %s", host)
	}
	const size = 8 << 20
	go func() {
		var end io.Closer = from
		defer end.Close()
		_, _ = from.Write(make([]byte, size))
	}()
	if n, err := io.Copy(io.Discard, to); n != size || err != nil {
		t.Errorf("received %d of %d bytes: %v", n, size, err)
	}
	c := bed.Switch().Counters("b", "a")
	if c.Bytes < size || c.Packets == 0 {
		t.Errorf("the switch has counted %+v", c)
	}
	if long := c.Bytes/c.Packets > 9100; long != o.Offload {
		t.Errorf("frames of %d bytes on average with an MTU of 9000", c.Bytes/c.Packets)
	}
	if out := output(ctx, t, b, "cat /proc/net/route | wc -l"); out != "2\n" {
		t.Errorf("b has routes to other networks: %q", out)
	}
}

// TestOneWay: data passes in one direction only, and TCP recovers when the other one is
// healed.
func TestOneWay(t *testing.T) {
	ctx, bed := newBed(t, testbed.Options{})
	nodes := start(ctx, t, bed, "a", "b")
	a, b := connect(ctx, t, nodes[0], nodes[1])
	fabric := bed.Switch()
	fabric.Update("a", "b", func(c *ethernet.Cable) { c.Down = true })
	before := fabric.Counters("a", "b")
	send := func(from net.Conn, text string) {
		t.Helper()
		if _, err := io.WriteString(from, text); err != nil {
			t.Fatal(err)
		}
	}
	receive := func(to net.Conn, want string) {
		t.Helper()
		got := make([]byte, len(want))
		if _, err := io.ReadFull(to, got); err != nil || string(got) != want {
			t.Fatalf("received %q, %v, want %q", got, err, want)
		}
	}
	send(a, "lost at first")
	send(b, "arrives")
	receive(a, "arrives")
	eventually(t, "lost packets", func() bool { return fabric.Counters("a", "b").Dropped > before.Dropped })
	if after := fabric.Counters("a", "b"); after.Packets != before.Packets {
		t.Errorf("the direction that is down has carried packets: %+v, then %+v", before, after)
	}
	if n := fabric.Counters("b", "a"); n.Dropped != 0 {
		t.Errorf("the other direction has lost packets: %+v", n)
	}
	fabric.Heal("a", "b")
	receive(b, "lost at first")
}

// TestSlow: delay and rate act on what nodes send. The bounds are those that load
// cannot break.
func TestSlow(t *testing.T) {
	ctx, bed := newBed(t, testbed.Options{})
	nodes := start(ctx, t, bed, "a", "b")
	a, b := connect(ctx, t, nodes[0], nodes[1])
	trip := func(size int) time.Duration {
		t.Helper()
		began := time.Now()
		go func() { _, _ = a.Write(make([]byte, size)) }()
		if _, err := io.ReadFull(b, make([]byte, size)); err != nil {
			t.Fatal(err)
		}
		return time.Since(began)
	}
	bed.Switch().Update("a", "b", func(c *ethernet.Cable) { c.Delay = 50 * time.Millisecond })
	if took := trip(1); took < 50*time.Millisecond {
		t.Errorf("a byte took %v with a delay of 50 ms", took)
	}
	bed.Switch().Update("a", "b", func(c *ethernet.Cable) { *c = ethernet.Cable{Rate: 1 << 20} })
	if took := trip(256 << 10); took < 250*time.Millisecond {
		t.Errorf("256 KiB took %v at a rate of 1 MiB/s", took)
	}
}

// TestFrozenNode: the kernel of a frozen node still acknowledges what arrives, so its
// peers notice nothing.
func TestFrozenNode(t *testing.T) {
	ctx, bed := newBed(t, testbed.Options{})
	nodes := start(ctx, t, bed, "a", "b")
	a, _ := connect(ctx, t, nodes[0], nodes[1])
	if err := nodes[1].Freeze(); err != nil {
		t.Fatal(err)
	}
	before := bed.Switch().Counters("b", "a").Packets
	if _, err := io.WriteString(a, "text"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "an acknowledgement", func() bool { return bed.Switch().Counters("b", "a").Packets > before })
	if err := nodes[1].Thaw(); err != nil {
		t.Fatal(err)
	}
}

// TestPowerOffIsSilent: a peer of a node without power receives nothing, not even the
// end of its connection.
func TestPowerOffIsSilent(t *testing.T) {
	ctx, bed := newBed(t, testbed.Options{})
	nodes := start(ctx, t, bed, "a", "b")
	l, err := nodes[0].Listen(ctx, "tcp", nodes[0].Addr().String()+":7000")
	if err != nil {
		t.Fatal(err)
	}
	closeLater(t, l)
	if err := nodes[1].Command(ctx, "bash", "-c", "exec 3<>/dev/tcp/a/7000; sleep 1000").Start(); err != nil {
		t.Fatal(err)
	}
	a, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	closeLater(t, a)
	if err := nodes[1].PowerOff(); err != nil {
		t.Fatal(err)
	}
	before := bed.Switch().Counters("b", "a")
	if _, err := io.WriteString(a, "text"); err != nil {
		t.Fatal(err)
	}
	if after := bed.Switch().Counters("b", "a"); after != before {
		t.Errorf("a node without power has sent: %+v, then %+v", before, after)
	}
	if err := a.SetReadDeadline(time.Now().Add(50 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if n, err := a.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the peer has noticed the power off: %d, %v", n, err)
	}
}
