package tune_test

import (
	"encoding/json"
	"fmt"
	"hash/fnv"
	"maps"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/tune"
)

// colony makes the log of a population without processes: trials report values of a function of
// their name and step, save at the end of an interval, and are killed, fail and lose saves.
type colony struct {
	*lab
	worth func(trial string, step int64) float64
	heads map[string]string // the checkpoint that the next attempt of a trial continues from
	open  []func()          // ends of saves that the killed tuner left open
	calm  bool              // no tuner is killed, and no save is lost
}

func newColony(def tune.Definition, slots int, random *rand.Rand, worth func(string, int64) float64) *colony {
	return &colony{lab: newLab(def, slots, random, nil), worth: worth, heads: map[string]string{}}
}

// fill does what the tuner does with free slots: clones first.
func (c *colony) fill() {
	for {
		next, ok := c.search.Next()
		if !ok || next.Parent == nil {
			break
		}
		c.decideNext(next)
	}
	for len(c.live) < c.slots {
		for _, t := range c.search.Assigned() {
			due := t.Open() || slices.Contains(c.search.Unsettled(), t.Name)
			if _, on := c.live[t.Name]; due && !on && len(c.live) < c.slots {
				c.begin(t)
			}
		}
		next, ok := c.search.Next()
		if len(c.live) == c.slots || !ok {
			return
		}
		c.decideNext(next)
	}
}

func (c *colony) decideNext(next events.SearchAssigned) {
	next.Job = "job"
	if c.random.IntN(4) == 0 { // events that the decision does not follow from
		c.append("other", &events.Metrics{Attempt: 1, Iteration: 1, Step: 1, Metrics: map[string]any{"loss": 0.0}})
	}
	c.append("", &next)
	if next.Parent != nil {
		c.append(next.Trial, &events.TrialCreated{Config: next.Config, Parent: next.Parent})
		c.heads[next.Trial] = next.Parent.Run + "/" + next.Parent.Trial + "@" + next.Parent.Checkpoint
		c.saved[next.Trial] = c.stepOf(*next.Parent)
	}
}

// stepOf returns the step of a checkpoint in the log.
func (c *colony) stepOf(p events.TrialParent) (step int64) {
	for _, r := range c.log {
		if b, ok := bodyOf(r).(*events.CheckpointBegun); ok && r.Scope.Trial == p.Trial && b.Checkpoint == p.Checkpoint {
			step = b.Step
		}
	}
	return step
}

func (c *colony) begin(t tune.Trial) {
	c.tries[t.Name]++
	c.append(t.Name, &events.GroupStarted{Attempt: c.tries[t.Name], Job: "job", Resume: c.heads[t.Name]})
	c.live[t.Name] = c.saved[t.Name]
}

// kill ends the tuner and its trials. The next one ends the saves that were open.
func (c *colony) kill() {
	c.kills++
	clear(c.live)
	c.refold()
	for _, end := range c.open {
		end()
	}
	c.open = nil
}

// report lets a trial train for one step. At the end of an interval it saves and ends.
func (c *colony) report(name string, faults bool) {
	step := c.live[name] + 1
	c.live[name] = step
	c.append(name, &events.Metrics{Attempt: c.tries[name], Iteration: int(step), Step: step, Metrics: map[string]any{"loss": metric(c.worth(name, step))}})
	t, _ := c.search.Trial(name)
	if !t.Reached || step < c.search.Steps(t.Rung) {
		return
	}
	id := fmt.Sprintf("step-%d.a%d", step, c.tries[name])
	c.append(name, &events.CheckpointBegun{Attempt: c.tries[name], Checkpoint: id, Name: fmt.Sprint("step-", step), Step: step, WorldSize: 1})
	commits := func() {
		c.append(name, &events.CheckpointCommitted{Attempt: c.tries[name], Checkpoint: id})
		c.heads[name], c.saved[name] = id, step
	}
	chance := c.random.IntN(12)
	if c.calm {
		chance = -1
	}
	switch chance {
	case 0: // the save is lost
		if faults {
			c.append(name, &events.CheckpointAborted{Attempt: c.tries[name], Checkpoint: id, Reason: "deadline"})
			delete(c.live, name)
			return
		}
	case 1: // the tuner dies in the save, which its successor finishes
		c.open = append(c.open, commits)
		c.kill()
		return
	case 2: // or aborts
		c.open = append(c.open, func() {
			c.append(name, &events.CheckpointAborted{Attempt: c.tries[name], Checkpoint: id, Reason: "killed"})
		})
		c.kill()
		return
	}
	commits()
	delete(c.live, name)
}

