package ethernet_test

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/ckptstore/ckptstore/internal/testbed/ethernet"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// station is a device that records what it receives, and when.
type station struct {
	address byte
	frames  chan []byte // to the switch
	began   time.Time

	mu       sync.Mutex
	received []string // TEXT@MILLISECONDS
}

var _ io.ReadWriter = (*station)(nil)

func (s *station) Read(buf []byte) (int, error) {
	frame, ok := <-s.frames
	if !ok {
		return 0, io.EOF
	}
	return copy(buf, frame), nil
}

func (s *station) Write(frame []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.received = append(s.received, fmt.Sprintf("%s@%d", strings.TrimRight(string(frame[14:]), " "), time.Since(s.began).Milliseconds()))
	return len(frame), nil
}

func (s *station) close() { close(s.frames) }

// send sends a frame of 100 bytes and waits until the switch has accepted it. The
// address 0xff stands for all stations.
func (s *station) send(to byte, text string) {
	frame := fmt.Appendf(nil, "%-100s", strings.Repeat("\x00", 14)+text)
	frame[0], frame[5], frame[6], frame[11] = 2, to, 2, s.address
	if to == 0xff {
		frame[0] = 0xff
	}
	s.frames <- frame
	synctest.Wait()
}

// take returns what arrived since the last take.
func (s *station) take() string {
	synctest.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	got := strings.Join(s.received, " ")
	s.received = nil
	return got
}

// network runs a test on a switch with stations a, b and c, whose addresses are known.
func network(t *testing.T, seed uint64, test func(t *testing.T, s *ethernet.Switch, a, b, c *station)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := ethernet.New(seed)
		all := make([]*station, 3)
		for i := range all {
			all[i] = &station{address: byte(i + 1), frames: make(chan []byte), began: time.Now()}
			defer all[i].close()
			if err := s.Attach(string(rune('a'+i)), all[i]); err != nil {
				t.Fatal(err)
			}
		}
		for _, x := range all {
			x.send(0xff, "hello")
		}
		for _, x := range all {
			if got := x.take(); got != "hello@0 hello@0" {
				t.Errorf("a broadcast of two stations: station %d received %q", x.address, got)
			}
		}
		test(t, s, all[0], all[1], all[2])
	})
}

func check(t *testing.T, what string, s *station, want string) {
	t.Helper()
	if got := s.take(); got != want {
		t.Errorf("%s: station %d received %q, want %q", what, s.address, got, want)
	}
}

func TestLearning(t *testing.T) {
	network(t, 0, func(t *testing.T, s *ethernet.Switch, a, b, c *station) {
		a.send(2, "to b")
		check(t, "a known address", b, "to b@0")
		check(t, "a known address", c, "")
		a.send(9, "to 9")
		check(t, "an unknown address", b, "to 9@0")
		check(t, "an unknown address", c, "to 9@0")
		if n := s.Counters("a", "b"); n != (ethernet.Counters{Packets: 3, Bytes: 300}) {
			t.Errorf("counters are %+v", n)
		}
		if err := s.Attach("a", a); err == nil {
			t.Error("two stations have one name")
		}
	})
}

func TestDelay(t *testing.T) {
	network(t, 0, func(t *testing.T, s *ethernet.Switch, a, b, c *station) {
		s.Update("a", "b", func(c *ethernet.Cable) { c.Delay = 30 * time.Millisecond })
		a.send(2, "1")
		b.send(1, "back")
		time.Sleep(10 * time.Millisecond) //nolint:forbidigo // the clock of the test's bubble
		a.send(2, "2")
		check(t, "on the way", b, "")
		check(t, "the other direction", a, "back@0")
		if n := s.Counters("a", "b"); n.Held != 2 {
			t.Errorf("counters are %+v", n)
		}
		time.Sleep(time.Second) //nolint:forbidigo // the clock of the test's bubble
		check(t, "arrived", b, "1@30 2@40")
		// A shorter delay does not let later frames overtake.
		a.send(2, "3")
		s.Update("a", "b", func(c *ethernet.Cable) { c.Delay = 0 })
		a.send(2, "4")
		time.Sleep(time.Second) //nolint:forbidigo // the clock of the test's bubble
		check(t, "in order", b, "3@1040 4@1040")
		_ = c
	})
}

func TestRate(t *testing.T) {
	network(t, 0, func(t *testing.T, s *ethernet.Switch, a, b, c *station) {
		// 100 bytes in 10 ms, and room for two frames that wait.
		s.Update("a", "b", func(c *ethernet.Cable) { c.Rate, c.Queue = 10_000, 200 })
		for i := range 4 {
			a.send(2, fmt.Sprint(i))
		}
		time.Sleep(time.Second) //nolint:forbidigo // the clock of the test's bubble
		check(t, "a serial line", b, "0@10 1@20")
		if n := s.Counters("a", "b"); n.Dropped != 2 {
			t.Errorf("counters are %+v", n)
		}
		s.Update("a", "b", func(c *ethernet.Cable) { c.Burst, c.Queue = 300, 0 })
		for i := range 5 {
			a.send(2, fmt.Sprint(i))
		}
		time.Sleep(time.Second) //nolint:forbidigo // the clock of the test's bubble
		check(t, "a burst", b, "0@1000 1@1000 2@1000 3@1010 4@1020")
		_ = c
	})
}

