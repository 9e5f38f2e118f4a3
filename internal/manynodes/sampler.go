package main

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/testbed"
)

// sampleInterval is the time between two looks at /proc.
const sampleInterval = 50 * time.Millisecond

// machine is a node, and when it was frozen.
type machine struct {
	*testbed.Node

	mu     sync.Mutex
	frozen []span // the last one may be open: until is 0
}

// span is a time by CLOCK_MONOTONIC.
type span struct{ from, until int64 }

// freeze stops every process of the node.
func (m *machine) freeze() error {
	if err := m.Freeze(); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.frozen = append(m.frozen, span{from: monotonic()})
	return nil
}

func (m *machine) thaw() error {
	m.mu.Lock()
	if n := len(m.frozen); n > 0 && m.frozen[n-1].until == 0 {
		m.frozen[n-1].until = monotonic()
	}
	m.mu.Unlock()
	return m.Thaw()
}

// afterThaw reports whether the node was frozen at a time or shorter than allowance
// before it.
func (m *machine) afterThaw(at int64, allowance time.Duration) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.ContainsFunc(m.frozen, func(s span) bool {
		return at >= s.from && (s.until == 0 || at < s.until+int64(allowance))
	})
}

// seen is a worker's process as /proc of the host shows it, whatever the programs claim.
type seen struct {
	host    string
	pid     int // on the host
	started uint64
	attempt int
	rank    int
	restart string
	first   int64 // when it had started, at the latest
	last    int64 // the latest such time at which its node was not frozen
}

// sampler reads the processes of all nodes until it is closed.
type sampler struct {
	nodes func() []*machine
	stop  chan struct{}
	done  chan struct{}

	mu    sync.Mutex
	all   map[string]*seen
	loops int
	err   error
}

func startSampler(nodes func() []*machine) *sampler {
	s := &sampler{nodes: nodes, stop: make(chan struct{}), done: make(chan struct{}), all: map[string]*seen{}}
	go s.run()
	return s
}

func (s *sampler) run() {
	defer close(s.done)
	tick := time.NewTicker(sampleInterval)
	defer tick.Stop()
	for {
		for _, m := range s.nodes() {
			s.look(m)
		}
		select {
		case <-tick.C:
		case <-s.stop:
			return
		}
	}
}

// clockTick is the unit of [testbed.Process.Started], in nanoseconds.
const clockTick = int64(10 * time.Millisecond)

// boottime returns the time by CLOCK_BOOTTIME, in which the kernel keeps the starts of processes.
func boottime() int64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &t); err != nil {
		panic(err) // the clock exists on every kernel
	}
	return t.Nano()
}

// look records the workers of one node. Every process that a worker starts has its
// environment, and counts as well.
func (s *sampler) look(m *machine) {
	still := m.afterThaw(monotonic(), 0)
	at := monotonic() // every process in the list exists at this time or later
	booted := at - boottime()
	all, err := m.Processes()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.loops++
	if err != nil {
		s.err = errors.Join(s.err, err)
		return
	}
	for _, p := range all {
		rank, rerr := strconv.Atoi(p.Getenv("RANK"))
		if rerr != nil || p.State == "Z" {
			continue
		}
		attempt, _ := strconv.Atoi(p.Getenv(client.EnvAttempt)) // 0 under torchrun
		key := fmt.Sprint(p.PID, " ", p.Started)
		w := s.all[key]
		if w == nil {
			w = &seen{
				host: m.Name(), pid: p.PID, started: p.Started, attempt: attempt, rank: rank,
				restart: p.Getenv("TORCHELASTIC_RESTART_COUNT"), first: booted + int64(p.Started+1)*clockTick, //nolint:gosec // a time is small
			}
			s.all[key] = w
		}
		if !still {
			w.last = at
		}
	}
}

// close ends the sampling and returns what was seen.
func (s *sampler) close() ([]seen, error) {
	close(s.stop)
	<-s.done
	var list []seen
	for _, w := range s.all {
		list = append(list, *w)
	}
	return list, s.err
}
