package faultproxy

import (
	"math/rand/v2"
	"slices"
)

// Fault is an action on chosen requests. Of the requests that Match chooses, the first Skip
// pass. Of those after them, each is hit with probability Share, until Times were hit.
type Fault struct {
	Match func(Request) bool // nil: all. Calls never overlap, and must not call the proxy
	Skip  int
	Times int     // 0: no limit
	Share float64 // 0: all
	Seed  uint64  // of Share: equal seeds choose equally
	Do    Action
}

// Injection is a fault of a proxy.
type Injection struct {
	fault  Fault
	proxy  *Proxy
	random *rand.Rand
	seen   int // requests chosen by Match
	hits   int
}

// Inject adds a fault, for requests that arrive from now on. Several faults may hit a
// request, in the order of their injection.
func (p *Proxy) Inject(f Fault) *Injection {
	i := &Injection{fault: f, proxy: p, random: rand.New(rand.NewPCG(f.Seed, 0))}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.faults = append(p.faults, i)
	return i
}

// Hits returns the number of requests that were hit.
func (i *Injection) Hits() int {
	i.proxy.mu.Lock()
	defer i.proxy.mu.Unlock()
	return i.hits
}

// Remove removes the fault. Requests that were hit already are not released.
func (i *Injection) Remove() {
	i.proxy.mu.Lock()
	defer i.proxy.mu.Unlock()
	i.proxy.faults = slices.DeleteFunc(i.proxy.faults, func(of *Injection) bool { return of == i })
}

// hit reports whether the fault hits a request. The caller holds the proxy's mutex.
func (i *Injection) hit(r Request) bool {
	f := &i.fault
	if f.Match != nil && !f.Match(r) {
		return false
	}
	if i.seen++; i.seen <= f.Skip {
		return false
	}
	if f.Times > 0 && i.hits >= f.Times {
		return false
	}
	if f.Share > 0 && i.random.Float64() >= f.Share {
		return false
	}
	i.hits++
	return true
}

// admit numbers a request and returns its plan. The caller must call p.running.Done when
// the request has ended. ok is false if the proxy is stopped or closed.
func (p *Proxy) admit(r *Request) (_ plan, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stopped || p.closed {
		return plan{}, false
	}
	p.number++
	r.Number = p.number
	var pl plan
	for _, i := range p.faults {
		if i.hit(*r) {
			i.fault.Do(&pl)
		}
	}
	if pl.stop != nil {
		p.stopped = true
	}
	p.running.Add(1)
	return pl, true
}

// halt closes all connections after the action Stop, and calls its function.
func (p *Proxy) halt(s *stop, r Request) {
	p.Disconnect()
	if s.then != nil {
		s.then(r)
	}
}
