package planner_test

import (
	"bytes"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/planner"
)

// A coordinator may die anywhere. A coordinator with the log up to there ends each
// save once: it commits what is written by all, with the manifest that the
// dead one would have made, aborts what was begun, and forgets the rest.
func TestTakeOverAtEveryPrefix(t *testing.T) {
	const world = 2
	ids := []string{"x.a2", "y.a2"}
	whole, manifests := happy(t, world, ids...)
	for n := range len(whole.log) + 1 {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			c := &cluster{t: t, world: world, log: slices.Clone(whole.log[:n])}
			coord := replay(t, world, c.log)
			coord.Abandon("the trainer died")
			commits, writes := c.settle(coord, start)
			for _, commit := range commits {
				if id := commit.Manifest.Checkpoint; !bytes.Equal(checkpoint.EncodeManifest(commit.Manifest), manifests[id]) {
					t.Errorf("the manifest of %s differs from the dead coordinator's", id)
				}
			}
			if len(writes) > 0 {
				t.Errorf("asked to write from memory that is gone: %+v", writes)
			}
			if open := coord.Open(); len(open) > 0 {
				t.Errorf("left open: %v", open)
			}
			for _, id := range ids {
				want := ""
				if begun, _ := outcome(whole.log[:n], id); begun {
					want = " aborted"
				}
				if writesIn(whole.log[:n], id, world) {
					want = " committed"
				}
				if begun, got := outcome(c.log, id); got != want || begun != (want != "") {
					t.Errorf("%s: begun %v and then%s, want%s", id, begun, got, want)
				}
			}
			// The next in line finds nothing to do.
			next := replay(t, world, c.log)
			next.Abandon("again")
			if due, deadline := next.Tick(start); len(due) > 0 || !deadline.IsZero() {
				t.Errorf("a third coordinator wants %+v by %v", due, deadline)
			}
		})
	}
}

// A coordinator whose workers live on continues where the dead one stopped:
// with the rest of the facts the save commits to the same manifest, and
// without them it is aborted at the deadline, not before.
func TestContinueAtEveryPrefix(t *testing.T) {
	const world, id = 2, "x.a2"
	whole, manifests := happy(t, world, id)
	for n := range len(whole.log) + 1 {
		t.Run(fmt.Sprintf("%d, facts come", n), func(t *testing.T) {
			c := &cluster{t: t, world: world, log: slices.Clone(whole.log[:n])}
			coord := replay(t, world, c.log)
			commits, _ := c.settle(coord, start)
			for _, r := range whole.log[n:] {
				if r.Kind.Decides() || r.Kind == "plan.global" {
					continue // the dead coordinator never got so far
				}
				body, err := r.Body()
				if err != nil {
					t.Fatal(err)
				}
				if err := coord.Apply(c.append(body)); err != nil {
					t.Fatal(err)
				}
				more, _ := c.settle(coord, start)
				commits = append(commits, more...)
			}
			if _, ends := outcome(c.log, id); ends != " committed" {
				t.Errorf("ended as%s", ends)
			}
			for _, commit := range commits {
				if !bytes.Equal(checkpoint.EncodeManifest(commit.Manifest), manifests[id]) {
					t.Error("another manifest")
				}
			}
		})
		t.Run(fmt.Sprintf("%d, silence", n), func(t *testing.T) {
			c := &cluster{t: t, world: world, log: slices.Clone(whole.log[:n])}
			coord := replay(t, world, c.log)
			c.settle(coord, start)
			c.settle(coord, start.Add(time.Minute-1))
			_, before := outcome(c.log, id)
			c.settle(coord, start.Add(time.Minute))
			_, after := outcome(c.log, id)
			seen := slices.ContainsFunc(whole.log[:n], func(r events.Recorded) bool { return r.Kind == "plan.local" })
			switch {
			case writesIn(whole.log[:n], id, world):
				if before != " committed" || after != before {
					t.Errorf("all is written, and it ended as%s, then as%s", before, after)
				}
			case !seen:
				if after != "" {
					t.Errorf("ended as%s before anyone saved", after)
				}
			case before != "" || after != " aborted":
				t.Errorf("ended as%s before the deadline, as%s at it", before, after)
			}
			if open := coord.Open(); len(open) > 0 {
				t.Errorf("left open: %v", open)
			}
		})
	}
}

