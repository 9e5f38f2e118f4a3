package launch

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

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
	joined   string      // the nodes that came
	told     atomic.Bool // a rank has got the request
}

// String returns why the attempt has ended.
func (g *growth) String() string {
	return fmt.Sprintf("grown from %d to %d nodes: %s joined, and the workers saved and ended as asked", g.from, g.to, g.joined)
}

// watchGrowth asks the group to make room for nodes that have joined, until the caller calls stop.
func (w *watch) watchGrowth(ctx context.Context) (stop func()) {
	if w.others == nil || w.cfg.GrowInterval <= 0 || w.job.members != nil || len(w.cfg.Nodes) >= w.others.endpoint.Max() {
		return func() {}
	}
	return inBackground(ctx, w.grow)
}

// grow waits until nodes have come to stay, the group has trained for a while and committed a
// checkpoint, and its ranks can be asked. Then it asks them. A group that does not end in time is
// left alone.
func (w *watch) grow(ctx context.Context) {
	began := time.Now()
	first, known := w.head(ctx)
	deaf := false
	tick := time.NewTicker(growEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		more, settled := w.others.endpoint.Growth()
		if more == 0 || settled < w.others.endpoint.Timeout()/2 || time.Since(began) < w.cfg.GrowInterval {
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
			first, known = w.head(ctx)
			continue
		}
		if head, ok := w.head(ctx); !ok || head == first {
			continue // a group that starts again and again must make progress in between
		}
		break
	}
	w.askToGrow(ctx)
}

// head returns the newest checkpoint of the line.
func (w *watch) head(ctx context.Context) (id string, ok bool) {
	trial, err := w.store.Views.Trial(ctx, w.cfg.Run, w.cfg.Trial)
	return trial.Head, err == nil
}

// askToGrow asks the ranks to save and end, and takes the request back if they do not in time.
func (w *watch) askToGrow(ctx context.Context) {
	var joined []string
	for _, m := range w.others.endpoint.Members() {
		if m.State == nodes.StateSpare {
			joined = append(joined, fmt.Sprintf("node %d on %s", m.Index, m.Host))
		}
	}
	more, _ := w.others.endpoint.Growth()
	if more == 0 {
		return // they left in this moment; the group is not asked in this attempt
	}
	g := &growth{from: len(w.cfg.Nodes), to: len(w.cfg.Nodes) + more, joined: strings.Join(joined, ", ")}
	w.log.Info("workers asked to save and end: the group grows", "attempt", w.group.Number, "from", g.from, "to", g.to, "joined", g.joined)
	w.stop.grow.Store(g)
	w.stop.grown.Store(g)
	limit := time.NewTimer(w.cfg.PreemptGrace)
	defer limit.Stop()
	select {
	case <-limit.C:
		w.stop.grow.Store(nil)
		w.log.Warn("group does not grow: its workers did not end when asked; they continue, and the new nodes are spares", "attempt", w.group.Number, "after", w.cfg.PreemptGrace)
	case <-ctx.Done():
	}
}

// grew returns the growth for which the workers of the attempt have ended; nil if they ended for
// another reason.
func (h *stopState) grew() *growth {
	if g := h.grown.Load(); g != nil && g.told.Load() {
		return g
	}
	return nil
}

// grows reports whether the last attempt has ended to have more nodes. Workers may fail when they
// are asked to end; a node that is lost meanwhile is a failure like any other.
func (j *job) grows(cause *FailedError) bool {
	return j.grew != nil && (cause == nil || cause.Kind.or() == WorkerFailure)
}

// regrow returns what the next attempt resumes from, after an attempt that ended to grow. A failure of workers
// while they ended is not charged: they were asked to.
func (j *job) regrow(ctx context.Context, n int, cause *FailedError) (trial projections.Trial, resume string, err error) {
	trial.Attempt = n
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
