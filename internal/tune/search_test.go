package tune_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"sort"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/tune"
)

// lab makes the log of a search without processes: trials report values of a function of
// their number and step, in an order that a random generator chooses.
type lab struct {
	def    tune.Definition
	log    []events.Recorded
	search *tune.Search
	value  func(trial int, step int64) float64
	random *rand.Rand
	slots  int
	live   map[string]int64 // the step of each trial that is trained now
	saved  map[string]int64 // the step of each trial's checkpoint
	tries  map[string]int   // attempts
	kills  int
}

const run = "r"

func newLab(def tune.Definition, slots int, random *rand.Rand, value func(int, int64) float64) *lab {
	l := &lab{def: def, slots: slots, random: random, value: value, live: map[string]int64{}, saved: map[string]int64{}, tries: map[string]int{}}
	l.append("", def.Body("job"))
	l.refold()
	return l
}

func (l *lab) append(trial string, body events.Body) {
	stamp := events.Stamp{ID: fmt.Sprint(len(l.log)), Source: "test", Time: time.Unix(1, 0)}
	r := events.Recorded{Sequence: uint64(len(l.log) + 1)}
	if body.Kind().Decides() {
		d, err := events.NewDecision(stamp, events.Aggregate{Run: run, Trial: trial}, body)
		if err != nil {
			panic(err)
		}
		r.Event = d.Event
	} else {
		f, err := events.NewFact(stamp, events.Scope{Run: run, Trial: trial, Actor: events.Node(0)}, body)
		if err != nil {
			panic(err)
		}
		r.Event = f.Event
	}
	l.log = append(l.log, r)
	if l.search != nil {
		if err := l.search.Fold(run, r); err != nil {
			panic(err)
		}
	}
}

// refold is a new tuner: it knows the log alone.
func (l *lab) refold() {
	all, err := tune.Replay(run, l.read(len(l.log)))
	if err != nil {
		panic(err)
	}
	l.search = all.Search
}

func (l *lab) read(until int) func(func(events.Recorded, error) bool) {
	return func(yield func(events.Recorded, error) bool) {
		for _, r := range l.log[:until] {
			if !yield(r, nil) {
				return
			}
		}
	}
}

// decide appends the next decision if it is about a trial, or any with "".
func (l *lab) decide(of string) bool {
	next, ok := l.search.Next()
	if !ok || of != "" && next.Trial != of {
		return false
	}
	next.Job = "job"
	if l.random != nil && l.random.IntN(3) == 0 {
		l.meanwhile(next.Trial)
	}
	l.append("", &next)
	return true
}

// meanwhile appends events that the next decision does not follow from: the log may get them
// before it.
func (l *lab) meanwhile(next string) {
	l.append("other", &events.Metrics{Attempt: 1, Iteration: 1, Step: 1, Metrics: map[string]any{"loss": 0.0}})
	for _, t := range l.search.Assigned() {
		step, on := l.live[t.Name]
		if on && t.Open() && t.Name != next {
			l.live[t.Name] = step + 1
			l.append(t.Name, &events.Metrics{Attempt: l.tries[t.Name], Iteration: int(step) + 1, Step: step + 1, Metrics: map[string]any{"loss": metric(l.value(t.Number, step+1))}})
			return
		}
	}
}

func (l *lab) fill() {
	for len(l.live) < l.slots {
		for _, t := range l.search.Assigned() {
			if _, on := l.live[t.Name]; t.Open() && !on && len(l.live) < l.slots {
				l.start(t.Name)
			}
		}
		if len(l.live) == l.slots || !l.decide("") {
			return
		}
	}
}

func (l *lab) start(name string) {
	l.tries[name]++
	l.append(name, &events.GroupStarted{Attempt: l.tries[name], Job: "job"})
	l.live[name] = l.saved[name]
}

func metric(v float64) any {
	switch {
	case math.IsNaN(v):
		return "NaN"
	case math.IsInf(v, 1):
		return "Infinity"
	case math.IsInf(v, -1):
		return "-Infinity"
	}
	return v
}