// finish runs the search to its end. With faults, trials fail and end by themselves.
func (c *colony) finish(t interface{ Fatalf(string, ...any) }, faults bool) {
	for n := 0; ; n++ {
		c.fill()
		if len(c.live) == 0 {
			if c.search.Busy() {
				t.Fatalf("no trial is trained, and one has steps to train")
			}
			return
		}
		if n > 200_000 {
			t.Fatalf("the search does not end")
		}
		names := make([]string, 0, len(c.live))
		for name := range c.live {
			names = append(names, name)
		}
		slices.Sort(names)
		name := names[c.random.IntN(len(names))]
		if c.random.IntN(40) == 0 && c.kills < 60 && !c.calm {
			c.kill()
			continue
		}
		if faults && c.fault(name) {
			continue
		}
		c.report(name, faults)
	}
}

// fault lets something fail, sometimes.
func (c *colony) fault(name string) bool {
	switch c.random.IntN(80) {
	case 0:
		c.append(name, &events.TrialErrored{Attempt: c.tries[name], Message: "rank 0 died"})
	case 1:
		c.append(name, &events.TrialCompleted{Attempt: c.tries[name]})
	case 2: // a user starts a trial again that errored
		for _, t := range c.search.Assigned() {
			if _, on := c.live[t.Name]; t.Ended == tune.Errored && t.ReplacedBy == "" && !on && len(c.live) < c.slots {
				c.begin(t)
				return true
			}
		}
		return false
	case 3: // a report of a group that was replaced, and one without the metric
		c.append(name, &events.Metrics{Attempt: c.tries[name] - 1, Iteration: 1, Step: c.def.MaxSteps, Metrics: map[string]any{"loss": -1e9}})
		c.append(name, &events.Metrics{Attempt: c.tries[name], Iteration: 3000, Step: c.live[name], Metrics: map[string]any{"other": 1.0}})
		return true
	case 4: // a report of a trial whose place another one has
		for _, t := range c.search.Assigned() {
			if t.ReplacedBy != "" {
				c.append(t.Name, &events.Metrics{Attempt: c.tries[t.Name], Iteration: 4000, Step: c.def.MaxSteps, Metrics: map[string]any{"loss": -1e9}})
				return true
			}
		}
		return false
	default:
		return false
	}
	delete(c.live, name)
	return true
}

// chosen are the decisions in the log, without attempts and places in it.
func (c *colony) chosen() (all []string) {
	for _, r := range c.log {
		b, ok := bodyOf(r).(*events.SearchAssigned)
		if !ok {
			continue
		}
		text := fmt.Sprintf("%s→%d", b.Trial, b.Steps)
		if b.Parent != nil {
			config, err := json.Marshal(b.Config)
			if err != nil {
				panic(err)
			}
			id, _, _ := strings.Cut(b.Parent.Checkpoint, ".a")
			text += fmt.Sprintf(" of %s@%s for %s %s", b.Parent.Trial, id, b.Replaces, config)
		}
		all = append(all, text)
	}
	return all
}

