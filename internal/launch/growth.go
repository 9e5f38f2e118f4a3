package launch

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/internal/launch/blame"
	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/projections"
)

// growEvery is how often a group looks for nodes that could join it.
const growEvery = 250 * time.Millisecond

// growth is a request to the ranks of a group to save and end, so that the next group has more
// nodes. It is no request to the job.
type growth struct {
	from, to int
	joined   string // the nodes that came
}

// String returns why the attempt has ended.
func (g *growth) String() string {
	return fmt.Sprintf("grown from %d to %d nodes: %s joined, and the workers saved and ended as asked", g.from, g.to, g.joined)
}

// growing is the state of the request to a group to grow.
type growing struct {
	mu    sync.Mutex
	asked *growth   // what the ranks of this attempt were asked; nil: nothing, or they have continued
	told  bool      // a rank has got the request
	until time.Time // ranks that got it may still be ending; zero: the request stands
}

// ask asks the ranks from now on.
func (r *growing) ask(g *growth) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.asked, r.told, r.until = g, false, time.Time{}
}

// resume continues a request that ranks have got.
func (r *growing) resume(g *growth) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.asked, r.told = g, true
}

// takeBack asks no rank from now on. Ranks that got the request may be ending until a time: until then
// an answer to another rank is no sign that the group continues.
func (r *growing) takeBack(until time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.until = until
}

// tellGrowth reports whether the rank that is being answered must save and end.
func (r *growing) tellGrowth(now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.asked == nil:
		return false
	case r.until.IsZero():
		r.told = true
		return true
	case now.After(r.until):
		r.asked = nil // they continue
	}
	return false
}

// grew returns the growth for which the workers of the attempt have ended; nil if they ended for
// another reason.
func (r *growing) grew() *growth {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.told {
		return nil
	}
	return r.asked
}

// watchGrowth asks the group to make room for nodes that have joined, until the caller calls stop.
func (w *watch) watchGrowth(ctx context.Context) (stop func()) {
	if w.others == nil || w.cfg.GrowInterval <= 0 || w.job.members != nil || len(w.cfg.Nodes) >= w.others.endpoint.Max() {
		return func() {}
	}
	if g := w.stop.grew(); g != nil { // the coordinator before has asked the ranks
		return inBackground(ctx, func(ctx context.Context) { w.awaitGrowth(ctx, g) })
	}
	return inBackground(ctx, w.grow)
}

// newcomers are the nodes by which a group can grow: those of a [nodes.Endpoint].
type newcomers interface {
	Growth() (more int, settled time.Duration)
	Timeout() time.Duration
	Members() []nodes.Member
}

// grow waits until the group can grow, and asks its ranks. A group that does not end in time is left
// alone.
func (w *watch) grow(ctx context.Context) {
	g := w.growable(ctx, w.others.endpoint, w.head)
	if g == nil {
		return
	}
	w.log.Info("workers asked to save and end: the group grows", "attempt", w.group.Number, "from", g.from, "to", g.to, "joined", g.joined)
	w.stop.ask(g)
	w.awaitGrowth(ctx, g)
}

// growable waits until nodes have come to stay, the group has trained for a while and committed a
// checkpoint, and its ranks can be asked. It returns how the group can grow; nil if ctx has ended. While
// a node of the group is suspect, or after the new ones have left, it waits on.
func (w *watch) growable(ctx context.Context, others newcomers, head func(context.Context) (string, bool)) *growth {
	began := time.Now()
	first, known := head(ctx)
	deaf := false
	tick := time.NewTicker(growEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
		more, settled := others.Growth()
		if more == 0 || settled < others.Timeout()/2 || time.Since(began) < w.cfg.GrowInterval {
			continue
		}
		if !w.stop.open.Load() {
			if !deaf {
				w.log.Warn("group does not grow: its workers neither report nor poll for stop requests, so they cannot save for it; the new nodes are spares", "attempt", w.group.Number, "nodes", more)
			}
			deaf = true
			continue
		}
		if !known { // the log did not answer
			first, known = head(ctx)
			continue
		}
		if now, ok := head(ctx); !ok || now == first {
			continue // a group that starts again and again must make progress in between
		}
		if g := growthBy(others, len(w.cfg.Nodes)); g != nil { // they may have changed while the log was read
			return g
		}
	}
}

// head returns the newest checkpoint of the line.
func (w *watch) head(ctx context.Context) (id string, ok bool) {
	trial, err := w.store.Views.Trial(ctx, w.cfg.Run, w.cfg.Trial)
	return trial.Head, err == nil
}

// growthBy returns how a group of from nodes can grow now; nil if it cannot.
func growthBy(others newcomers, from int) *growth {
	var joined []string
	for _, m := range others.Members() {
		if m.State == nodes.StateSpare {
			joined = append(joined, fmt.Sprintf("node %d on %s", m.Index, m.Host))
		}
	}
	more, _ := others.Growth()
	if more == 0 {
		return nil
	}
	return &growth{from: from, to: from + more, joined: strings.Join(joined, ", ")}
}