// step lets one trial report, fail or end, or kills the tuner.
func (l *lab) step(faults bool) {
	names := make([]string, 0, len(l.live))
	for name := range l.live {
		names = append(names, name)
	}
	slices.Sort(names)
	name := names[l.random.IntN(len(names))]
	if faults {
		switch l.random.IntN(60) {
		case 8, 9: // a trial that errored is tried again
			for _, t := range l.search.Assigned() {
				if _, on := l.live[t.Name]; t.Ended == tune.Errored && !on && len(l.live) < l.slots {
					l.start(t.Name)
					return
				}
			}
		case 0:
			l.append(name, &events.TrialErrored{Attempt: l.tries[name], Message: "rank 0 died"})
			delete(l.live, name)
			return
		case 1:
			l.append(name, &events.TrialCompleted{Attempt: l.tries[name]})
			delete(l.live, name)
			return
		case 2: // a report without the metric
			l.append(name, &events.Metrics{Attempt: l.tries[name], Iteration: 1000, Step: l.live[name], Metrics: map[string]any{"other": 1.0}})
			return
		case 3, 4:
			l.kill()
			return
		case 5: // a report of a group that was replaced
			l.append(name, &events.Metrics{Attempt: l.tries[name] - 1, Iteration: 1, Step: l.def.MaxSteps, Metrics: map[string]any{"loss": -1e9}})
			return
		case 7: // a report of a trial that has its result on the rung
			for _, t := range l.search.Assigned() {
				if t.Reached && t.Ended == "" {
					l.append(t.Name, &events.Metrics{Attempt: l.tries[t.Name], Iteration: 2000, Step: l.def.MaxSteps, Metrics: map[string]any{"loss": -1e9}})
					return
				}
			}
		case 6: // a trial of another name
			l.append("main", &events.Metrics{Attempt: 1, Iteration: 1, Step: l.def.MaxSteps, Metrics: map[string]any{"loss": -1e9}})
			return
		}
	}
	l.report(name)
}

func (l *lab) report(name string) {
	at := l.live[name]
	if t, _ := l.search.Trial(name); t.Open() { // else its report is in the log, and waits for the reply
		at++
		l.live[name] = at
		l.append(name, &events.Metrics{
			Attempt: l.tries[name], Iteration: int(at), Step: at,
			Metrics: map[string]any{"loss": metric(l.value(t.Number, at))},
		})
	}
	t, _ := l.search.Trial(name)
	if t.Open() || t.Reached && t.Rung < l.search.Top() && l.decide(name) {
		return
	}
	l.saved[name] = at // a trial that waits, saves
	delete(l.live, name)
}

// kill ends the tuner and all trials: what was not saved is lost.
func (l *lab) kill() {
	l.kills++
	clear(l.live)
	l.refold()
}

// finish runs the search to its end.
func (l *lab) finish(t interface{ Fatalf(string, ...any) }, faults bool) {
	for n := 0; ; n++ {
		l.fill()
		if len(l.live) == 0 {
			if l.search.Busy() {
				t.Fatalf("no trial is trained, and one has steps to train")
			}
			return
		}
		if n > 1_000_000 {
			t.Fatalf("the search does not end")
		}
		l.step(faults)
	}
}

// decisions returns the decisions in the log, without where they are.
func (l *lab) decisions() (all []string) {
	for _, r := range l.log {
		if b, ok := bodyOf(r).(*events.SearchAssigned); ok {
			all = append(all, fmt.Sprintf("%s→%d", b.Trial, b.Steps))
		}
	}
	return all
}

func bodyOf(r events.Recorded) events.Body {
	body, err := r.Body()
	if err != nil {
		panic(err)
	}
	return body
}

