package retention

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/projections"
	"pgregory.net/rapid"
)

// checkpoint is committed, in the line, of that step; it was begun then too.
func checkpoint(step int64, change ...func(*projections.Checkpoint)) projections.Checkpoint {
	c := projections.Checkpoint{
		ID: fmt.Sprintf("step-%d.a1", step), Run: "run", Trial: "main", Step: step,
		State: projections.Committed, BegunSeq: uint64(step + 1),
	}
	for _, f := range change {
		f(&c)
	}
	return c
}

func superseded(c *projections.Checkpoint) { c.Superseded = true }

func removed(c *projections.Checkpoint) {
	c.Superseded, c.Withdrawn, c.Reason = true, true, "removed by name"
}

func trialOf(checkpoints ...projections.Checkpoint) Trial {
	t := Trial{Run: "run", Name: "main", Checkpoints: checkpoints, Values: map[string]map[string]Value{}}
	t.Newest = t.newest().ID
	return t
}

// steps are those of the verdicts that keep, sorted.
func steps(verdicts []Verdict) (kept []int64) {
	for _, v := range verdicts {
		if v.Keep {
			kept = append(kept, v.Checkpoint.Step)
		}
	}
	slices.Sort(kept)
	return kept
}

func TestDecide(t *testing.T) {
	t.Parallel()
	line := func(steps ...int64) []projections.Checkpoint {
		var all []projections.Checkpoint
		for _, s := range steps {
			all = append(all, checkpoint(s))
		}
		return all
	}
	inf := math.Inf(1)
	for name, c := range map[string]struct {
		policy string
		of     []projections.Checkpoint
		loss   map[int64]float64
		holds  map[string][]string
		kept   string
	}{
		"the newest of the line":        {policy: "last=2", of: line(10, 20, 30, 40), kept: "[30 40]"},
		"more than there are":           {policy: "last=9", of: line(10, 20), kept: "[10 20]"},
		"none":                          {policy: "last=9", kept: "[]"},
		"at multiples":                  {policy: "every=20", of: line(10, 20, 30, 40, 50), kept: "[20 40 50]"},
		"between multiples":             {policy: "every=100", of: line(0, 30, 60, 90, 120, 150, 210), kept: "[0 90 150 210]"},
		"the least":                     {policy: "best=1:loss:min", of: line(1, 2, 3, 4), loss: map[int64]float64{1: 3, 2: 1, 3: 2, 4: 9}, kept: "[2 4]"},
		"the greatest two":              {policy: "best=2:loss:max", of: line(1, 2, 3, 4), loss: map[int64]float64{1: 3, 2: 1, 3: 2, 4: 0}, kept: "[1 3 4]"},
		"a tie is the newer's":          {policy: "best=1:loss:max", of: line(1, 2, 3, 4), loss: map[int64]float64{1: 3, 2: 3, 3: 2, 4: 0}, kept: "[2 4]"},
		"a tie of least too":            {policy: "best=1:loss:min", of: line(1, 2, 3, 4), loss: map[int64]float64{1: 1, 2: 1, 3: 2, 4: 3}, kept: "[2 4]"},
		"a number beats -inf beats NaN": {policy: "best=2:loss:max", of: line(1, 2, 3, 4), loss: map[int64]float64{1: math.NaN(), 2: -inf, 3: 0, 4: math.NaN()}, kept: "[2 3 4]"},
		"NaN is never best":             {policy: "best=9:loss:min", of: line(1, 2, 3), loss: map[int64]float64{1: math.NaN(), 2: 5}, kept: "[2 3]"},
		"no value, none best":           {policy: "best=9:loss:min", of: line(1, 2, 3), kept: "[3]"},
		"rules add up":                  {policy: "last=1,every=3,best=1:loss:min", of: line(1, 2, 3, 4, 5), loss: map[int64]float64{2: 1, 4: 2}, kept: "[2 3 5]"},
		"what is held stays": {
			policy: "last=1", holds: map[string][]string{"step-4.a1": {"x was forked from it"}}, kept: "[2 3 4 5]",
			of: append(line(1, 4, 5),
				checkpoint(2, func(c *projections.Checkpoint) { c.Pinned = true }),
				checkpoint(3, func(c *projections.Checkpoint) { c.Tags = []string{"gold"} })),
		},
		"only tagged":              {policy: "keep-tagged", of: append(line(1, 3), checkpoint(2, func(c *projections.Checkpoint) { c.Tags = []string{"gold"} })), kept: "[2 3]"},
		"superseded are kept":      {policy: "last=1", of: append(line(1, 2), checkpoint(9, superseded)), kept: "[2 9]"},
		"superseded are deleted":   {policy: "superseded=delete", of: append(line(1, 2), checkpoint(9, superseded)), kept: "[1 2]"},
		"a pinned one is not":      {policy: "superseded=delete", of: append(line(1), checkpoint(9, superseded, func(c *projections.Checkpoint) { c.Pinned = true })), kept: "[1 9]"},
		"removed ones go":          {policy: "superseded=keep", of: append(line(1), checkpoint(8, superseded), checkpoint(9, removed)), kept: "[1 8]"},
		"all were removed":         {policy: "last=2", of: []projections.Checkpoint{checkpoint(1, removed), checkpoint(2, removed)}, kept: "[]"},
		"removed but pinned":       {policy: "last=1", of: append(line(1), checkpoint(9, removed, func(c *projections.Checkpoint) { c.Pinned = true })), kept: "[1 9]"},
		"no successor in the line": {policy: "superseded=delete", of: []projections.Checkpoint{checkpoint(1, superseded), checkpoint(2, superseded)}, kept: "[2]"},
		"superseded do not count": {
			policy: "last=2", kept: "[2 3 8 9]",
			of: append(line(1, 2, 3), checkpoint(8, superseded), checkpoint(9, superseded)),
		},
		"an open save is no successor": {
			policy: "last=1", kept: "[2]",
			of: append(line(1, 2), checkpoint(3, func(c *projections.Checkpoint) { c.State = projections.Open }),
				checkpoint(4, func(c *projections.Checkpoint) { c.State = projections.Staged }),
				checkpoint(5, func(c *projections.Checkpoint) { c.State = projections.Aborted })),
		},
	} {
		p, err := Parse(c.policy)
		if err != nil {
			t.Fatal(err)
		}
		trial := trialOf(c.of...)
		trial.Holds = c.holds
		trial.Values["loss"] = map[string]Value{}
		for step, v := range c.loss {
			trial.Values["loss"][fmt.Sprintf("step-%d.a1", step)] = Value(v)
		}
		verdicts := Decide(p, trial)
		if got := fmt.Sprint(steps(verdicts)); got != c.kept {
			t.Errorf("%s: %s keeps %s, want %s", name, p, got, c.kept)
		}
		for _, v := range verdicts {
			if v.Reason == "" || v.Checkpoint.State != projections.Committed {
				t.Errorf("%s: %s, which is %s: reason %q", name, v.Checkpoint.ID, v.Checkpoint.State, v.Reason)
			}
		}
	}
}

