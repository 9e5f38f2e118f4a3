package tune

import (
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/events"
)

// checkPopulation checks the members of a definition that population-based training has.
func (d Definition) checkPopulation() error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s", ErrDefinition, fmt.Sprintf(format, args...))
	}
	switch {
	case d.Grace != 0 || d.Reduction != 0:
		return bad("%s has no steps for each trial and no reduction factor", PBT)
	case d.Trials < 2:
		return bad("a population of 1 trial: give 2 or more")
	case d.Every < 1 || d.Every > d.MaxSteps:
		return bad("intervals of %d steps: give 1 to the most steps, %d", d.Every, d.MaxSteps)
	case (d.MaxSteps-1)/d.Every >= mostIntervals:
		return bad("more than %d intervals: give more steps for each", mostIntervals)
	case !(d.Quantile >= 0 && d.Quantile <= 0.5):
		return bad("quantile %v: give 0 to 0.5", d.Quantile)
	case !(d.Resample >= 0 && d.Resample <= 1):
		return bad("probability %v to draw a value again: give 0 to 1", d.Resample)
	case len(d.Factors) == 0:
		return bad("no factors: give numbers such as 1.2 and 0.8")
	case len(d.Perturb) == 0:
		return bad("no value of the configuration changes: name a value that has a domain")
	}
	for _, f := range d.Factors {
		if !(f > 0 && f <= math.MaxFloat64) {
			return bad("factor %v: give a number above 0", f)
		}
	}
	for _, name := range d.Perturb {
		if of, ok := d.Space.of[name]; !ok || of.kind == "" {
			return bad("%q cannot change: the search space has no domain of that name", name)
		}
	}
	return nil
}

// clone is an exploitation that follows from the results of a rung: a trial gives its place to
// a clone of a better one.
type clone struct {
	rung   int    // on which the two were compared
	member int    // whose trial is replaced
	donor  int    // place of the better trial among the trials
	from   string // the donor's checkpoint
	config map[string]any
	reason string
}

// checkpointed is a checkpoint of a trial.
type checkpointed struct {
	id      string
	attempt int
	step    int64
	begun   uint64 // sequence
}

// population is the part of a [Search] that population-based training adds.
type population struct {
	members []int   // places of the trials that have a place in the population, by number
	closed  int     // rungs that all members have reached
	clones  []clone // that were not decided yet, of the last closed rung
}

// member returns the trial that has a place in the population.
func (s *Search) member(i int) *Trial { return s.trials[s.members[i]] }

// Settled reports whether a trial has a result on its rung, and a checkpoint of those steps.
func (t Trial) Settled() bool {
	return t.Reached && t.kept.id != "" &&
		(t.kept.step >= t.result.step || t.kept.attempt == t.ToppedIn && t.kept.begun > max(t.ToppedAt, t.result.sequence))
}

// Unsettled returns the trials of population-based training that have a result below the last rung,
// and no checkpoint of those steps: a clone needs one.
func (s *Search) Unsettled() (names []string) {
	for i := range s.members {
		if t := s.member(i); s.unsettled(t) {
			names = append(names, t.Name)
		}
	}
	return names
}

func (s *Search) unsettled(t *Trial) bool {
	return s.PBT() && t.Reached && t.Rung < s.Top() && t.Ended == "" && !t.Settled()
}

// saves folds an event of a trial's checkpoints.
func (s *Search) saves(t *Trial, body events.Body) {
	if !s.PBT() {
		return
	}
	switch b := body.(type) {
	case *events.CheckpointBegun:
		if t.saving == nil {
			t.saving = map[string]checkpointed{}
		}
		t.saving[b.Checkpoint] = checkpointed{b.Checkpoint, b.Attempt, b.Step, s.last}
	case *events.CheckpointAborted:
		delete(t.saving, b.Checkpoint)
	case *events.CheckpointCommitted:
		if c, ok := t.saving[b.Checkpoint]; ok && c.begun > t.kept.begun {
			t.kept = c
		}
		delete(t.saving, b.Checkpoint)
	case *events.CheckpointSuperseded:
		s.loses(t, b.Checkpoint)
	case *events.CheckpointDeleted:
		s.loses(t, b.Checkpoint)
	}
}