// awaitGrowth takes the request to grow back if the ranks do not end in time.
func (w *watch) awaitGrowth(ctx context.Context, g *growth) {
	limit := time.NewTimer(w.cfg.PreemptGrace)
	defer limit.Stop()
	select {
	case <-limit.C:
		w.stop.takeBack(time.Now().Add(w.cfg.PreemptGrace))
		w.log.Warn("group does not grow: its workers did not end when asked; they continue, and the new nodes are spares", "attempt", w.group.Number, "after", w.cfg.PreemptGrace)
	case <-ctx.Done():
	}
}

// grows reports whether the last attempt has ended to have more nodes. Workers may fail when they
// are asked to end; a node that is lost meanwhile is a failure like any other. A training that is
// done does not start again.
func (j *job) grows(cause *FailedError) bool {
	return j.grew != nil && (cause == nil && !j.finished || cause != nil && cause.Kind.Or() == blame.Worker)
}

// regrow returns what the next attempt resumes from, after an attempt that ended to grow. A failure of workers
// while they ended is not charged: they were asked to.
func (j *job) regrow(ctx context.Context, n int, cause *FailedError) (trial projections.Trial, resume string, err error) {
	trial.Attempt = n
	j.fleet.before, j.fleet.fresh = slices.Clone(j.fleet.members), nil
	switch why, err := j.lost(ctx); {
	case err != nil:
		return trial, "", err
	case cause != nil:
		j.log.Warn("workers failed while they ended for more nodes; steps since the last checkpoint are repeated", "attempt", n, "cause", cause.Cause)
	case why != "":
		j.log.Warn("save before the growth is lost; steps since the last checkpoint are repeated", "attempt", n, "checkpoint", j.newest.Checkpoint, "reason", why)
	}
	now, err := j.store.Views.Trial(ctx, j.cfg.Run, j.cfg.Trial)
	if err != nil {
		return trial, "", err
	}
	resume, err = j.nextResume(ctx, now)
	return now, resume, err
}

// unjoin excludes the nodes for which the group has grown, if its first attempt with them failed
// before a checkpoint was committed: the others trained without a failure before. A node of the old group whose ranks
// alone failed by themselves may have failed of its own; then the new nodes are excluded if the next attempt fails too. It
// reports whether a node was excluded; the failure is not charged then.
func (f *fleet) unjoin(cause *FailedError, progress bool) bool {
	if f == nil {
		return false
	}
	before, fresh := f.before, f.fresh
	f.before, f.fresh = nil, nil
	if before == nil && fresh == nil || progress || cause.Kind.Or() != blame.Worker {
		return false
	}
	if before != nil {
		fresh = slices.DeleteFunc(slices.Clone(f.members), func(m nodes.Member) bool {
			return slices.ContainsFunc(before, func(of nodes.Member) bool { return of.Index == m.Index })
		})
		m, found := f.memberOf(cause.Rank)
		isFresh := slices.ContainsFunc(fresh, func(of nodes.Member) bool { return of.Index == m.Index })
		if found && !isFresh && cause.failed[m.Index] && cause.blames(m.Index) {
			f.log.Warn("new nodes are not excluded yet: ranks of an old one failed alone", "node", m.Index, "host", m.Host, "cause", cause.Cause)
			f.fresh = fresh
			return false
		}
	}
	excluded := false
	for _, m := range fresh {
		excluded = f.dismiss(m, "the group grew by it, and failed before a checkpoint was committed: "+cause.Cause) || excluded
	}
	return excluded
}

// whole reports whether all members of the last group are still here, so that the next one need
// not wait for a node.
func (f *fleet) whole() bool {
	now := f.endpoint.Members()
	return len(f.members) > 0 && !slices.ContainsFunc(f.members, func(was nodes.Member) bool {
		return !slices.ContainsFunc(now, func(m nodes.Member) bool {
			return m.Index == was.Index && m.Joining == was.Joining && m.State != nodes.StateLost && m.State != nodes.StateSuspect
		})
	})
}

// enough returns how many nodes the next group need not wait for: those of the last one, if none
// was lost. 0: the group waits for the most.
func (f *fleet) enough() int {
	if f.job.members == nil && f.whole() {
		return len(f.members)
	}
	return 0
}

// ending describes why an attempt ended to grow, with what failed meanwhile.
func (g *growth) ending(cause *FailedError) string {
	text := g.String()
	if cause != nil {
		text = fmt.Sprintf("grown from %d to %d nodes: %s joined, and the workers failed when they were asked to save and end: %s", g.from, g.to, g.joined, cause.Cause)
	}
	return session.Beginning(text, session.MaxMessage)
}