// paper is get_job of Algorithm 2 of Li et al. (2020), over the raw events of a log: for k
// from the last rung but one down to 0, the first of the top |rung k|/η that is not already
// promoted, else a new configuration. It shares no code with the package. Its log is that of
// events before the decision.
func paper(def tune.Definition, log []events.Recorded) (trial string, steps int64, ok bool) {
	resource := []int64{}
	for r := def.Grace; r < def.MaxSteps; r *= int64(def.Reduction) {
		resource = append(resource, r)
	}
	resource = append(resource, def.MaxSteps)
	type job struct {
		rung    int
		over    bool // it has its result
		dead    bool
		errored bool // and may be tried again
		last    *float64
		attempt int
	}
	type outcome struct {
		trial string
		loss  float64
	}
	jobs, rungs, promoted, names := map[string]*job{}, make([][]outcome, len(resource)), map[string]int{}, 0
	for _, r := range log {
		switch b := bodyOf(r).(type) {
		case *events.SearchAssigned:
			j := jobs[b.Trial]
			if j == nil {
				j = &job{rung: -1}
				jobs[b.Trial] = j
				names++
			}
			j.rung++
			j.over = false
			promoted[b.Trial] = j.rung
		case *events.GroupStarted:
			jobs[r.Scope.Trial].attempt = b.Attempt
			if jobs[r.Scope.Trial].errored {
				jobs[r.Scope.Trial].dead, jobs[r.Scope.Trial].errored = false, false
			}
		case *events.Metrics:
			j := jobs[r.Scope.Trial]
			var loss float64
			switch v := b.Metrics["loss"].(type) {
			case float64:
				loss = v
			case string:
				loss = map[string]float64{"NaN": math.NaN(), "Infinity": math.Inf(1), "-Infinity": math.Inf(-1)}[v]
			default:
				continue
			}
			if j == nil || b.Attempt < j.attempt {
				continue
			}
			if def.Finite && math.IsInf(loss, 0) {
				loss = math.NaN()
			}
			j.last = &loss
			if !j.over && !j.dead && b.Step >= resource[j.rung] {
				j.over = true
				rungs[j.rung] = append(rungs[j.rung], outcome{r.Scope.Trial, loss})
			}
		case *events.TrialCompleted:
			if j := jobs[r.Scope.Trial]; j != nil && !j.dead {
				if !j.over && j.last != nil {
					j.over = true
					rungs[j.rung] = append(rungs[j.rung], outcome{r.Scope.Trial, *j.last})
				}
				j.dead = true
			}
		case *events.TrialErrored:
			if j := jobs[r.Scope.Trial]; !j.dead {
				j.dead, j.errored = true, true
			}
		}
	}
	for k := len(resource) - 2; k >= 0; k-- {
		top := append([]outcome{}, rungs[k]...)
		sort.SliceStable(top, func(i, j int) bool {
			a, b := top[i].loss, top[j].loss
			if def.Mode == "max" {
				a, b = -a, -b
			}
			return a < b || !math.IsNaN(a) && math.IsNaN(b)
		})
		for _, t := range top[:len(top)/def.Reduction] {
			if promoted[t.trial] == k && !jobs[t.trial].dead && !math.IsNaN(t.loss) {
				return t.trial, resource[k+1], true
			}
		}
	}
	if names < def.Trials {
		return def.Name(names), resource[0], true
	}
	return "", 0, false
}

// definitions draws a search.
func definitions(t *rapid.T) tune.Definition {
	d := tune.Definition{
		Metric: "loss", Mode: rapid.SampledFrom([]string{tune.Min, tune.Max}).Draw(t, "mode"), Trials: rapid.IntRange(1, 40).Draw(t, "trials"),
		Reduction: rapid.IntRange(2, 4).Draw(t, "reduction"), Grace: rapid.Int64Range(1, 4).Draw(t, "grace"),
	}
	d.Finite = rapid.Bool().Draw(t, "finite")
	d.MaxSteps = d.Grace + rapid.Int64Range(0, 40).Draw(t, "more")
	s, err := tune.ReadSpace([]byte(`{"u": {"uniform": [0, 1]}}`))
	if err != nil {
		t.Fatal(err)
	}
	d.Space = s
	return d
}