// populations draws a search.
func populations(t *rapid.T) tune.Definition {
	d := tune.Definition{
		Metric: "loss", Mode: rapid.SampledFrom([]string{tune.Min, tune.Max}).Draw(t, "mode"), Trials: rapid.IntRange(2, 10).Draw(t, "trials"),
		Seed: rapid.Int64().Draw(t, "seed of the draws"), Finite: true, Scheduler: tune.PBT, Every: rapid.Int64Range(1, 4).Draw(t, "interval"),
		Quantile: rapid.SampledFrom([]float64{0, 0.1, 0.2, 0.25, 0.3, 0.5}).Draw(t, "quantile"),
		Exploration: tune.Exploration{
			Resample: rapid.SampledFrom([]float64{0, 0.25, 1}).Draw(t, "resample"), Factors: []float64{1.2, 0.8},
			Perturb: rapid.SampledFrom([][]string{{"u"}, {"c", "g", "i", "l", "u"}, {"g"}}).Draw(t, "perturb"),
		},
	}
	d.MaxSteps = d.Every + rapid.Int64Range(0, 14).Draw(t, "more")
	s, err := tune.ReadSpace([]byte(populated))
	if err != nil {
		t.Fatal(err)
	}
	d.Space = s
	return d
}

const populated = `{"c": {"choice": ["a", "b", "c"]}, "g": {"grid": [16, 32, 64]}, "i": {"integer": [-3, 9]}, "k": "kept", "l": {"loguniform": [0.001, 0.1]}, "u": {"uniform": [-1, 2]}}`

// worth is a loss that depends on the trial's name and the step; some are not finite, some equal.
func worth(seed uint64) func(string, int64) float64 {
	return func(trial string, step int64) float64 {
		h := fnv.New64a()
		_, _ = h.Write([]byte(trial))
		r := rand.New(rand.NewPCG(seed, h.Sum64()))
		kind, level := r.IntN(12), float64(r.IntN(8))
		switch {
		case kind == 0 && step > 3:
			return math.NaN()
		case kind == 1:
			return math.Inf(1)
		case kind == 2:
			return math.Inf(-1)
		}
		return level + 10/float64(step)*float64(r.IntN(3))
	}
}

