package launch

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/preflight"
)

// preflight has the nodes of a group and the spares examine themselves, measures the network between
// them, and excludes bad nodes. It releases those of the group. It reports whether the caller must
// gather a group again.
func (f *fleet) preflight(ctx context.Context, group []nodes.Member) (again bool, err error) {
	var here, all []nodes.Member // of here, all can be measured
	for _, m := range f.endpoint.Members() {
		switch {
		case !measurable(m):
			continue
		case m.PeerURL() == "":
			f.log.Warn("network of a node is not measured; start its trainer with --preflight too", "node", m.Index, "host", m.Host)
		default:
			all = append(all, m)
		}
		here = append(here, m)
	}
	began := time.Now()
	found := make(chan map[int]findings, 1)
	go func() { found <- f.examineAll(ctx, here) }()
	verdicts := preflight.Run(ctx, len(all), func(ctx context.Context, a, b int) (float64, error) { return f.rate(ctx, all[a], all[b]) })
	local := <-found
	if ctx.Err() != nil {
		return false, context.Cause(ctx)
	}
	f.judgeClocks(here, local)
	if n, such := excuseDisks(local); n > 0 {
		f.log.Warn("disks of most nodes are bad or slow: no node is to blame, as it may be one disk that they share", "nodes", n, "examined", len(here), "such_as", such)
	}
	var facts []events.Body
	why := map[int][]string{} // a node is bad, by index
	median := 0.0
	for i, v := range verdicts {
		m := all[i]
		fact := &events.NodeMeasured{Job: f.cfg.Job, Node: m.Index, BytesPerSecond: int64(v.Rate), Partners: []int{}, Clock: local[m.Index].clock}
		for _, partner := range v.Partners {
			fact.Partners = append(fact.Partners, all[partner].Index)
		}
		facts, median = append(facts, fact), v.Median
		if v.Bad {
			slow := fmt.Sprintf("its network has at most %s with each of %d other nodes, and the median is %s", mbps(v.Rate), len(v.Partners), mbps(v.Median))
			if v.Err != nil {
				slow += ": " + v.Err.Error()
			}
			why[m.Index] = append(why[m.Index], slow)
		}
	}
	for _, m := range here {
		why[m.Index] = append(why[m.Index], local[m.Index].bad...)
		if len(why[m.Index]) == 0 {
			delete(why, m.Index)
		}
	}
	f.log.Info("preflight", "nodes", len(all), "bad", len(why), "median", mbps(median), "took", time.Since(began).Round(time.Millisecond))
	if len(all) < 3 && len(all) > 0 {
		f.log.Warn("preflight needs three nodes to tell a bad network from its partner's; it only measures", "nodes", len(all))
	}
	if err := f.AppendOfRun(ctx, facts...); err != nil {
		f.log.Warn("preflight not recorded", "error", err)
	}
	if len(why) == 0 {
		return false, nil
	}
	var members []int
	for _, m := range group {
		members = append(members, m.Index)
	}
	f.endpoint.Release(members)
	for _, m := range here {
		if reasons := why[m.Index]; len(reasons) > 0 {
			f.dismiss(m, strings.Join(reasons, "; "))
		}
	}
	return true, nil
}

// measurable reports whether a preflight examines a node now: it answers, and has opened the store. Another node is
// examined before its first group.
func measurable(m nodes.Member) bool {
	return m.State != nodes.StateSuspect && m.State != nodes.StateLost && m.State != nodes.StateOpening
}

// findings are what a node has found out about itself.
type findings struct {
	bad   []string
	clock *float64 // seconds by which its clock is ahead, at least; nil: unknown
}

// badDisk begins the finding of a node about its disk.
const badDisk = "its disk is bad"

// excuseDisks drops the findings about disks if most of the nodes that have examined themselves have one, and
// returns how many these are, and one of the findings. The directory may be on a disk of all nodes, which is slow while all of them sync
// at once.
func excuseDisks(found map[int]findings) (excused int, such string) {
	isDisk := func(bad string) bool { return strings.HasPrefix(bad, badDisk) }
	bad, examined := 0, 0
	for _, of := range found {
		if of.clock != nil {
			examined++
		}
		if at := slices.IndexFunc(of.bad, isDisk); at >= 0 {
			bad, such = bad+1, of.bad[at]
		}
	}
	if 2*bad <= examined {
		return 0, ""
	}
	for index, of := range found {
		of.bad = slices.DeleteFunc(of.bad, isDisk)
		found[index] = of
	}
	return bad, such
}

// examineAll has nodes examine themselves, at the same time, and returns their findings by index.
// A node that does not answer has none: it may be busy.
func (f *fleet) examineAll(ctx context.Context, members []nodes.Member) map[int]findings {
	found, all := map[int]findings{}, sync.WaitGroup{}
	var mu sync.Mutex
	for _, m := range members {
		all.Go(func() {
			of, err := f.examine(ctx, m)
			if err != nil {
				f.log.Warn("node has not examined itself", "node", m.Index, "host", m.Host, "error", err)
			}
			mu.Lock()
			defer mu.Unlock()
			found[m.Index] = of
		})
	}
	all.Wait()
	return found
}