// loses folds the end of a checkpoint: nothing can be forked from it.
func (s *Search) loses(t *Trial, id string) {
	if t.kept.id == id {
		t.kept = checkpointed{}
	}
	s.clones = slices.DeleteFunc(s.clones, func(c clone) bool { return c.from == id && s.trials[c.donor] == t })
}

// close closes rungs that all members have reached and saved. It is called after each event, so
// what follows from a rung does not depend on later ones.
func (s *Search) close() {
	for s.PBT() && s.closed < s.Top() && s.level(s.closed) {
		s.cut(s.closed)
		s.closed++
	}
}

// level reports whether all members that have not ended are on a rung with a checkpoint, or on a
// higher one.
func (s *Search) level(rung int) bool {
	if len(s.members) < s.Trials {
		return false
	}
	some := false
	for i := range s.members {
		t := s.member(i)
		if t.Ended != "" {
			continue
		}
		some = true
		if t.Rung < rung || t.Rung == rung && !t.Settled() {
			return false
		}
	}
	return some
}

// cut selects by truncation: it compares the members on a rung, and chooses a donor among the
// best for each of the worst. Of equal results, that of the lower number is better, so that
// the order of reports in the log does not matter.
func (s *Search) cut(rung int) {
	var ranked []int
	for i := range s.members {
		if t := s.member(i); t.Ended == "" && t.Rung == rung {
			ranked = append(ranked, i)
		}
	}
	slices.SortStableFunc(ranked, func(a, b int) int {
		x, y := s.member(a).result.value, s.member(b).result.value
		switch {
		case s.better(x, y):
			return -1
		case s.better(y, x):
			return 1
		}
		return 0
	})
	n := quantile(len(ranked), s.Quantile)
	donors := slices.DeleteFunc(slices.Clone(ranked[:n]), func(i int) bool { return !s.counts(s.member(i).result.value) })
	if len(donors) == 0 {
		return
	}
	worst := slices.Clone(ranked[len(ranked)-n:])
	slices.Sort(worst)
	for _, i := range worst {
		// A generator of its own for each interval and member: trials' draws have a stream below 2^32.
		random := rand.New(rand.NewPCG(uint64(s.Seed), uint64(rung+1)<<32|uint64(i)))
		donor := donors[random.IntN(len(donors))]
		from, loser := s.member(donor), s.member(i)
		config, how := s.Space.Explore(from.Config, s.Exploration, random)
		s.clones = append(s.clones, clone{
			rung: rung, member: i, donor: s.members[donor], from: from.kept.id, config: config,
			reason: fmt.Sprintf("%s is number %d of %d after %d steps, among the last %d; %s has %s, number %d: %s",
				s.text(loser.result.value), slices.Index(ranked, i)+1, len(ranked), s.rungs[rung], n,
				from.Name, s.text(from.result.value), slices.Index(ranked, donor)+1, strings.Join(how, ", ")),
		})
	}
}

// quantile returns how many of n trials are the best, and as many the worst: a share of them,
// rounded up, and at most half.
func quantile(n int, share float64) int {
	return min(int(math.Ceil(float64(n)*share)), n/2)
}

