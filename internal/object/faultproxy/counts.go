package faultproxy

import (
	"fmt"
	"strings"
	"sync/atomic"
)

// Count is the number of requests, and of bytes of bodies that clients have sent and
// received. Bytes count as they pass, headers do not.
type Count struct{ Requests, Sent, Received int64 }

// Counts are what a proxy has counted.
type Counts struct {
	Classes     [classes]Count
	Connections int64 // that clients have opened
	Peak        int64 // highest number of requests at the same time
}

// Of returns the sum of some classes, or of all if none is named.
func (c Counts) Of(list ...Class) (sum Count) {
	if len(list) == 0 {
		for class := range classes {
			list = append(list, class)
		}
	}
	for _, class := range list {
		one := c.Classes[class]
		sum.Requests += one.Requests
		sum.Sent += one.Sent
		sum.Received += one.Received
	}
	return sum
}

// Requests returns the number of requests of some classes, or of all if none is named.
func (c Counts) Requests(list ...Class) int64 { return c.Of(list...).Requests }

// String lists the classes that have requests.
func (c Counts) String() string {
	var b strings.Builder
	for class, one := range c.Classes {
		if one != (Count{}) {
			fmt.Fprintf(&b, "%v: %d requests, %d bytes sent, %d received; ", Class(class), one.Requests, one.Sent, one.Received)
		}
	}
	fmt.Fprintf(&b, "%d connections, at most %d requests at a time", c.Connections, c.Peak)
	return b.String()
}

// counters count for one proxy.
type counters struct {
	classes     [classes]struct{ requests, sent, received atomic.Int64 }
	connections atomic.Int64
	running     atomic.Int64
	peak        atomic.Int64
}

// begin counts a request, which runs until end.
func (c *counters) begin(class Class) {
	c.classes[class].requests.Add(1)
	running := c.running.Add(1)
	for {
		peak := c.peak.Load()
		if running <= peak || c.peak.CompareAndSwap(peak, running) {
			return
		}
	}
}

func (c *counters) end() { c.running.Add(-1) }

// read returns the counts. If reset, it sets them to zero: each request and byte is in the
// counts of one call only.
func (c *counters) read(reset bool) (counts Counts) {
	value := func(v *atomic.Int64, zero int64) int64 {
		if reset {
			return v.Swap(zero)
		}
		return v.Load()
	}
	for i := range c.classes {
		one := &c.classes[i]
		counts.Classes[i] = Count{value(&one.requests, 0), value(&one.sent, 0), value(&one.received, 0)}
	}
	counts.Connections = value(&c.connections, 0)
	counts.Peak = value(&c.peak, c.running.Load())
	return counts
}