// jaderberg is the rule of Jaderberg et al. (2017) with truncation selection, in the synchronous
// form of their appendix and of Ray Tune, over the raw events of a log: after each interval, the
// members are sorted by their score, each of the last quantile copies a random one of the first
// (exploit), and its hyperparameters are drawn again or multiplied (explore). It shares no code
// with the package. Its log is that of events before the decision.
func jaderberg(name string, def tune.Definition, log []told) (next events.SearchAssigned, ok bool) {
	type save struct {
		attempt int
		step    int64
		at      int
		id      string
	}
	type agent struct {
		name, gone       string
		out, errored     bool
		interval, try    int
		scored           bool
		score            float64
		at               int64 // step of the score
		scoredIn, topped int   // places in the log, and the attempt and place of the newest report of the steps
		toppedTry        int
		last             *save
		open             map[string]save
		config           map[string]any
	}
	var ends []int64
	for s := def.Every; s < def.MaxSteps; s += def.Every {
		ends = append(ends, s)
	}
	ends = append(ends, def.MaxSteps)
	all, place := map[string]*agent{}, []*agent{}
	lives := map[string]int{}
	done, pending := 0, []events.SearchAssigned{}
	safe := func(a *agent) bool {
		return a.scored && a.last != nil && (a.last.step >= a.at || a.last.attempt == a.toppedTry && a.last.at > a.topped && a.last.at > a.scoredIn)
	}
	explore := func(config map[string]any, r *rand.Rand) map[string]any {
		out := map[string]any{}
		for _, name := range slices.Sorted(maps.Keys(def.Space.Values())) {
			v := config[name]
			out[name] = v
			if !slices.Contains(def.Perturb, name) {
				continue
			}
			again := r.Float64() < def.Resample
			for kind, of := range def.Space.Values()[name].(map[string]any) {
				list := of.([]any)
				if kind == "choice" || kind == "grid" {
					n := len(list)
					if again {
						out[name] = list[r.IntN(n)]
						continue
					}
					i := slices.Index(list, v)
					if r.IntN(2) == 0 {
						i--
					} else {
						i++
					}
					out[name] = list[min(n-1, max(0, i))]
					continue
				}
				lo, hi := list[0].(float64), list[1].(float64)
				x := v.(float64)
				switch {
				case again && kind == "integer":
					out[name] = lo + float64(r.Int64N(int64(hi-lo)+1))
					continue
				case again && kind == "loguniform":
					x = math.Exp(math.Log(lo) + (math.Log(hi)-math.Log(lo))*r.Float64())
				case again:
					x = lo + (hi-lo)*r.Float64()
				default:
					f := def.Factors[r.IntN(len(def.Factors))]
					y := x * f
					if kind == "integer" {
						if y = math.Round(y); y == x {
							toward := 1.0
							if f < 1 {
								toward = -1
							}
							if x < 0 {
								toward = -toward
							}
							y = x + toward
						}
					}
					x = y
				}
				out[name] = math.Max(lo, math.Min(hi, x))
			}
		}
		return out
	}
	exploit := func(interval int) {
		var pop []int
		for i, a := range place {
			if !a.out && a.interval == interval {
				pop = append(pop, i)
			}
		}
		bad := func(v float64) bool { return math.IsNaN(v) || math.IsInf(v, 0) }
		less := func(i, j int) bool { // whether i is worse than j
			x, y := place[i].score, place[j].score
			if bad(x) != bad(y) {
				return bad(x)
			}
			if !bad(x) && x != y {
				return (x < y) == (def.Mode == tune.Max)
			}
			return i > j
		}
		slices.SortFunc(pop, func(i, j int) int { // ascending, as Ray Tune
			if less(i, j) {
				return -1
			}
			return 1
		})
		if len(pop) <= 1 {
			return
		}
		n := int(math.Ceil(float64(len(pop)) * def.Quantile))
		if float64(n) > float64(len(pop))/2 {
			n = len(pop) / 2
		}
		lower, upper := slices.Clone(pop[:n]), []int{}
		for _, i := range slices.Backward(pop[len(pop)-n:]) { // the best first
			if !bad(place[i].score) {
				upper = append(upper, i)
			}
		}
		slices.Sort(lower)
		for _, i := range lower {
			if len(upper) == 0 {
				break
			}
			r := rand.New(rand.NewPCG(uint64(def.Seed), uint64(interval+1)<<32+uint64(i)))
			donor := place[upper[r.IntN(len(upper))]]
			pending = append(pending, events.SearchAssigned{
				Trial: fmt.Sprintf("t%02d-%d", i, lives[fmt.Sprintf("t%02d", i)]+1), Rung: interval + 1, Steps: ends[interval+1], Replaces: place[i].name,
				Parent: &events.TrialParent{Run: name, Trial: donor.name, Checkpoint: donor.last.id}, Config: explore(donor.config, r),
			})
		}
	}
	for at, r := range log {
		a := all[r.trial]
		switch b := r.body.(type) {
		case *events.SearchAssigned:
			a := all[b.Trial]
			switch {
			case a == nil && b.Parent == nil:
				a = &agent{name: b.Trial, config: def.Drawn(len(place)), open: map[string]save{}}
				place = append(place, a)
			case a == nil:
				a = &agent{name: b.Trial, config: b.Config, open: map[string]save{}}
				old := slices.IndexFunc(place, func(p *agent) bool { return p.name == b.Replaces })
				place[old].gone = b.Trial
				place[old] = a
				lives[fmt.Sprintf("t%02d", old)]++
				pending = slices.DeleteFunc(pending, func(p events.SearchAssigned) bool { return p.Replaces == b.Replaces })
			}
			all[b.Trial] = a
			a.interval, a.scored, a.toppedTry, a.topped = b.Rung, false, 0, 0
		case *events.GroupStarted:
			a.try = max(a.try, b.Attempt)
			if a.errored {
				a.out, a.errored = false, false
			}
			if a.last != nil && a.last.id != b.Resume {
				a.last = nil
			}
		case *events.Metrics:
			if a == nil || b.Attempt < a.try {
				break
			}
			if b.Step >= ends[a.interval] && a.toppedTry != b.Attempt {
				a.toppedTry, a.topped = b.Attempt, at
			}
			v, isNumber := b.Metrics["loss"].(float64)
			if text, isText := b.Metrics["loss"].(string); isText {
				v, isNumber = math.NaN(), text != "" // none of the three is finite
			}
			if isNumber && !a.scored && !a.out && b.Step >= ends[a.interval] {
				a.scored, a.score, a.at, a.scoredIn = true, v, b.Step, at
			}
		case *events.CheckpointBegun:
			a.open[b.Checkpoint] = save{b.Attempt, b.Step, at, b.Checkpoint}
		case *events.CheckpointCommitted:
			if s, begun := a.open[b.Checkpoint]; begun && (a.last == nil || s.at > a.last.at) {
				a.last = &s
			}
		case *events.TrialCompleted:
			a.out, a.errored = true, false
		case *events.TrialErrored:
			if !a.out {
				a.out, a.errored = true, true
			}
		}
		for len(place) == def.Trials && done < len(ends)-1 {
			some, late := false, false
			for _, p := range place {
				some = some || !p.out
				late = late || !p.out && (p.interval < done || p.interval == done && !safe(p))
			}
			if !some || late {
				break
			}
			exploit(done)
			done++
		}
	}
	for _, p := range pending {
		if i := slices.IndexFunc(place, func(a *agent) bool { return a.name == p.Replaces }); i >= 0 && !place[i].out {
			return p, true
		}
	}
	if n := len(place); n < def.Trials {
		return events.SearchAssigned{Trial: fmt.Sprintf("t%02d", n), Steps: ends[0]}, true
	}
	for _, p := range place {
		if !p.out && p.interval < done && safe(p) {
			return events.SearchAssigned{Trial: p.name, Rung: p.interval + 1, Steps: ends[p.interval+1]}, true
		}
	}
	return next, false
}

