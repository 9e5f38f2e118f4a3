package s3

import (
	"fmt"
	"strings"
	"sync/atomic"
)

// class is a class of requests: stores charge by it.
type class int

const (
	classOther class = iota
	classGet
	classHead
	classPut
	classPart
	classCreate
	classComplete
	classAbort
	classList
	classDelete
	classes
)

// Requests counts the requests of a bucket, repeated ones too, and the bytes of their bodies.
type Requests struct {
	Get, Head, Put, Part, Create, Complete, Abort, List, Delete, Other int64

	Sent, Received int64 // bytes
	Repeated       int64 // attempts after the first
	Throttled      int64 // answers that asked for fewer requests
	Hedged         int64 // reads that were sent a second time, because no answer came
}

// Total returns the number of requests.
func (r Requests) Total() int64 {
	return r.Get + r.Head + r.Put + r.Part + r.Create + r.Complete + r.Abort + r.List + r.Delete + r.Other
}

// String returns the classes that occurred, for a line of a report.
func (r Requests) String() string {
	var parts []string
	for _, c := range []struct {
		name string
		n    int64
	}{{"GET", r.Get}, {"HEAD", r.Head}, {"PUT", r.Put}, {"part", r.Part}, {"create", r.Create}, {"complete", r.Complete}, {"abort", r.Abort}, {"LIST", r.List}, {"delete", r.Delete}, {"other", r.Other}} {
		if c.n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", c.n, c.name))
		}
	}
	return fmt.Sprintf("%d requests (%s), %d bytes sent, %d received", r.Total(), strings.Join(parts, ", "), r.Sent, r.Received)
}

// counts are the running [Requests].
type counts struct {
	requests            [classes]atomic.Int64
	sent, received      atomic.Int64
	repeated, throttled atomic.Int64
	hedged              atomic.Int64
}

func (c *counts) began(of class) { c.requests[of].Add(1) }

// Requests returns what the bucket has been asked since [New].
func (b *Bucket) Requests() Requests {
	c := &b.transport.counts
	n := func(of class) int64 { return c.requests[of].Load() }
	return Requests{
		Get: n(classGet), Head: n(classHead), Put: n(classPut), Part: n(classPart), Create: n(classCreate),
		Complete: n(classComplete), Abort: n(classAbort), List: n(classList), Delete: n(classDelete), Other: n(classOther),
		Sent: c.sent.Load(), Received: c.received.Load(), Repeated: c.repeated.Load(), Throttled: c.throttled.Load(), Hedged: c.hedged.Load(),
	}
}