// TestReasons checks that each verdict lists all of its reasons.
func TestReasons(t *testing.T) {
	t.Parallel()
	trial := trialOf(checkpoint(1), checkpoint(2, func(c *projections.Checkpoint) { c.Pinned, c.Tags = true, []string{"gold"} }), checkpoint(3))
	trial.Values["loss"] = map[string]Value{"step-2.a1": 1}
	verdicts := Decide(Policy{Last: 2, Every: 2, Best: []Best{{N: 1, Metric: "loss"}}}, trial)
	var said []string
	for _, v := range verdicts {
		said = append(said, fmt.Sprintf("%s %t %s", v.Checkpoint.ID, v.Keep, v.Reason))
	}
	want := `step-3.a1 true the newest, number 1 of last=2, the newest of its steps of every=2steps
step-2.a1 true pinned, tagged "gold", number 2 of last=2, the newest of its steps of every=2steps, number 1 of best=1:loss:min
step-1.a1 false no rule keeps it`
	if got := strings.Join(said, "\n"); got != want {
		t.Errorf("reasons are\n%s\nwant\n%s", got, want)
	}
}

// drawTrial is any trial.
func drawTrial(t *rapid.T) Trial {
	var all []projections.Checkpoint
	values := map[string]Value{}
	for i := range rapid.IntRange(0, 12).Draw(t, "checkpoints") {
		c := checkpoint(int64(i), func(c *projections.Checkpoint) {
			c.Step = rapid.Int64Range(0, 60).Draw(t, "step")
			c.State = rapid.SampledFrom([]projections.State{projections.Committed, projections.Committed, projections.Committed, projections.Open, projections.Deleted}).Draw(t, "state")
			c.Superseded = rapid.IntRange(0, 3).Draw(t, "superseded") == 0
			if rapid.IntRange(0, 7).Draw(t, "removed") == 0 {
				removed(c)
			}
			c.Pinned = rapid.IntRange(0, 7).Draw(t, "pinned") == 0
		})
		if rapid.Bool().Draw(t, "has a value") {
			values[c.ID] = Value(rapid.SampledFrom([]float64{0, 1, 2, 3, math.Inf(-1), math.Inf(1), math.NaN()}).Draw(t, "value"))
		}
		all = append(all, c)
	}
	trial := trialOf(all...)
	trial.Values["loss"], trial.Values["acc"] = values, values
	return trial
}