// curve is a loss that depends on the trial and the step; some trials diverge, and some are
// equal.
func curve(seed uint64) func(int, int64) float64 {
	return func(trial int, step int64) float64 {
		r := rand.New(rand.NewPCG(seed, uint64(trial)))
		kind, level := r.IntN(12), float64(r.IntN(20))
		if kind == 0 && step > 3 {
			return math.NaN()
		}
		if kind == 1 {
			return math.Inf(1)
		}
		if kind == 2 {
			return math.Inf(-1)
		}
		return level + 10/float64(step)*float64(r.IntN(4))
	}
}

// TestDecisionsArePaper: under any order of reports, with failures, ends, kills of the tuner
// and groups that were replaced, each decision is that of the paper's algorithm on the same
// events, and [tune.Replay] finds that it follows from them.
func TestDecisionsArePaper(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		def := definitions(t)
		seed := rapid.Uint64().Draw(t, "seed")
		l := newLab(def, rapid.IntRange(1, 6).Draw(t, "slots"), rand.New(rand.NewPCG(seed, 1)), curve(seed))
		l.finish(t, rapid.Bool().Draw(t, "faults"))
		decided := 0
		for i, r := range l.log {
			b, ok := bodyOf(r).(*events.SearchAssigned)
			if !ok {
				continue
			}
			decided++
			trial, steps, ok := paper(def, l.log[:b.After])
			if !ok || trial != b.Trial || steps != b.Steps {
				t.Fatalf("event %d: trial %s to %d steps; the paper's algorithm: %s to %d, %v", i+1, b.Trial, b.Steps, trial, steps, ok)
			}
		}
		if trial, steps, more := paper(def, l.log); more {
			t.Fatalf("the search is over, and the paper's algorithm trains %s to %d", trial, steps)
		}
		all, err := tune.Replay(run, l.read(len(l.log)))
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
}

// TestKilledTunerDecidesTheSame: with one slot, a tuner that was killed many times
// makes the decisions of a tuner that was not.
func TestKilledTunerDecidesTheSame(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		def := definitions(t)
		seed := rapid.Uint64().Draw(t, "seed")
		whole := newLab(def, 1, rand.New(rand.NewPCG(seed, 1)), curve(seed))
		whole.finish(t, false)
		killed := newLab(def, 1, rand.New(rand.NewPCG(seed, 2)), curve(seed))
		for n := 0; ; n++ {
			killed.fill()
			if len(killed.live) == 0 {
				break
			}
			if killed.random.IntN(5) == 0 && killed.kills < 50 {
				killed.kill()
				continue
			}
			killed.step(false)
		}
		if a, b := whole.decisions(), killed.decisions(); !slices.Equal(a, b) {
			t.Fatalf("after %d kills:\n%s\nwithout:\n%s", killed.kills, strings.Join(b, " "), strings.Join(a, " "))
		}
	})
}

// TestResultsDoNotChange: what a search knows of each trial's result on a rung after a part of
// its log, it knows after all of it.
func TestResultsDoNotChange(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		def := definitions(t)
		seed := rapid.Uint64().Draw(t, "seed")
		l := newLab(def, 3, rand.New(rand.NewPCG(seed, 1)), curve(seed))
		l.finish(t, true)
		part, err := tune.Replay(run, l.read(rapid.IntRange(1, len(l.log)).Draw(t, "until")))
		if err != nil {
			t.Fatal(err)
		}
		all, err := tune.Replay(run, l.read(len(l.log)))
		if err != nil {
			t.Fatal(err)
		}
		for i, d := range part.Decisions {
			if !reflect.DeepEqual(d, all.Decisions[i]) {
				t.Fatalf("decision %d was %+v and is %+v", i, d, all.Decisions[i])
			}
		}
		was, is := part.Board(run, nil, nil), all.Board(run, nil, nil)
		for i, row := range was.Trials {
			now := is.Trials[i]
			same := row.At < now.At || row.At == now.At && (row.Value == nil) == (now.Value == nil) && (row.Value == nil || *row.Value == *now.Value)
			if !same {
				t.Fatalf("trial %s had %v at rung %d and has %v at rung %d", row.Trial, row.Value, row.At, now.Value, now.At)
			}
		}
	})
}