// examine has one node examine itself, and compares its clock with this node's.
func (f *fleet) examine(ctx context.Context, m nodes.Member) (of findings, err error) {
	if m.Index == f.own() {
		own := 0.0
		return findings{f.examineSelf(ctx), &own}, nil
	}
	sent, began := f.cfg.Now(), time.Now()
	got, err := f.answer(ctx, m, preflight.LocalLimit+measureSlack, cmdExamine, func(id int) any { return examineOrder{id} })
	if err != nil {
		return of, err
	}
	offset := preflight.Clock(sent, time.Since(began), got.Clock, got.Took)
	seconds := offset.Seconds()
	return findings{got.Bad, &seconds}, nil
}

// judgeClocks adds to the findings of nodes whose clock is not that of most. This node, which
// compares the clocks, stays whatever its clock shows.
func (f *fleet) judgeClocks(members []nodes.Member, found map[int]findings) {
	var read []nodes.Member
	var ahead []time.Duration
	for _, m := range members {
		if clock := found[m.Index].clock; clock != nil {
			read, ahead = append(read, m), append(ahead, time.Duration(*clock*float64(time.Second)))
		}
	}
	clocks := preflight.Compare(ahead)
	for i, m := range read {
		by := clocks.By[i].Round(time.Second)
		if by == 0 {
			continue
		}
		text := fmt.Sprintf("its clock is %v ahead of those of most nodes; set it, or repair its synchronization", by)
		if by < 0 {
			text = fmt.Sprintf("its clock is %v behind those of most nodes; set it, or repair its synchronization", -by)
		}
		of := found[m.Index]
		switch {
		case !clocks.Majority:
			f.log.Warn("clocks of nodes differ, and no majority of them tells which is right: set them", "node", m.Index, "host", m.Host, "from_the_median", by)
		case m.Index == f.own():
			f.log.Warn("this node coordinates the job: "+text, "node", m.Index, "host", m.Host)
		default:
			of.bad = append(of.bad, text)
			found[m.Index] = of
		}
	}
}

// examineSelf returns what is bad about this node.
func (j *job) examineSelf(ctx context.Context) []string {
	checks := []preflight.Check{{What: "its shared memory is bad", Do: func(context.Context) error { return preflight.SharedMemory(j.store.Shared) }}}
	if out := j.cfg.Output; out.Dir != "" {
		checks = append(checks, preflight.Check{What: badDisk, Do: func(context.Context) error { return preflight.Disk(cmp.Or(out.Top, out.Dir)) }})
	}
	if j.devices.shut() {
		checks = append(checks, preflight.Check{What: "its devices are not fit for use", Patient: true, Do: func(ctx context.Context) error {
			bad, err := j.devices.unfit(ctx)
			if err == nil && len(bad) > 0 {
				err = errors.New(strings.Join(bad, "; "))
			}
			return err
		}})
	}
	return preflight.Examine(ctx, preflight.LocalLimit, checks)
}

// examined examines this node for the coordinating process.
func (j *job) examined(ctx context.Context, body json.RawMessage) {
	out, began := measured{Clock: j.cfg.Now()}, time.Now()
	var order examineOrder
	if err := json.Unmarshal(body, &order); err != nil {
		out.Error = err.Error()
	} else {
		out.ID, out.Bad = order.ID, j.examineSelf(ctx)
	}
	out.Took = time.Since(began)
	if err := j.link.Tell(msgMeasured, out); err != nil {
		j.log.Warn("findings of the preflight not sent", "error", err)
	}
}

func mbps(rate float64) string { return fmt.Sprintf("%.1f MB/s", rate/1e6) }

// rate measures the network between two nodes, from the first one.
func (f *fleet) rate(ctx context.Context, from, to nodes.Member) (float64, error) {
	if from.Index == f.own() {
		return preflight.Measure(ctx, f.endpoint.PeerClient(to.PeerPin), to.PeerURL())
	}
	m, err := f.answer(ctx, from, preflight.Limit+measureSlack, cmdMeasure, func(id int) any { return measureOrder{id, to.PeerURL(), to.PeerPin} })
	return m.Rate, err
}

// answer sends an order of the preflight to a node, and waits for the result.
func (f *fleet) answer(ctx context.Context, m nodes.Member, limit time.Duration, kind string, order func(id int) any) (measured, error) {
	answer := make(chan measured, 1)
	f.mu.Lock()
	f.nextMeasure++
	id := f.nextMeasure
	if f.measures == nil {
		f.measures = map[int]measurement{}
	}
	f.measures[id] = measurement{m.Index, answer}
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		delete(f.measures, id)
		f.mu.Unlock()
	}()
	if err := f.endpoint.SendTo(m.Index, m.Joining, kind, order(id)); err != nil {
		return measured{}, err
	}
	late := time.NewTimer(limit)
	defer late.Stop()
	select {
	case got := <-answer:
		if got.Error != "" {
			return got, errors.New(got.Error)
		}
		return got, nil
	case <-late.C:
		return measured{}, fmt.Errorf("node %d has not answered the order to %s in time", m.Index, kind)
	case <-ctx.Done():
		return measured{}, context.Cause(ctx)
	}
}

// measureSlack is for the order and its answer: five rounds take less than 10 s with it.
const measureSlack = 200 * time.Millisecond

// measurement is an order of the preflight that a node has not answered.
type measurement struct {
	node   int // its index
	answer chan<- measured
}

// measured takes the result of a measurement by another node.
func (f *fleet) measured(node int, m measured) {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch order, ok := f.measures[m.ID]; {
	case !ok: // it was too late
	case order.node != node:
		f.log.Error("result of a measurement ignored: another node was asked for it", "node", node, "asked", order.node)
	default:
		delete(f.measures, m.ID)
		order.answer <- m
	}
}