func kept(verdicts []Verdict) map[string]bool {
	ids := map[string]bool{}
	for _, v := range verdicts {
		if v.Keep {
			ids[v.Checkpoint.ID] = true
		}
	}
	return ids
}

// TestNewestStays: no policy deletes what the training would resume from, nor
// all that there is.
func TestNewestStays(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		trial := drawTrial(t)
		verdicts := Decide(policies(t), trial)
		ids := kept(verdicts)
		if len(ids) == 0 && slices.ContainsFunc(verdicts, func(v Verdict) bool { return !v.Checkpoint.Withdrawn }) {
			t.Fatal("nothing is left")
		}
		for _, v := range verdicts { // the newest first
			if v.Checkpoint.Visible() {
				if !v.Keep {
					t.Fatalf("the newest, %s, is deleted: %s", v.Checkpoint.ID, v.Reason)
				}
				return
			}
		}
	})
}

// TestMonotone: a larger number keeps all that a smaller one keeps.
func TestMonotone(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		trial, p := drawTrial(t), policies(t)
		p.KeepTagged = true // so that a rule more never means less
		more := p
		more.Best = slices.Clone(p.Best)
		more.Last += rapid.IntRange(0, 3).Draw(t, "more")
		for i := range more.Best {
			more.Best[i].N += rapid.IntRange(0, 3).Draw(t, "more")
		}
		wide := kept(Decide(more, trial))
		for id := range kept(Decide(p, trial)) {
			if !wide[id] {
				t.Fatalf("%s keeps %s, %s does not", p, id, more)
			}
		}
	})
}

// TestIdempotent: when what was decided is done, nothing more is decided,
// however far it was done.
func TestIdempotent(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		trial, p := drawTrial(t), policies(t)
		first := kept(Decide(p, trial))
		for i, c := range trial.Checkpoints {
			if c.State == projections.Committed && !first[c.ID] && rapid.Bool().Draw(t, "done") {
				trial.Checkpoints[i].State = projections.Deleted
			}
		}
		trial.Newest = trial.newest().ID
		second := kept(Decide(p, trial))
		if len(second) != len(first) {
			t.Fatalf("%s keeps %v, and then %v", p, first, second)
		}
		for id := range first {
			if !second[id] {
				t.Fatalf("%s keeps %s, and then does not", p, id)
			}
		}
	})
}
