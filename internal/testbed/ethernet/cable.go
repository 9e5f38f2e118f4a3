package ethernet

import (
	"encoding/binary"
	"io"
	"math/rand/v2"
	"slices"
	"sync"
	"time"
)

// Cable is the state of one direction between two stations. The zero value is a perfect
// cable.
type Cable struct {
	// Delay is the time a frame travels.
	Delay time.Duration
	// Loss is the probability that a frame is lost, from 0 to 1.
	Loss float64
	// Rate limits the bytes per second; 0 is no limit. A frame is sent when the token
	// bucket of Burst bytes has enough tokens. With a Burst of 0 the cable is a serial
	// line: each frame takes its length divided by Rate.
	Rate  int64
	Burst int64
	// Queue limits the bytes that wait for tokens; 0 is [DefaultQueue]. A frame that
	// finds the queue full is lost.
	Queue int64
	// Port, unless it is 0, loses the TCP segments and UDP datagrams over IPv4 that are neither from nor to this
	// port, as a firewall does.
	Port uint16
	// Down loses all frames, also those that are on their way.
	Down bool
	// Frozen holds all frames until the cable is thawed. Then they arrive at once and
	// in order.
	Frozen bool
}

// DefaultQueue is the queue of a cable with a rate, in bytes: that of a small switch.
const DefaultQueue = 1 << 20

// maxHeld limits the memory of one cable: frames that travel or are frozen.
const maxHeld = 64 << 20

// Counters are what a cable has carried since the switch was made.
type Counters struct {
	Packets uint64 // delivered
	Bytes   uint64 // delivered, headers included
	Dropped uint64 // packets lost for any reason
	Held    int    // packets that travel, wait for tokens or are frozen now
}

// Cable returns the settings of the cable between two stations.
func (s *Switch) Cable(from, to string) Cable { return s.between(from, to).settings() }

// Counters returns the counters of the cable between two stations.
func (s *Switch) Counters(from, to string) Counters { return s.between(from, to).counters() }

// Update changes the settings of one cable. Down and Frozen act on frames that are on
// their way, the others on later frames. Stations need not be attached yet.
func (s *Switch) Update(from, to string, change func(*Cable)) { s.between(from, to).update(change) }

// UpdateBoth changes the settings of the two cables between two stations.
func (s *Switch) UpdateBoth(a, b string, change func(*Cable)) {
	s.Update(a, b, change)
	s.Update(b, a, change)
}

// Cut takes down both directions between two stations. Neither station is notified.
func (s *Switch) Cut(a, b string) { s.UpdateBoth(a, b, func(c *Cable) { c.Down = true }) }

// Freeze holds the frames of both directions between two stations.
func (s *Switch) Freeze(a, b string) { s.UpdateBoth(a, b, func(c *Cable) { c.Frozen = true }) }

// Only has both directions between two stations carry no other port of TCP and UDP than one.
func (s *Switch) Only(a, b string, port uint16) { s.UpdateBoth(a, b, func(c *Cable) { c.Port = port }) }

// Heal undoes [Switch.Cut], [Switch.Freeze] and [Switch.Only]. Delay, loss and rate stay.
func (s *Switch) Heal(a, b string) {
	s.UpdateBoth(a, b, func(c *Cable) { c.Down, c.Frozen, c.Port = false, false, 0 })
}

// Partition cuts every pair of stations that are in different groups.
func (s *Switch) Partition(groups ...[]string) {
	for i, group := range groups {
		for _, a := range group {
			for _, b := range slices.Concat(groups[i+1:]...) {
				s.Cut(a, b)
			}
		}
	}
}

// cable carries the frames of one ordered pair of stations.
type cable struct {
	mu     sync.Mutex
	set    Cable
	random *rand.Rand
	to     io.Writer // nil if either station is not attached
	queue  []held    // in the order of arrival
	bytes  int       // of the frames in queue
	idle   time.Time // when all accepted frames have got their tokens
	timer  *time.Timer
	count  Counters
}

// held is a frame on its way.
type held struct {
	frame []byte
	due   time.Time
}

func (c *cable) settings() Cable {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.set
}

func (c *cable) counters() Counters {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.count
	n.Held = len(c.queue)
	return n
}