// nextOfPopulation is [Search.Next] for population-based training: the clones of a rung first,
// then the trials' first steps, then the next interval for those that have the last one.
func (s *Search) nextOfPopulation() (next events.SearchAssigned, ok bool) {
	for _, c := range s.clones {
		was := s.member(c.member)
		if was.Ended != "" {
			continue
		}
		donor := s.trials[c.donor]
		return events.SearchAssigned{
			Trial: s.lifeName(c.member, was.Life+1), Rung: c.rung + 1, Steps: s.rungs[c.rung+1], After: s.last, Reason: c.reason,
			Parent: &events.TrialParent{Run: s.run, Trial: donor.Name, Checkpoint: c.from}, Replaces: was.Name, Config: c.config,
		}, true
	}
	if n := len(s.members); n < s.Trials {
		return events.SearchAssigned{Trial: s.Name(n), Steps: s.rungs[0], After: s.last, Reason: fmt.Sprintf("this is new trial %d of %d", n+1, s.Trials)}, true
	}
	for i := range s.members {
		if t := s.member(i); t.Ended == "" && t.Rung < s.closed && t.Settled() {
			return events.SearchAssigned{
				Trial: t.Name, Rung: t.Rung + 1, Steps: s.rungs[t.Rung+1], After: s.last,
				Reason: fmt.Sprintf("%s after %d steps; all trials have them", s.text(t.result.value), s.rungs[t.Rung]),
			}, true
		}
	}
	return next, false
}

// lifeName returns the name of the n-th clone that has a trial's place.
func (d Definition) lifeName(member, life int) string {
	if life == 0 {
		return d.Name(member)
	}
	return fmt.Sprintf("%s-%d", d.Name(member), life)
}

// assignedInPopulation folds a decision of population-based training. It returns an error for a
// trial that does not follow the last one in its place.
func (s *Search) assignedInPopulation(b *events.SearchAssigned) error {
	if b.Rung < 0 || b.Rung > s.Top() {
		return s.strange(b)
	}
	if i, known := s.named[b.Trial]; known {
		t := s.trials[i]
		if b.Rung <= t.Rung {
			return nil
		}
		if t.ReplacedBy != "" {
			return s.strange(b)
		}
		t.assign(b.Rung)
		return nil
	}
	t := &Trial{Name: b.Trial, Rung: -1}
	if b.Parent == nil {
		if t.Number = len(s.members); b.Trial != s.Name(t.Number) || t.Number >= s.Trials {
			return s.strange(b)
		}
		t.Config = s.Drawn(t.Number)
		s.members = append(s.members, len(s.trials))
	} else {
		i, known := s.named[b.Replaces]
		if _, donor := s.named[b.Parent.Trial]; !known || !donor {
			return s.strange(b)
		}
		was := s.trials[i]
		if was.ReplacedBy != "" || b.Trial != s.lifeName(was.Number, was.Life+1) {
			return s.strange(b)
		}
		was.ReplacedBy = b.Trial
		t.Number, t.Life, t.Parent, t.Replaces, t.Config = was.Number, was.Life+1, b.Parent, b.Replaces, b.Config
		s.members[was.Number] = len(s.trials)
		s.clones = slices.DeleteFunc(s.clones, func(c clone) bool { return c.member == was.Number })
	}
	t.assign(b.Rung)
	s.named[t.Name] = len(s.trials)
	s.trials = append(s.trials, t)
	return nil
}

func (s *Search) strange(b *events.SearchAssigned) error {
	return fmt.Errorf("event %d assigns rung %d of trial %q, which the search does not have", s.last, b.Rung, b.Trial)
}

// waitsInPopulation is [Search.Waits] below the last rung.
func (s *Search) waitsInPopulation(t *Trial) string {
	return fmt.Sprintf("search: %s after %d steps; the trial waits until all trials have %d", s.text(t.result.value), t.result.step, s.rungs[t.Rung])
}

// Change is a value of a clone's configuration that the donor's trial has not.
type Change struct {
	Name string `json:"name"`
	From any    `json:"from"` // the donor's
	To   any    `json:"to"`
}

// changes returns how the configuration of a clone differs from that of its parent's trial, by name.
func (s *Search) changes(t *Trial) (all []Change) {
	if t.Parent == nil {
		return nil
	}
	from := s.trials[s.named[t.Parent.Trial]].Config
	for _, name := range s.Space.names {
		if !reflect.DeepEqual(from[name], t.Config[name]) {
			all = append(all, Change{name, from[name], t.Config[name]})
		}
	}
	return all
}