// told is an event for the simulation.
type told struct {
	trial string
	body  events.Body
}

func tell(log []events.Recorded) (all []told) {
	for _, r := range log {
		all = append(all, told{r.Scope.Trial, bodyOf(r)})
	}
	return all
}

// bare returns a decision without what a simulation does not know.
func bare(b events.SearchAssigned) events.SearchAssigned {
	b.Job, b.After, b.Reason = "", 0, ""
	return b
}

// TestPopulationIsPaper: under any order of reports, with failures, lost saves, ends, kills of the
// tuner and groups that were replaced, each decision is that of the paper's rule on the same
// events, and [tune.Replay] finds that it follows from them.
func TestPopulationIsPaper(t *testing.T) {
	clones := 0
	rapid.Check(t, func(t *rapid.T) {
		def := populations(t)
		seed := rapid.Uint64().Draw(t, "seed")
		c := newColony(def, rapid.IntRange(1, 6).Draw(t, "slots"), rand.New(rand.NewPCG(seed, 1)), worth(seed))
		c.finish(t, rapid.Bool().Draw(t, "faults"))
		decided, log := 0, tell(c.log)
		for i, r := range log {
			b, ok := r.body.(*events.SearchAssigned)
			if !ok {
				continue
			}
			decided++
			if b.Parent != nil {
				clones++
			}
			want, ok := jaderberg(run, def, log[:b.After])
			if !ok || !reflect.DeepEqual(bare(*b), bare(want)) {
				t.Fatalf("event %d: %+v; the paper's rule: %+v, %v", i+1, *b, want, ok)
			}
		}
		if want, more := jaderberg(run, def, log); more {
			t.Fatalf("the search is over, and the paper's rule trains %+v", want)
		}
		all, err := tune.Replay(run, c.read(len(c.log)))
		if err != nil {
			t.Fatal(err)
		}
		if len(all.Decisions) != decided {
			t.Fatalf("%d decisions replayed of %d", len(all.Decisions), decided)
		}
		for _, d := range all.Decisions {
			if d.Problem != "" {
				t.Fatalf("event %d: %s", d.Sequence, d.Problem)
			}
		}
	})
	if clones == 0 {
		t.Error("no trial was cloned")
	}
}

