package planner_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/tensor"
)

// start is the time at which all scripts and simulations begin.
var start = time.Date(2026, 3, 14, 15, 0, 0, 0, time.UTC)

func config(world int) planner.CoordinatorConfig {
	return planner.CoordinatorConfig{Store: "store", Run: "run", Trial: "t0", Attempt: 2, WorldSize: world, Timeout: time.Minute}
}

// recorded is body as the log would hand it out.
func recorded(body events.Body, seq uint64, scope events.Scope) (events.Recorded, error) {
	stamp := events.Stamp{ID: fmt.Sprint("event-", seq), Source: "test", Time: start}
	if body.Kind().Decides() {
		d, err := events.NewDecision(stamp, events.Aggregate{Run: scope.Run, Trial: scope.Trial}, body)
		return events.Recorded{Event: d.Event, Sequence: seq, Stored: start}, err
	}
	scope.Actor = events.Node(0)
	f, err := events.NewFact(stamp, scope, body)
	return events.Recorded{Event: f.Event, Sequence: seq, Stored: start}, err
}

// cluster is a log and what its ranks would do.
type cluster struct {
	t     interface{ Fatal(...any) }
	world int
	log   []events.Recorded
}

func (c *cluster) append(body events.Body) events.Recorded {
	r, err := recorded(body, uint64(len(c.log)+1), events.Scope{Run: "run", Trial: "t0"})
	if err != nil {
		c.t.Fatal(err)
	}
	c.log = append(c.log, r)
	return r
}

// plan is what a rank of a cluster saves: its rows of one tensor, a replica,
// a value for all and one of its own.
func (c *cluster) plan(id string, rank int) *events.LocalPlan {
	shape := tensor.Shape{int64(2 * c.world), 3}
	l := checkpoint.Local{Rank: rank, Items: []checkpoint.Item{
		item(shard("sharded", shape, rows(shape, c.world)[rank])),
		item(shard("replica", tensor.Shape{5}, part(0, 5))),
		value("config", 7, false), value("rng", 9, true),
	}}
	p := &events.LocalPlan{Attempt: 2, Checkpoint: id, Name: id[:len(id)-len(".a2")], Step: 5, Rank: rank, Plan: events.InlineBlob(checkpoint.EncodeLocal(l))}
	for rank := range c.world {
		p.Participants = append(p.Participants, rank)
	}
	return p
}

func sealed(id string, rank int) *events.WriteSealed {
	return &events.WriteSealed{Attempt: 2, Checkpoint: id, Rank: rank}
}

func written(id string, rank int) *events.WriteCompleted {
	return &events.WriteCompleted{Attempt: 2, Checkpoint: id, Rank: rank, IndexDigest: checkpoint.Sum(fmt.Append(nil, id, rank)).String()}
}

func committed(c planner.Commit) *events.CheckpointCommitted {
	return &events.CheckpointCommitted{
		Attempt: c.Manifest.Attempt, Checkpoint: c.Manifest.Checkpoint,
		Manifest: checkpoint.Sum(checkpoint.EncodeManifest(c.Manifest)).String(), Bytes: c.Bytes,
	}
}

// replay is a new coordinator that knows a log.
func replay(t interface{ Fatal(...any) }, world int, log []events.Recorded) *planner.Coordinator {
	c := planner.NewCoordinator(config(world))
	for _, r := range log {
		if err := c.Apply(r); err != nil {
			t.Fatal(err)
		}
	}
	return c
}

// settle executes what coord commands until nothing is due any more, and
// returns the commits and the writes that it asked for. Writes are not done.
func (c *cluster) settle(coord *planner.Coordinator, now time.Time) (commits []planner.Commit, writes []planner.Write) {
	for range 1000 {
		due, _ := coord.Tick(now)
		if len(due) == 0 {
			return commits, writes
		}
		for _, command := range due {
			var body events.Body
			switch command := command.(type) {
			case planner.Decide:
				body = command.Body
			case planner.Publish:
				body = command.Body
			case planner.Write:
				writes = append(writes, command)
				continue
			case planner.Commit:
				commits = append(commits, command)
				body = committed(command)
			}
			if err := coord.Apply(c.append(body)); err != nil {
				c.t.Fatal(err)
			}
		}
	}
	c.t.Fatal("the coordinator is never content")
	return nil, nil
}

// outcome returns how a checkpoint ended in a log: "", or one or more ends.
func outcome(log []events.Recorded, id string) (begun bool, ends string) {
	for _, r := range log {
		body, err := r.Body()
		if err != nil {
			panic(err)
		}
		switch b := body.(type) {
		case *events.CheckpointBegun:
			begun = begun || b.Checkpoint == id
		case *events.CheckpointCommitted:
			if b.Checkpoint == id {
				ends += " committed"
			}
		case *events.CheckpointAborted:
			if b.Checkpoint == id {
				ends += " aborted"
			}
		}
	}
	return begun, ends
}

// happy is the log of saves that go well, two at a time, and the manifests
// that were committed.
func happy(t *testing.T, world int, ids ...string) (*cluster, map[string][]byte) {
	t.Helper()
	c := &cluster{t: t, world: world}
	coord := planner.NewCoordinator(config(world))
	manifests := map[string][]byte{}
	say := func(body events.Body) {
		if err := coord.Apply(c.append(body)); err != nil {
			t.Fatal(err)
		}
		commits, _ := c.settle(coord, start)
		for _, commit := range commits {
			manifests[commit.Manifest.Checkpoint] = checkpoint.EncodeManifest(commit.Manifest)
		}
	}
	say(&events.GroupStarted{Attempt: 2, WorldSize: world})
	for _, next := range []func(id string, rank int) events.Body{
		func(id string, rank int) events.Body { return c.plan(id, rank) },
		func(id string, rank int) events.Body { return sealed(id, rank) },
		func(id string, rank int) events.Body { return written(id, rank) },
	} {
		for rank := range world {
			for _, id := range ids {
				say(next(id, rank))
			}
		}
	}
	for _, id := range ids {
		if _, ends := outcome(c.log, id); ends != " committed" {
			t.Fatalf("%s ended as%s", id, ends)
		}
	}
	return c, manifests
}

// writesIn reports whether every rank's write of a checkpoint is in a log.
func writesIn(log []events.Recorded, id string, world int) bool {
	var ranks []int
	for _, r := range log {
		if body, _ := r.Body(); body != nil {
			if w, ok := body.(*events.WriteCompleted); ok && w.Checkpoint == id {
				ranks = append(ranks, w.Rank)
			}
		}
	}
	slices.Sort(ranks)
	return len(slices.Compact(ranks)) == world
}
