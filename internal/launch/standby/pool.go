// Package standby keeps processes in reserve that have started, imported what the program will import,
// and wait for their ranks, so that a group starts again without the time of the imports.
//
// Each is a process of its own, not a fork of one: a program may start threads while it is
// imported, and of a process with threads only a part is forked.
package standby

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/launch/process"
)

// refillAfter is the time from the start of ranks to that of the next standbys: imports of both
// at once would delay the ranks.
const refillAfter = 5 * time.Second

// Pool is the standbys of a node, as many as it has ranks. Its methods may be called concurrently.
// A nil pool has none.
type Pool struct {
	command []string
	env     []string
	size    int
	hunt    *process.Hunt
	log     *slog.Logger
	socket  net.Listener

	mu     sync.Mutex
	idle   []*process.Standby
	refill *time.Timer
	over   bool
	warned bool
}

// New returns a pool of standbys that run a command of [Command] with an environment, which has
// the marker of the job. job and node tell the pool from those of other trainers. hunt spares the
// processes until they get a rank. The caller calls Stop.
func New(command, env []string, size int, job string, node int, hunt *process.Hunt, log *slog.Logger) (*Pool, error) {
	// The next trainer of the run looks there whether this one is alive, before it kills what
	// this one has left.
	at := fmt.Sprintf("@ckptstore-standby-%s-%d", job, node)
	socket, err := net.Listen("unix", at)
	if err != nil {
		return nil, fmt.Errorf("listen at %s for standbys: %w", at, err)
	}
	p := &Pool{command: command, env: append(env, client.EnvSocket+"="+at), size: size, hunt: hunt, log: log, socket: socket}
	p.fill()
	return p, nil
}

// fill starts standbys until the pool is full. Without a standby a rank starts more
// slowly, so an error is only logged, once.
func (p *Pool) fill() {
	p.mu.Lock()
	defer p.mu.Unlock()
	live := p.idle[:0]
	for _, s := range p.idle {
		if s.Ended() {
			p.discard(s)
		} else {
			live = append(live, s)
		}
	}
	p.idle = live
	for !p.over && len(p.idle) < p.size {
		s, err := process.StartStandby(p.command, p.env, p.hunt)
		if err != nil {
			p.warn("process not started in advance", err)
			return
		}
		p.idle = append(p.idle, s)
	}
}

// warn logs the first problem. The caller holds the lock.
func (p *Pool) warn(what string, err error) {
	if !p.warned {
		p.log.Warn(what+"; the rank starts as without --preload", "error", err)
	}
	p.warned = true
}

// discard removes what is left of a standby. The caller holds the lock.
func (p *Pool) discard(s *process.Standby) {
	if said := s.Stop(); said != "" && !p.over {
		p.log.Warn("process that was started in advance has ended", "output", said)
	}
}

// Start makes a standby a rank with an environment, in addition to that of the pool. It returns
// nil if there is none.
func (p *Pool) Start(rank int, env map[string]string, stdout, stderr io.Writer) *process.Process {
	if p == nil {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.refill != nil {
		p.refill.Stop()
	}
	p.refill = time.AfterFunc(refillAfter, p.fill)
	order, err := json.Marshal(env)
	if err != nil {
		p.warn("process that was started in advance not used", err)
		return nil
	}
	for len(p.idle) > 0 {
		s := p.idle[0]
		p.idle = p.idle[1:]
		if s.Ended() {
			p.discard(s)
			continue
		}
		started, err := s.Begin(rank, append(order, '\n'), stdout, stderr)
		if err == nil {
			return started
		}
		p.discard(s)
	}
	return nil
}

// Stop ends all standbys.
func (p *Pool) Stop() {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.over = true
	if p.refill != nil {
		p.refill.Stop()
	}
	for _, s := range p.idle {
		p.discard(s)
	}
	p.idle = nil
	_ = p.socket.Close() // nothing is read from it
}