// TestPopulationDecidesTheSame: with any number of slots, any order of reports and any kills, the
// decisions are those of a tuner with one slot that is not killed.
func TestPopulationDecidesTheSame(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		def := populations(t)
		seed := rapid.Uint64().Draw(t, "seed")
		whole := newColony(def, 1, rand.New(rand.NewPCG(seed, 1)), worth(seed))
		whole.calm = true
		whole.finish(t, false)
		killed := newColony(def, rapid.IntRange(1, 6).Draw(t, "slots"), rand.New(rand.NewPCG(seed, 2)), worth(seed))
		killed.finish(t, false)
		if a, b := whole.chosen(), killed.chosen(); !slices.Equal(a, b) {
			t.Fatalf("after %d kills:\n%s\nwithout:\n%s", killed.kills, strings.Join(b, "\n"), strings.Join(a, "\n"))
		}
	})
}

// TestExplore: values stay in their domains, names that are not perturbed keep the donor's, and
// factors and neighbors are those of the table.
func TestExplore(t *testing.T) {
	s := space(t, `{"c": {"choice": ["a", "b", "c"]}, "g": {"grid": [1, 2]}, "i": {"integer": [0, 20]}, "k": 7, "u": {"uniform": [0, 1]}}`)
	from := map[string]any{"c": "b", "g": 2.0, "i": 10.0, "k": 7.0, "u": 0.9}
	seen := map[string]map[string]bool{}
	e := tune.Exploration{Factors: []float64{1.2, 0.8}, Perturb: []string{"c", "i", "u"}}
	for i := range uint64(200) {
		got, how := s.Explore(from, e, rand.New(rand.NewPCG(1, i)))
		if got["k"] != 7.0 || got["g"] != 2.0 || len(how) != 3 {
			t.Fatalf("%v: %q", got, how)
		}
		for name, v := range got {
			if seen[name] == nil {
				seen[name] = map[string]bool{}
			}
			if f, ok := v.(float64); ok {
				v = math.Round(f*100) / 100
			}
			seen[name][fmt.Sprint(v)] = true
		}
		if again, _ := s.Explore(from, e, rand.New(rand.NewPCG(1, i))); !reflect.DeepEqual(got, again) {
			t.Fatalf("the same generator gives %v and %v", got, again)
		}
	}
	for name, want := range map[string][]string{"c": {"a", "c"}, "i": {"12", "8"}, "u": {"0.72", "1"}} {
		if got := slices.Sorted(maps.Keys(seen[name])); !slices.Equal(got, want) {
			t.Errorf("%s becomes %v, want %v", name, got, want)
		}
	}
	for _, c := range []struct {
		value, factor, want float64
	}{{10, 1.2, 12}, {10, 0.8, 8}, {1, 1.2, 2}, {1, 0.8, 0}, {2, 1.2, 3}, {2, 0.8, 1}, {20, 1.2, 20}, {0, 0.8, 0}, {0, 1.2, 1}, {5, 1, 5}} {
		got, how := s.Explore(map[string]any{"i": c.value}, tune.Exploration{Factors: []float64{c.factor}, Perturb: []string{"i"}}, rand.New(rand.NewPCG(1, 1)))
		if got["i"] != c.want || !strings.HasPrefix(how[0], "i ") {
			t.Errorf("%v × %v: %v, want %v (%s)", c.value, c.factor, got["i"], c.want, how)
		}
	}
	again, how := s.Explore(map[string]any{"g": 3.0}, tune.Exploration{Perturb: []string{"g"}}, rand.New(rand.NewPCG(1, 1)))
	if v := again["g"]; v != 1.0 && v != 2.0 || !strings.Contains(how[0], "drawn again") {
		t.Errorf("a value that is not in the list becomes %v: %q", v, how)
	}
	all := tune.Exploration{Resample: 1, Factors: []float64{1.2}, Perturb: []string{"g", "u"}}
	values := map[any]bool{}
	for i := range uint64(50) {
		got, _ := s.Explore(from, all, rand.New(rand.NewPCG(2, i)))
		values[got["g"]], values[got["u"]] = true, true
	}
	if len(values) != 52 {
		t.Errorf("%d different values were drawn again, want 52", len(values))
	}
}