// TestForgedDecision: a decision that does not follow from the log is found.
func TestForgedDecision(t *testing.T) {
	def := tune.Definition{Metric: "loss", Mode: tune.Min, Trials: 4, Reduction: 2, Grace: 1, MaxSteps: 4, Space: space(t, `{"u": 1}`)}
	for _, c := range []struct {
		forged events.SearchAssigned
		want   string
	}{
		{events.SearchAssigned{Trial: "t01", Rung: 1, Steps: 2, After: 7}, "trial t00 on rung 1 (2 steps) follows"},
		{events.SearchAssigned{Trial: "t00", Rung: 1, Steps: 4, After: 7}, "trial t00 on rung 1 (2 steps) follows"},
		{events.SearchAssigned{Trial: "t00", Rung: 1, Steps: 2, After: 3}, "comes after the decision at"},
		{events.SearchAssigned{Trial: "t00", Rung: 1, Steps: 2, After: 8}, "comes after the decision at"},
		{events.SearchAssigned{Trial: "t00", Rung: 1, Steps: 2, After: 7}, ""},
	} {
		l := newLab(def, 1, nil, func(trial int, _ int64) float64 { return float64(trial) })
		for range 2 {
			l.fill()
			for name := range l.live {
				l.report(name)
			}
		}
		if len(l.log) != 7 {
			t.Fatalf("%d events before the forged one", len(l.log))
		}
		l.append("", &c.forged)
		all, err := tune.Replay(run, l.read(len(l.log)))
		if err != nil {
			t.Fatal(err)
		}
		got := all.Decisions[len(all.Decisions)-1].Problem
		if (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
			t.Errorf("%+v: %q, want %q", c.forged, got, c.want)
		}
	}
}

// TestRungs: the rungs are the paper's, with the most steps as the last.
func TestRungs(t *testing.T) {
	for _, c := range []struct {
		grace, most int64
		reduction   int
		want        []int64
	}{
		{1, 9, 3, []int64{1, 3, 9}},
		{15, 240, 4, []int64{15, 60, 240}},
		{10, 100, 3, []int64{10, 30, 90, 100}},
		{5, 5, 2, []int64{5}},
		{1, math.MaxInt64, 1 << 40, []int64{1, 1 << 40, math.MaxInt64}},
	} {
		d := tune.Definition{Grace: c.grace, MaxSteps: c.most, Reduction: c.reduction}
		if got := d.Rungs(); !slices.Equal(got, c.want) {
			t.Errorf("%d to %d by %d: %v, want %v", c.grace, c.most, c.reduction, got, c.want)
		}
	}
}

// TestNames: a name belongs to one trial, and names sort in the order of the trials.
func TestNames(t *testing.T) {
	for _, trials := range []int{1, 100, 101, 1000} {
		d := tune.Definition{Trials: trials}
		var names []string
		for i := range trials {
			names = append(names, d.Name(i))
			if d.Index(d.Name(i)) != i {
				t.Fatalf("%s is trial %d", d.Name(i), d.Index(d.Name(i)))
			}
		}
		if !slices.IsSorted(names) {
			t.Errorf("the names of %d trials do not sort", trials)
		}
		for _, other := range []string{"", "t", "t0", "main", "t-1", d.Name(trials), "t+1", "t0000001"} {
			if i := d.Index(other); i >= 0 {
				t.Errorf("%q is trial %d of %d", other, i, trials)
			}
		}
	}
}
