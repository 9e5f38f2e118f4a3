package launch

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/preflight"
)

// preflight measures the nodes of a group and the spares, and excludes bad nodes. It releases those
// of the group. It reports whether the caller must gather a group again.
func (f *fleet) preflight(ctx context.Context, group []nodes.Member) (again bool, err error) {
	var all []nodes.Member
	waiting, cancel := context.WithTimeout(ctx, serveWait)
	defer cancel()
	for _, m := range f.endpoint.Members() {
		switch {
		case m.State == nodes.StateSuspect || m.State == nodes.StateLost:
		case m.PeerURL() == "":
			f.log.Warn("network of a node is not measured; start its trainer with --preflight too", "node", m.Index, "host", m.Host)
		case m.Index != f.own() && !f.serves(waiting, m.Index):
			f.log.Warn("network of a node is not measured: it has not opened the store in time", "node", m.Index, "host", m.Host, "limit", serveWait)
		default:
			all = append(all, m)
		}
	}
	began := time.Now()
	verdicts := preflight.Run(ctx, len(all), func(ctx context.Context, a, b int) (float64, error) { return f.rate(ctx, all[a], all[b]) })
	if ctx.Err() != nil {
		return false, context.Cause(ctx)
	}
	var facts []events.Body
	var bad []int
	median := 0.0
	for i, v := range verdicts {
		fact := &events.NodeMeasured{Job: f.cfg.Job, Node: all[i].Index, BytesPerSecond: int64(v.Rate), Partners: []int{}}
		for _, partner := range v.Partners {
			fact.Partners = append(fact.Partners, all[partner].Index)
		}
		facts, median = append(facts, fact), v.Median
		if v.Bad {
			bad = append(bad, i)
		}
	}
	f.log.Info("preflight", "nodes", len(all), "bad", len(bad), "median", mbps(median), "took", time.Since(began).Round(time.Millisecond))
	if len(all) < 3 && len(all) > 0 {
		f.log.Warn("preflight needs three nodes to tell a bad node from its partner; it only measures", "nodes", len(all))
	}
	if err := f.AppendOfRun(ctx, facts...); err != nil {
		f.log.Warn("preflight not recorded", "error", err)
	}
	if len(bad) == 0 {
		return false, nil
	}
	var members []int
	for _, m := range group {
		members = append(members, m.Index)
	}
	f.endpoint.Release(members)
	for _, i := range bad {
		v, m := verdicts[i], all[i]
		why := fmt.Sprintf("its network has at most %s with each of %d other nodes, and the median is %s", mbps(v.Rate), len(v.Partners), mbps(v.Median))
		if v.Err != nil {
			why += ": " + v.Err.Error()
		}
		f.dismiss(m, why)
	}
	return true, nil
}

// serveWait bounds the wait until the nodes that have joined have opened the store.
const serveWait = 30 * time.Second

// serves waits until a node serves the requests of others.
func (f *fleet) serves(ctx context.Context, index int) bool {
	for {
		f.mu.Lock()
		ready, changed := f.serving[index], f.served
		f.mu.Unlock()
		if ready {
			return true
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return false
		}
	}
}

// setServing notes whether a node serves the requests of others.
func (f *fleet) setServing(index int, does bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.serving[index] = does
	close(f.served)
	f.served = make(chan struct{})
}

func mbps(rate float64) string { return fmt.Sprintf("%.1f MB/s", rate/1e6) }

// rate measures the network between two nodes, from the first one.
func (f *fleet) rate(ctx context.Context, from, to nodes.Member) (float64, error) {
	if from.Index == f.own() {
		return preflight.Measure(ctx, f.endpoint.PeerClient(to.PeerPin), to.PeerURL())
	}
	answer := make(chan measured, 1)
	f.mu.Lock()
	f.nextMeasure++
	id := f.nextMeasure
	if f.measures == nil {
		f.measures = map[int]chan measured{}
	}
	f.measures[id] = answer
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		delete(f.measures, id)
		f.mu.Unlock()
	}()
	if err := f.endpoint.Send(from.Index, cmdMeasure, measureOrder{id, to.PeerURL(), to.PeerPin}); err != nil {
		return 0, err
	}
	late := time.NewTimer(preflight.Limit + measureSlack)
	defer late.Stop()
	select {
	case m := <-answer:
		if m.Error != "" {
			return 0, errors.New(m.Error)
		}
		return m.Rate, nil
	case <-late.C:
		return 0, fmt.Errorf("node %d has not measured its network to node %d in time", from.Index, to.Index)
	case <-ctx.Done():
		return 0, context.Cause(ctx)
	}
}

// measureSlack is for the order and its answer: five rounds take less than 10 s with it.
const measureSlack = 200 * time.Millisecond

// measured takes the result of a measurement by another node.
func (f *fleet) measured(m measured) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if answer := f.measures[m.ID]; answer != nil {
		delete(f.measures, m.ID)
		answer <- m
	}
}