func (c *cable) update(change func(*Cable)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	change(&c.set)
	c.deliver()
}

// plug connects the far end, or disconnects it with nil.
func (c *cable) plug(to io.Writer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.to = to
	c.deliver()
}

// send accepts a frame, which the caller may reuse afterwards, or loses it.
func (c *cable) send(frame []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	if c.to == nil || c.set.Down || c.set.Port != 0 && filtered(frame, c.set.Port) || c.lost() {
		c.count.Dropped++
		return
	}
	due, ok := c.admit(int64(len(frame)), now)
	if !ok || c.bytes+len(frame) > maxHeld {
		c.count.Dropped++
		return
	}
	due = due.Add(c.set.Delay)
	if len(c.queue) == 0 && !c.set.Frozen && !due.After(now) {
		c.write(frame)
		return
	}
	c.queue = append(c.queue, held{slices.Clone(frame), due})
	c.bytes += len(frame)
	if len(c.queue) == 1 {
		c.deliver()
	}
}

// filtered reports whether a frame has a TCP segment or a UDP datagram over IPv4 of other ports than one. It does
// not look at fragments, which the stacks of a testbed do not make.
func filtered(frame []byte, port uint16) bool {
	const ipv4, tcp, udp = 0x0800, 6, 17
	if len(frame) < header+20 || binary.BigEndian.Uint16(frame[12:]) != ipv4 {
		return false
	}
	packet := frame[header:]
	if protocol := packet[9]; protocol != tcp && protocol != udp {
		return false
	}
	ports := int(packet[0]&0xf) * 4 // behind the header of IP
	if len(packet) < ports+4 {
		return false
	}
	return binary.BigEndian.Uint16(packet[ports:]) != port && binary.BigEndian.Uint16(packet[ports+2:]) != port
}

func (c *cable) lost() bool { return c.set.Loss > 0 && c.random.Float64() < c.set.Loss }

// admit takes the tokens for a frame and returns when they are there. It returns false
// if the queue is full.
func (c *cable) admit(size int64, now time.Time) (time.Time, bool) {
	if c.set.Rate <= 0 {
		return now, true
	}
	limit := c.set.Queue
	if limit == 0 {
		limit = DefaultQueue
	}
	if backlog := c.idle.Sub(now); backlog > 0 && size > limit-int64(backlog.Seconds()*float64(c.set.Rate)) {
		return now, false
	}
	// A bucket that has been full since a moment lets Burst bytes pass at once.
	if full := now.Add(-c.takes(c.set.Burst)); c.idle.Before(full) {
		c.idle = full
	}
	c.idle = c.idle.Add(c.takes(size))
	if c.idle.Before(now) {
		return now, true
	}
	return c.idle, true
}

// takes returns how long the rate takes for so many bytes.
func (c *cable) takes(size int64) time.Duration {
	return time.Duration(float64(size) / float64(c.set.Rate) * float64(time.Second))
}

// deliver writes the frames that are due and arms the timer for the next one. The
// caller holds c.mu.
func (c *cable) deliver() {
	now := time.Now()
	n := 0
	for ; n < len(c.queue); n++ {
		gone := c.to == nil || c.set.Down
		if !gone && (c.set.Frozen || c.queue[n].due.After(now)) {
			break
		}
		c.bytes -= len(c.queue[n].frame)
		if gone {
			c.count.Dropped++
		} else {
			c.write(c.queue[n].frame)
		}
		c.queue[n].frame = nil
	}
	c.queue = c.queue[n:]
	switch {
	case len(c.queue) == 0:
		c.queue = nil
		if c.timer != nil {
			c.timer.Stop()
		}
	case c.set.Frozen:
	case c.timer == nil:
		c.timer = time.AfterFunc(c.queue[0].due.Sub(now), func() { c.update(func(*Cable) {}) })
	default:
		c.timer.Reset(c.queue[0].due.Sub(now))
	}
}

func (c *cable) write(frame []byte) {
	if _, err := c.to.Write(frame); err != nil {
		c.count.Dropped++
		return
	}
	c.count.Packets++
	c.count.Bytes += uint64(len(frame))
}