// Between the decision to commit and its coming back through the log nothing
// may end the save otherwise: neither the clock, nor a rank that is late with
// another plan, nor a drain.
func TestNothingAbortsWhatIsBeingCommitted(t *testing.T) {
	const id = "x.a2"
	whole, _ := happy(t, 2, id)
	end := slices.IndexFunc(whole.log, func(r events.Recorded) bool { return r.Kind == "checkpoint.committed" })
	stranger := whole.plan(id, 1)
	stranger.Step, stranger.Participants = 6, []int{1}
	failed := &events.WriteFailed{Attempt: 2, Checkpoint: id, Rank: 0, Error: "late"}
	for name, disturb := range map[string]func(*cluster, *planner.Coordinator) (time.Time, error){
		"deadline":     func(_ *cluster, _ *planner.Coordinator) (time.Time, error) { return start.Add(time.Hour), nil },
		"other plan":   func(c *cluster, p *planner.Coordinator) (time.Time, error) { return start, p.Apply(c.append(stranger)) },
		"late failure": func(c *cluster, p *planner.Coordinator) (time.Time, error) { return start, p.Apply(c.append(failed)) },
		"drain": func(_ *cluster, p *planner.Coordinator) (time.Time, error) {
			p.Drain("stop")
			return start, nil
		},
		"abandon": func(_ *cluster, p *planner.Coordinator) (time.Time, error) {
			p.Abandon("stop")
			return start, nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := &cluster{t: t, world: 2, log: slices.Clone(whole.log[:end])}
			coord := replay(t, 2, c.log)
			due, next := coord.Tick(start)
			if len(due) != 1 {
				t.Fatalf("due %+v, want one commit", due)
			}
			if _, ok := due[0].(planner.Commit); !ok || !next.IsZero() && next.Before(start.Add(time.Minute)) {
				t.Fatalf("due %+v by %v, want one commit", due, next)
			}
			now, err := disturb(c, coord)
			if err != nil {
				t.Fatal(err)
			}
			if due, next := coord.Tick(now); len(due) > 0 || !next.IsZero() {
				t.Errorf("after the commit was asked for: %+v by %v", due, next)
			}
			if open := coord.Open(); !slices.Equal(open, []string{id}) {
				t.Errorf("open %v until the log has the end", open)
			}
		})
	}
}

// A save whose last write arrives with the deadline is complete.
func TestCompleteSaveHasNoDeadline(t *testing.T) {
	c := &cluster{t: t, world: 1}
	coord := planner.NewCoordinator(config(1))
	for i, body := range []events.Body{c.plan("x.a2", 0), sealed("x.a2", 0), written("x.a2", 0)} {
		if err := coord.Apply(c.append(body)); err != nil {
			t.Fatal(err)
		}
		c.settle(coord, start.Add(time.Duration(i)*30*time.Second))
	}
	if _, ends := outcome(c.log, "x.a2"); ends != " committed" {
		t.Errorf("ended as%s", ends)
	}
}

// A tick that finds nothing to do but to wait for the log asks for no timer:
// a deadline in the past would make its caller spin.
func TestNextDeadlineLiesAhead(t *testing.T) {
	c := &cluster{t: t, world: 2}
	coord := planner.NewCoordinator(config(2))
	if err := coord.Apply(c.append(c.plan("x.a2", 0))); err != nil {
		t.Fatal(err)
	}
	if due, next := coord.Tick(start); len(due) != 1 || !next.Equal(start.Add(time.Minute)) {
		t.Fatalf("due %+v, next %v", due, next)
	}
	late := start.Add(2 * time.Minute) // and checkpoint.begun has not come back
	if due, next := coord.Tick(late); len(due) != 0 || !next.IsZero() {
		t.Errorf("due %+v, next %v, want nothing until the log moves", due, next)
	}
	c.append(&events.CheckpointBegun{Attempt: 2, Checkpoint: "x.a2", Name: "x", Step: 5, WorldSize: 2, Participants: []int{0, 1}})
	if err := coord.Apply(c.log[len(c.log)-1]); err != nil {
		t.Fatal(err)
	}
	c.settle(coord, late)
	if _, ends := outcome(c.log, "x.a2"); ends != " aborted" {
		t.Errorf("ended as%s", ends)
	}
}

// A coordinator that another one has replaced may record late that it has lost the nodes of ranks. The ranks live, and
// save on. Ends that were seen, and those that the new coordinator records, count.
func TestLossesOfReplacedCoordinator(t *testing.T) {
	for name, c := range map[string]struct {
		by     events.Actor
		unseen bool
		dead   bool
	}{
		"of the one before":       {events.Node(0), true, false},
		"of its successor":        {events.Node(1), true, true},
		"seen by a node":          {events.Node(2), false, true},
		"seen by the one before":  {events.Node(0), false, true},
		"of another node's sight": {events.Node(2), true, false},
	} {
		job, coord := &cluster{t: t, world: 2}, planner.NewCoordinator(config(2))
		for _, body := range []events.Body{
			&events.GroupStarted{Attempt: 2, WorldSize: 2}, &events.GroupCoordinator{Attempt: 2, Node: 1},
			&events.WorkerExited{Attempt: 2, Rank: 0, Code: -1, Unseen: c.unseen}, job.plan("x.a2", 0), job.plan("x.a2", 1),
		} {
			r := job.append(body)
			if _, exit := body.(*events.WorkerExited); exit {
				r.Scope.Actor = c.by
			}
			if err := coord.Apply(r); err != nil {
				t.Fatal(err)
			}
		}
		job.settle(coord, start)
		if begun, end := outcome(job.log, "x.a2"); !begun || (end == " aborted") != c.dead {
			t.Errorf("%s: the save has begun: %v, and is%s", name, begun, end)
		}
	}
}
