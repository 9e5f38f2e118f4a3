package planner_test

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/planner/plan"
	"github.com/ckptstore/ckptstore/tensor"
	"pgregory.net/rapid"
)

// A coordinator may die anywhere. Whoever knows the log up to there ends each
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
				if id := commit.Manifest.Checkpoint; !bytes.Equal(plan.EncodeManifest(commit.Manifest), manifests[id]) {
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

// A coordinator whose workers live on goes on where the dead one stopped:
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
				if !bytes.Equal(plan.EncodeManifest(commit.Manifest), manifests[id]) {
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
				t.Errorf("open %v until the log says otherwise", open)
			}
		})
	}
}

// A save whose last write arrives with the deadline is complete.
func TestCompleteSaveHasNoDeadline(t *testing.T) {
	c := &cluster{t: t, world: 1}
	coord := planner.NewCoordinator(config(1))
	for _, body := range []events.Body{c.plan("x.a2", 0), sealed("x.a2", 0), written("x.a2", 0)} {
		if err := coord.Apply(c.append(body)); err != nil {
			t.Fatal(err)
		}
		c.settle(coord, start)
		if body.Kind() == "write.sealed" {
			start := start.Add(time.Hour - time.Minute)
			_ = start
		}
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

// A fault on rank k, at each of its steps, is a failure of exactly rank k.
func TestFaultsNameTheirRank(t *testing.T) {
	const world, id = 4, "x.a2"
	for k := range world {
		for name, fault := range map[string]events.Body{
			"killed before its plan": &events.WorkerExited{Attempt: 2, Rank: k, Code: -9, Signal: "SIGKILL"},
			"exited after its plan":  &events.WorkerExited{Attempt: 2, Rank: k, Code: 1},
			"write failed":           &events.WriteFailed{Attempt: 2, Checkpoint: id, Rank: k, Error: "disk full"},
			"never saved":            nil,
			"never sealed":           nil,
			"never written":          nil,
		} {
			t.Run(fmt.Sprint(name, k), func(t *testing.T) {
				c := &cluster{t: t, world: world}
				coord := planner.NewCoordinator(config(world))
				say := func(body events.Body) {
					if err := coord.Apply(c.append(body)); err != nil {
						t.Fatal(err)
					}
					c.settle(coord, start)
				}
				for rank := range world {
					if rank == k && (name == "killed before its plan" || name == "never saved") {
						continue
					}
					say(c.plan(id, rank))
				}
				for rank := range world {
					if rank != k || name == "write failed" || name == "never written" {
						say(sealed(id, rank))
					}
				}
				for rank := range world {
					if rank != k {
						say(written(id, rank))
					}
				}
				if _, ends := outcome(c.log, id); ends != "" {
					t.Fatalf("ended as%s before the fault", ends)
				}
				if fault != nil {
					say(fault)
				} else {
					c.settle(coord, start.Add(time.Hour))
				}
				last, err := c.log[len(c.log)-1].Body()
				if aborted, ok := last.(*events.CheckpointAborted); !ok || err != nil || !slices.Equal(aborted.Ranks, []int{k}) {
					t.Errorf("the log ends with %+v, %v; want an abort that names rank %d", last, err, k)
				}
			})
		}
	}
}

// The reason of an abort fits the log, however much is wrong.
func TestReasonIsBounded(t *testing.T) {
	c := &cluster{t: t, world: 2}
	coord := planner.NewCoordinator(config(2))
	for rank := range 2 {
		l := plan.Local{Rank: rank}
		for i := range 2000 {
			l.Items = append(l.Items, item(shard(fmt.Sprint("w", i), tensor.Shape{4}, part(int64(rank), 3))))
		}
		p := c.plan("x.a2", rank)
		p.Plan = events.InlineBlob(plan.EncodeLocal(l))
		if err := coord.Apply(c.append(p)); err != nil {
			t.Fatal(err)
		}
	}
	c.settle(coord, start)
	last, err := c.log[len(c.log)-1].Body()
	aborted, ok := last.(*events.CheckpointAborted)
	if !ok || err != nil {
		t.Fatalf("the log ends with %+v, %v", last, err)
	}
	if len(aborted.Reason) > 20<<10 || !strings.HasSuffix(aborted.Reason, " more problems") || !strings.Contains(aborted.Reason, `tensor "w0": box [0]+[3] of rank 0 and box [1]+[3] of rank 1 overlap`) {
		t.Errorf("the reason has %d bytes and ends in %q", len(aborted.Reason), aborted.Reason[len(aborted.Reason)-80:])
	}
}

// However the ranks' facts interleave with each other, with the coordinator's
// own words and with the writes that it asked for, there is one commit, and
// its manifest is the same.
func TestAnyInterleavingCommitsTheSameManifest(t *testing.T) {
	ids := []string{"x.a2", "y.a2"}
	manifests := map[int]map[string][]byte{}
	for world := 1; world <= 4; world++ {
		_, manifests[world] = happy(t, world, ids...)
	}
	rapid.Check(t, func(t *rapid.T) {
		world := rapid.IntRange(1, 4).Draw(t, "world")
		c := &cluster{t: t, world: world}
		coord := planner.NewCoordinator(config(world))
		var todo [][]events.Body // what each rank has still to say, in order
		for rank := range world {
			var own []events.Body
			for _, id := range ids {
				own = append(own, c.plan(id, rank), sealed(id, rank))
			}
			todo = append(todo, own)
		}
		applied := 0
		var words []events.Body // commanded, not in the log yet; in order
		var writes []planner.Write
		asked := map[string]int{}
		tick := func() {
			due, _ := coord.Tick(start)
			for _, command := range due {
				switch command := command.(type) {
				case planner.Decide:
					words = append(words, command.Body)
				case planner.Publish:
					words = append(words, command.Body)
				case planner.Write:
					asked[fmt.Sprint(command.Checkpoint, command.Rank)]++
					writes = append(writes, command)
				case planner.Commit:
					if want := manifests[world][command.Manifest.Checkpoint]; !bytes.Equal(plan.EncodeManifest(command.Manifest), want) {
						t.Fatalf("manifest %+v is another one", command.Manifest)
					}
					words = append(words, committed(command))
				}
			}
		}
		for {
			var moves []func()
			for rank := range todo {
				if len(todo[rank]) > 0 {
					moves = append(moves, func() { c.append(todo[rank][0]); todo[rank] = todo[rank][1:] })
				}
			}
			for i := range writes {
				moves = append(moves, func() {
					c.append(written(writes[i].Checkpoint, writes[i].Rank))
					writes = slices.Delete(writes, i, i+1)
				})
			}
			if len(words) > 0 {
				moves = append(moves, func() { c.append(words[0]); words = words[1:] })
			}
			if applied < len(c.log) {
				moves = append(moves, func() {
					if err := coord.Apply(c.log[applied]); err != nil {
						t.Fatal(err)
					}
					applied++
					tick()
				})
			}
			if len(moves) == 0 {
				break
			}
			moves[rapid.IntRange(0, len(moves)-1).Draw(t, "move")]()
		}
		for _, id := range ids {
			if _, ends := outcome(c.log, id); ends != " committed" {
				t.Fatalf("%s ended as%q", id, ends)
			}
		}
		for what, n := range asked {
			if n != 1 {
				t.Fatalf("%s was asked to be written %d times", what, n)
			}
		}
	})
}
