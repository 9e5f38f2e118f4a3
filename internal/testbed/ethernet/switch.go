// Package ethernet is an Ethernet switch in user space whose cables can be made slow,
// lossy or silent while it runs.
//
//	port   where one station is attached: frames are read from it and written to it
//	cable  one direction between two stations, an ordered pair of names, with its own
//	       [Cable] settings and [Counters]
//
// The switch learns which port a hardware address is behind, sends a frame to that port
// only, and floods broadcasts and frames to unknown addresses. A flooded frame passes
// one cable for each other port.
//
// Each cable draws its losses from a generator of its own, seeded by the seed of the
// switch and the two names. The n-th frame that meets a loss therefore shares its fate
// with the n-th frame of another run with that seed, whatever other cables carry.
//
// What differs from hardware: the ports do not share buffers or a backplane, so cables
// do not slow each other, and a station never sees its carrier go down. That is
// deliberate: a network that fails silently is the hard case.
package ethernet

import (
	"fmt"
	"hash/fnv"
	"io"
	"math/rand/v2"
	"sync"
)

// maxFrame is the largest frame that a port may deliver: a packet of 64 KiB that an adapter would
// segment, with its headers.
const maxFrame = 1<<16 + 64

// header is the part of a frame that the switch reads: two addresses and a type.
const header = 14

// address is a hardware address.
type address [6]byte

// group reports whether the address stands for many stations.
func (a address) group() bool { return a[0]&1 != 0 }

// pair is an ordered pair of stations.
type pair struct{ from, to string }

// port is an attached station.
type port struct {
	name   string
	device io.ReadWriter
}

// Switch forwards frames between ports. Its methods may be called concurrently, at any
// time.
type Switch struct {
	seed uint64

	mu      sync.Mutex
	ports   map[string]*port
	learned map[address]*port
	cables  map[pair]*cable
}

// New returns a switch without ports.
func New(seed uint64) *Switch {
	return &Switch{seed: seed, ports: map[string]*port{}, learned: map[address]*port{}, cables: map[pair]*cable{}}
}

// Attach connects a station. Each Read of the device must return one frame, and each
// Write takes one without blocking for long; a TAP device does both. The switch reads
// until Read returns an error, also after [Switch.Detach]: the caller closes the device.
// Cables keep their settings and counters by name, so a station that is attached again
// finds them unchanged.
func (s *Switch) Attach(name string, device io.ReadWriter) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ports[name] != nil {
		return fmt.Errorf("attach %s: the switch already has a port of this name", name)
	}
	p := &port{name, device}
	for other := range s.ports {
		s.cable(pair{name, other}).plug(s.ports[other].device)
		s.cable(pair{other, name}).plug(device)
	}
	s.ports[name] = p
	go s.read(p)
	return nil
}

// Detach disconnects a station, whose carrier stays up: what it sends is lost without a
// trace. When Detach returns, no later frame of the station is forwarded, and frames that
// are on their way to it are lost. Frames that it has sent before still arrive. Detach
// does nothing for an unknown name.
func (s *Switch) Detach(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.ports[name]
	if p == nil {
		return
	}
	delete(s.ports, name)
	for a, at := range s.learned {
		if at == p {
			delete(s.learned, a)
		}
	}
	for other := range s.ports {
		s.cable(pair{other, name}).plug(nil)
	}
}

// read forwards the frames of one port until its device is closed.
func (s *Switch) read(p *port) {
	buf := make([]byte, maxFrame)
	for {
		n, err := p.device.Read(buf)
		if err != nil {
			return
		}
		if n >= header {
			s.forward(p, buf[:n])
		}
	}
}

func (s *Switch) forward(from *port, frame []byte) {
	to, source := address(frame[:6]), address(frame[6:12])
	s.mu.Lock()
	if s.ports[from.name] != from {
		s.mu.Unlock()
		return // detached while the frame was read
	}
	if !source.group() {
		s.learned[source] = from
	}
	var way []*cable
	if known := s.learned[to]; known == nil || to.group() {
		for name, p := range s.ports {
			if p != from {
				way = append(way, s.cable(pair{from.name, name}))
			}
		}
	} else if known != from {
		way = append(way, s.cable(pair{from.name, known.name}))
	}
	s.mu.Unlock()
	for _, c := range way {
		c.send(frame)
	}
}

// cable returns the cable of a pair. The caller holds s.mu.
func (s *Switch) cable(at pair) *cable {
	c := s.cables[at]
	if c == nil {
		h := fnv.New64a()
		fmt.Fprintf(h, "%q %q", at.from, at.to)
		c = &cable{random: rand.New(rand.NewPCG(s.seed, h.Sum64()))}
		s.cables[at] = c
	}
	return c
}

// between returns the cable from one station to another, attached or not.
func (s *Switch) between(from, to string) *cable {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cable(pair{from, to})
}