// pbt is a small population whose losses are the numbers of the trials.
func pbt(t *testing.T, trials int) *colony {
	t.Helper()
	def := tune.Definition{
		Metric: "loss", Mode: tune.Min, Trials: trials, MaxSteps: 4, Scheduler: tune.PBT, Every: 2, Quantile: 0.25, Finite: true,
		Exploration: tune.Exploration{Factors: []float64{2}, Perturb: []string{"u"}}, Space: space(t, `{"k": 1, "u": {"uniform": [0.25, 1]}}`),
	}
	c := newColony(def, 1, rand.New(rand.NewPCG(1, 1)), func(trial string, _ int64) float64 { return float64(trial[2]) })
	c.random = rand.New(never{})
	return c
}

// never is a source of numbers for which nothing happens by chance.
type never struct{}

func (never) Uint64() uint64 { return 1<<64 - 1<<40 }

// until runs a search until a trial is decided.
func (c *colony) until(t *testing.T, trial string) events.SearchAssigned {
	t.Helper()
	for range 1000 {
		next, ok := c.search.Next()
		if ok && next.Trial == trial {
			return next
		}
		c.fill()
		for name := range c.live {
			c.report(name, false)
		}
	}
	t.Fatalf("trial %s is not decided: %q", trial, c.chosen())
	return events.SearchAssigned{}
}