func TestOneWay(t *testing.T) {
	network(t, 0, func(t *testing.T, s *ethernet.Switch, a, b, c *station) {
		s.Update("a", "b", func(c *ethernet.Cable) { c.Delay = time.Second })
		a.send(2, "on its way")
		s.Update("a", "b", func(c *ethernet.Cable) { c.Down = true })
		a.send(2, "lost")
		b.send(1, "arrives")
		time.Sleep(2 * time.Second) //nolint:forbidigo // the clock of the test's bubble
		check(t, "the direction that is down", b, "")
		check(t, "the other direction", a, "arrives@0")
		if n, back := s.Counters("a", "b"), s.Counters("b", "a"); n.Dropped != 2 || back.Dropped != 0 {
			t.Errorf("counters are %+v and %+v", n, back)
		}
		s.Heal("a", "b")
		if set := s.Cable("a", "b"); set != (ethernet.Cable{Delay: time.Second}) {
			t.Errorf("a healed cable is %+v", set)
		}
		_ = c
	})
}

func TestFreeze(t *testing.T) {
	network(t, 0, func(t *testing.T, s *ethernet.Switch, a, b, c *station) {
		s.Freeze("a", "b")
		a.send(2, "1")
		b.send(1, "2")
		a.send(2, "3")
		a.send(3, "4")
		time.Sleep(time.Minute) //nolint:forbidigo // the clock of the test's bubble
		check(t, "a frozen cable", b, "")
		check(t, "another cable", c, "4@0")
		s.Heal("a", "b")
		check(t, "a thawed cable", b, "1@60000 3@60000")
		check(t, "a thawed cable", a, "2@60000")
	})
}

func TestPartition(t *testing.T) {
	network(t, 0, func(t *testing.T, s *ethernet.Switch, a, b, c *station) {
		s.Partition([]string{"a", "b"}, []string{"c"})
		a.send(0xff, "a")
		c.send(0xff, "c")
		check(t, "the same group", b, "a@0")
		check(t, "another group", c, "")
		check(t, "another group", a, "")
	})
}

// TestLoss: the seed determines which frames are lost, whatever other cables carry.
// A cable with a port carries that port of TCP and UDP in both directions, and what is neither.
func TestOnly(t *testing.T) {
	network(t, 0, func(t *testing.T, s *ethernet.Switch, a, b, _ *station) {
		s.Only("a", "b", 80)
		for _, c := range []struct {
			kind     uint16
			protocol byte
			from, to byte
			want     int
		}{
			{0x0800, 6, 80, 9, 1},
			{0x0800, 6, 9, 80, 1},
			{0x0800, 6, 9, 9, 0},
			{0x0800, 17, 9, 9, 0},
			{0x0800, 17, 9, 80, 1},
			{0x0800, 1, 9, 9, 1},
			{0x0806, 6, 9, 9, 1},
		} {
			packet := make([]byte, 60)
			packet[0], packet[9] = 0x46, c.protocol // a header of 24 bytes
			packet[25], packet[27] = c.from, c.to
			frame := append([]byte{2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, byte(c.kind >> 8), byte(c.kind)}, packet...)
			a.frames <- frame
			if got := strings.Count(b.take(), "@"); got != c.want {
				t.Errorf("%+v: %d frames arrive", c, got)
			}
		}
		s.Heal("a", "b")
		a.send(2, "healed")
		check(t, "healed", b, "healed@0")
	})
}

func TestLoss(t *testing.T) {
	run := func(seed uint64, noise bool) (got string) {
		network(t, seed, func(t *testing.T, s *ethernet.Switch, a, b, c *station) {
			for _, to := range []string{"b", "c"} {
				s.Update("a", to, func(c *ethernet.Cable) { c.Loss = 0.5 })
			}
			for i := range 100 {
				a.send(2, fmt.Sprint(i))
				if noise {
					a.send(3, "noise")
				}
			}
			got = b.take()
			if n := s.Counters("a", "b"); n.Dropped < 30 || n.Dropped > 70 {
				t.Errorf("of 100 frames %d are lost with a probability of 0.5", n.Dropped)
			}
		})
		return got
	}
	first := run(1, false)
	if again := run(1, true); again != first {
		t.Errorf("the same seed loses other frames:\n%s\n%s", first, again)
	}
	if other := run(2, false); other == first {
		t.Error("another seed loses the same frames")
	}
}

// TestDetach: a station that was detached neither sends nor receives; attached again, it
// has its settings and counters.
func TestDetach(t *testing.T) {
	network(t, 0, func(t *testing.T, s *ethernet.Switch, a, b, c *station) {
		s.Update("a", "b", func(c *ethernet.Cable) { c.Delay = time.Second })
		s.Update("b", "a", func(c *ethernet.Cable) { c.Delay = time.Second })
		a.send(2, "to a station that is gone")
		b.send(1, "of a station that is gone")
		s.Detach("b")
		s.Detach("b")
		b.send(1, "of a station that is detached")
		time.Sleep(2 * time.Second) //nolint:forbidigo // the clock of the test's bubble
		check(t, "a detached station", b, "")
		check(t, "a frame that was sent before", a, "of a station that is gone@1000")
		again := &station{address: 2, frames: make(chan []byte), began: b.began}
		defer again.close()
		if err := s.Attach("b", again); err != nil {
			t.Fatal(err)
		}
		a.send(2, "welcome")
		time.Sleep(2 * time.Second) //nolint:forbidigo // the clock of the test's bubble
		check(t, "a station that is attached again", again, "welcome@3000")
		if n := s.Counters("a", "b"); n.Dropped != 1 || n.Packets != 2 {
			t.Errorf("counters are %+v", n)
		}
		if got := strings.Fields(c.take()); !slices.Equal(got, []string{"welcome@2000"}) {
			t.Errorf("c received %q; the address of b must be unknown", got)
		}
	})
}