// TestForgedClone: a decision about a clone that does not follow from the log is found.
func TestForgedClone(t *testing.T) {
	for _, c := range []struct {
		forge func(*events.SearchAssigned)
		want  string
	}{
		{func(*events.SearchAssigned) {}, ""},
		{func(b *events.SearchAssigned) { b.Config = map[string]any{"k": 1.0, "u": 0.5} }, "the configuration k=1 u="},
		{func(b *events.SearchAssigned) { b.Parent.Checkpoint = "step-1.a1" }, "is forked from t00@step-2.a1 and replaces t03"},
		{func(b *events.SearchAssigned) { b.Parent.Trial = "t01" }, "is forked from t00@step-2.a1 and replaces t03"},
	} {
		l := pbt(t, 4)
		next := l.until(t, "t03-1")
		c.forge(&next)
		l.append("", &next)
		all, err := tune.Replay(run, l.read(len(l.log)))
		if err != nil {
			t.Fatal(err)
		}
		got := all.Decisions[len(all.Decisions)-1].Problem
		if (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
	l := pbt(t, 4)
	next := l.until(t, "t03-1")
	for _, forge := range []func(*events.SearchAssigned){
		func(b *events.SearchAssigned) { b.Trial = "t03-2" },
		func(b *events.SearchAssigned) { b.Replaces = "t09" },
		func(b *events.SearchAssigned) { b.Parent = &events.TrialParent{Run: run, Trial: "t09"} },
		func(b *events.SearchAssigned) { b.Trial, b.Parent, b.Replaces = "t04", nil, "" },
	} {
		forged := next
		forge(&forged)
		d, err := events.NewDecision(events.Stamp{ID: "f", Source: "test", Time: time.Unix(1, 0)}, events.Aggregate{Run: run}, &forged)
		if err != nil {
			t.Fatal(err)
		}
		if err := l.search.Fold(run, events.Recorded{Event: d.Event, Sequence: uint64(len(l.log) + 1)}); err == nil {
			t.Errorf("folded %+v", forged)
		}
	}
}

// TestPopulationOnBoard: the board shows where clones come from, what they changed and whom they
// replaced, and that a trial without its checkpoint is due.
func TestPopulationOnBoard(t *testing.T) {
	c := pbt(t, 4)
	next := c.until(t, "t03-1")
	if next.Reason != "loss 51 is number 4 of 4 after 2 steps, among the last 1; t00 has loss 48, number 1: "+next.Reason[strings.Index(next.Reason, "u "):] || !strings.HasSuffix(next.Reason, "(× 2)") {
		t.Errorf("reason: %s", next.Reason)
	}
	c.finish(t, false)
	b := boardOf(t, c.lab, nil, nil)
	if !b.Over || b.Scheduler != tune.PBT || b.Best == nil || b.Best.Trial != "t00" || len(b.Trials) != 5 {
		t.Fatalf("%+v", b)
	}
	was, is := b.Trials[3], b.Trials[4]
	if was.State != tune.StateReplaced || was.ReplacedBy != "t03-1" || was.AtStep != 2 {
		t.Errorf("replaced: %+v", was)
	}
	if is.State != tune.StateDone || is.Replaces != "t03" || *is.Parent != (events.TrialParent{Run: run, Trial: "t00", Checkpoint: "step-2.a1"}) {
		t.Errorf("clone: %+v", is)
	}
	if len(is.Changed) != 1 || is.Changed[0].Name != "u" || is.Changed[0].From != b.Trials[0].Config["u"] || is.Changed[0].To != is.Config["u"] {
		t.Errorf("changed: %+v", is.Changed)
	}
	rows := b.Table()
	if rows[0][6] != "FORKED FROM" || rows[5][6] != "t00@step-2.a1" || rows[1][6] != "-" || !strings.Contains(fmt.Sprint(rows[5][7]), "→") {
		t.Errorf("table: %v", rows)
	}
	c = pbt(t, 2)
	c.fill()
	for range 2 {
		c.append("t00", &events.Metrics{Attempt: 1, Iteration: 1, Step: 2, Metrics: map[string]any{"loss": 1.0}})
	}
	if b := boardOf(t, c.lab, nil, nil); b.Trials[0].State != tune.StateDue || b.Over || b.Trials[1].State != tune.StateNew {
		t.Errorf("without its checkpoint: %+v", b.Trials)
	}
	if why := c.search.Waits("t00"); why != "search: loss 1 after 2 steps; the trial waits until all trials have 2" {
		t.Error(why)
	}
}

// TestDonorLosesCheckpoint: nothing is forked from a checkpoint that was deleted, and the trial
// that would have been replaced is trained further.
func TestDonorLosesCheckpoint(t *testing.T) {
	c := pbt(t, 4)
	c.until(t, "t03-1")
	c.append("t00", &events.CheckpointDeleted{Checkpoint: "step-2.a1", Reason: "by hand"})
	if got := c.search.Unsettled(); !slices.Equal(got, []string{"t00"}) {
		t.Errorf("without a checkpoint of its steps: %v", got)
	}
	next, ok := c.search.Next()
	if !ok || next.Parent != nil || next.Trial != "t01" {
		t.Errorf("%+v, %v", next, ok)
	}
	c.heads["t00"], c.saved["t00"] = "", 0
	c.finish(t, false)
	if all := c.chosen(); slices.ContainsFunc(all, func(d string) bool { return strings.HasPrefix(d, "t03-1") }) {
		t.Errorf("%q", all)
	}
}
