package tune

import (
	"fmt"
	"math"
	"slices"
	"strconv"

	"github.com/ckptstore/ckptstore/events"
)

// Trial is the state of one trial of a search.
type Trial struct {
	Name    string
	Number  int // from 0
	Config  map[string]any
	Rung    int // that it was assigned last; -1: none
	Reached bool
	Ended   string // [Completed] or [Errored]; empty: it may be trained further
	Failure string // why it errored
	Step    int64  // of its last report that has the metric
	Value   float64
	HasStep bool

	// ToppedIn is the newest attempt with a report at the steps of the assigned rung, or beyond,
	// and ToppedAt the sequence of its first such report; 0: there is none.
	ToppedIn int
	ToppedAt uint64

	// Of population-based training: how many trials had its place before it, the checkpoint
	// that it was forked from, and its neighbors in that place.
	Life       int
	Parent     *events.TrialParent
	Replaces   string
	ReplacedBy string

	attempt int    // the newest
	report  at     // the last of that attempt
	result  result // on its rung, if it has reached it
	kept    checkpointed
	saving  map[string]checkpointed
}

// assign gives the trial the steps of a rung to train.
func (t *Trial) assign(rung int) {
	t.Rung, t.Reached, t.ToppedIn, t.ToppedAt = rung, false, 0, 0
}

// at is the place of a report among those of a trial.
type at struct{ attempt, iteration int }

// Ends of a trial.
const (
	Completed = "completed" // its workers ended by themselves
	Errored   = "errored"   // it failed more often than is tolerated
)

// Open reports whether the trial has steps to train that it was assigned.
func (t Trial) Open() bool { return t.Rung >= 0 && !t.Reached && t.Ended == "" }

// entry is the result of a trial on a rung.
type entry struct {
	trial    int // its place among the trials
	value    float64
	step     int64 // of the report
	promoted bool
}

// Search is the state of a search: a fold of the events of its run, in the order of the
// log. It is for one goroutine at a time.
type Search struct {
	Definition
	run    string
	rungs  []int64
	trials []*Trial       // those that were assigned, in that order
	named  map[string]int // their places
	on     [][]entry
	population
	last  uint64 // sequence of the last event
	heard bool   // a trial has reported
}

// New returns a search of a run without events.
func New(run string, d Definition) *Search {
	s := &Search{Definition: d, run: run, rungs: d.Rungs(), named: map[string]int{}}
	s.on = make([][]entry, len(s.rungs))
	return s
}

// Last returns the sequence of the last event that was folded.
func (s *Search) Last() uint64 { return s.last }

// Reported reports whether any trial has reported, with the metric or without.
func (s *Search) Reported() bool { return s.heard }

// Steps returns the steps of a rung.
func (s *Search) Steps(rung int) int64 { return s.rungs[rung] }

// Top returns the number of the last rung.
func (s *Search) Top() int { return len(s.rungs) - 1 }

// Assigned returns the trials that were assigned, in order.
func (s *Search) Assigned() []Trial {
	out := make([]Trial, len(s.trials))
	for i, t := range s.trials {
		out[i] = *t
	}
	return out
}

// Topped returns the trials that have reached the last rung and whose workers have not ended
// since by themselves.
func (s *Search) Topped() []Trial {
	return slices.DeleteFunc(s.Assigned(), func(t Trial) bool { return !t.Reached || t.Rung < s.Top() || t.Ended != "" })
}

// Trial returns a trial that was assigned.
func (s *Search) Trial(name string) (Trial, bool) {
	if t := s.find(name); t != nil {
		return *t, true
	}
	return Trial{}, false
}

func (s *Search) find(name string) *Trial {
	i, ok := s.named[name]
	if !ok {
		return nil
	}
	return s.trials[i]
}

// Fold folds the next event of the log. Events of other runs, and of trials that are not of
// the search, change nothing but [Search.Last].
func (s *Search) Fold(run string, r events.Recorded) error {
	s.last = r.Sequence
	if r.Scope.Run != run {
		return nil
	}
	body, err := r.Body()
	if err != nil {
		return nil //nolint:nilerr // an event of a newer version; its own readers report it
	}
	if b, ok := body.(*events.SearchAssigned); ok && r.Scope.Actor == events.Server && r.Scope.Trial == events.None {
		if s.PBT() {
			return s.assignedInPopulation(b)
		}
		return s.assigned(b)
	}
	t := s.find(r.Scope.Trial)
	if t == nil {
		return nil
	}
	switch b := body.(type) {
	case *events.GroupStarted:
		t.attempt = max(t.attempt, b.Attempt)
		if t.Ended == Errored { // it is tried again
			t.Ended, t.Failure = "", ""
		}
		if b.Resume != t.kept.id { // its line does not have that checkpoint
			t.kept = checkpointed{}
		}
	case *events.Metrics:
		s.heard = true
		s.reported(t, b)
	case *events.TrialCompleted:
		s.ended(t, Completed)
	case *events.TrialErrored:
		s.ended(t, Errored)
		t.Failure = b.Message
	default:
		s.saves(t, body)
	}
	s.close()
	return nil
}

func (s *Search) assigned(b *events.SearchAssigned) error {
	i := s.Index(b.Trial)
	if i < 0 || i > len(s.trials) || b.Rung < 0 || b.Rung > s.Top() {
		return fmt.Errorf("event %d assigns rung %d of trial %q, which the search does not have", s.last, b.Rung, b.Trial)
	}
	if i == len(s.trials) {
		s.trials = append(s.trials, &Trial{Name: b.Trial, Number: i, Config: s.Drawn(i), Rung: -1})
		s.named[b.Trial] = i
	}
	t := s.trials[i]
	if b.Rung <= t.Rung {
		return nil
	}
	if t.Rung >= 0 {
		if e := s.entry(t.Rung, i); e != nil {
			e.promoted = true
		}
	}
	t.assign(b.Rung)
	return nil
}

func (s *Search) entry(rung, trial int) *entry {
	i := slices.IndexFunc(s.on[rung], func(e entry) bool { return e.trial == trial })
	if i < 0 {
		return nil
	}
	return &s.on[rung][i]
}

// reported folds a report. The first one with the metric at the steps of the rung, or
// beyond, is the trial's result there; no later one changes it.
func (s *Search) reported(t *Trial, b *events.Metrics) {
	if b.Attempt < t.attempt {
		return // of a group that was replaced
	}
	t.report = at{b.Attempt, b.Iteration}
	if t.Rung >= 0 && b.Step >= s.rungs[t.Rung] && t.ToppedIn != b.Attempt {
		t.ToppedIn, t.ToppedAt = b.Attempt, s.last
	}
	value, ok := number(b.Metrics[s.Metric])
	if !ok {
		return
	}
	t.Step, t.Value, t.HasStep = b.Step, value, true
	if t.Open() && b.Step >= s.rungs[t.Rung] {
		s.reach(t)
	}
}

func (s *Search) reach(t *Trial) {
	t.Reached, t.result = true, result{t.Rung, t.Step, t.Value, s.last}
	s.on[t.Rung] = append(s.on[t.Rung], entry{trial: s.named[t.Name], value: t.Value, step: t.Step})
}

// ended folds the end of a trial. If it completes before the steps of its rung, it counts
// there with its last value, as it cannot become better.
func (s *Search) ended(t *Trial, how string) {
	if t.Ended != "" {
		return
	}
	if how == Completed && t.Open() && t.HasStep {
		s.reach(t)
	}
	t.Ended = how
}

// Heard reports whether a report of a trial was folded, or a later one.
func (s *Search) Heard(trial string, attempt, iteration int) bool {
	t := s.find(trial)
	if t == nil {
		return false
	}
	return t.report.attempt > attempt || t.report.attempt == attempt && t.report.iteration >= iteration || t.attempt > attempt
}

// Next returns the next decision: which trial gets a free slot, and until which step it is
// trained. ok is false if there is nothing to train now: more results may change that, unless
// [Search.Busy] is false.
func (s *Search) Next() (next events.SearchAssigned, ok bool) {
	if s.PBT() {
		return s.nextOfPopulation()
	}
	for rung := s.Top() - 1; rung >= 0; rung-- {
		ranked := s.ranked(rung)
		for rank, e := range ranked[:len(ranked)/s.Reduction] {
			t := s.trials[e.trial]
			if e.promoted || t.Ended != "" || !s.counts(e.value) {
				continue
			}
			return events.SearchAssigned{
				Trial: t.Name, Rung: rung + 1, Steps: s.rungs[rung+1], After: s.last,
				Reason: fmt.Sprintf("%s is number %d of %d on rung %d; the best %d are trained further", s.text(e.value), rank+1, len(ranked), rung, len(ranked)/s.Reduction),
			}, true
		}
	}
	if n := len(s.trials); n < s.Trials {
		return events.SearchAssigned{Trial: s.Name(n), Steps: s.rungs[0], After: s.last, Reason: fmt.Sprintf("no trial may be trained further; this is new trial %d of %d", n+1, s.Trials)}, true
	}
	return next, false
}

// Waits returns why a trial that has reached its rung is not trained further now.
func (s *Search) Waits(name string) string {
	t := s.find(name)
	if t == nil || !t.Reached {
		return ""
	}
	if t.Rung == s.Top() {
		return fmt.Sprintf("search: %s after %d steps, the most of any trial", s.text(t.Value), t.Step)
	}
	if s.PBT() {
		return s.waitsInPopulation(t)
	}
	ranked := s.ranked(t.Rung)
	rank := slices.IndexFunc(ranked, func(e entry) bool { return e.trial == t.Number })
	return fmt.Sprintf("search: %s is number %d of %d on rung %d (%d steps), and waits; the best %d are trained further",
		s.text(ranked[rank].value), rank+1, len(ranked), t.Rung, s.rungs[t.Rung], len(ranked)/s.Reduction)
}

// ranked returns the results on a rung, the best first; of equal ones, the first in the log.
func (s *Search) ranked(rung int) []entry {
	all := slices.Clone(s.on[rung])
	slices.SortStableFunc(all, func(a, b entry) int {
		switch {
		case s.better(a.value, b.value):
			return -1
		case s.better(b.value, a.value):
			return 1
		}
		return 0
	})
	return all
}

func (s *Search) text(value float64) string {
	return s.Metric + " " + strconv.FormatFloat(value, 'g', 6, 64)
}

// Busy reports whether a trial has steps to train or to save, so that a decision may follow.
func (s *Search) Busy() bool {
	return slices.ContainsFunc(s.trials, func(t *Trial) bool { return t.Open() }) || len(s.Unsettled()) > 0
}

// result is what a trial reached on a rung.
type result struct {
	rung     int
	step     int64
	value    float64
	sequence uint64 // of the event that shows it
}

// results returns the highest result of each trial that has one, by its place.
func (s *Search) results() map[int]result {
	all := map[int]result{}
	for rung, entries := range s.on {
		for _, e := range entries {
			all[e.trial] = result{rung: rung, step: e.step, value: e.value}
		}
	}
	return all
}

// best returns the trial with the best result on the highest rung that has one: results of
// fewer steps do not compare with it.
func (s *Search) best() (trial int, ok bool) {
	for rung := s.Top(); rung >= 0; rung-- {
		if ranked := s.ranked(rung); len(ranked) > 0 && s.counts(ranked[0].value) {
			return ranked[0].trial, true
		}
	}
	return 0, false
}

// nonFinites are the numbers that JSON has no form for, by their names in the log.
var nonFinites = map[string]float64{"NaN": math.NaN(), "Infinity": math.Inf(1), "-Infinity": math.Inf(-1)}

// number returns the value of a metric if it is a number.
func number(metric any) (v float64, ok bool) {
	switch m := metric.(type) {
	case float64:
		return m, true
	case string:
		v, ok = nonFinites[m]
		return v, ok
	}
	return 0, false
}

// nonFinite returns the name of a number that JSON has no form for.
func nonFinite(v float64) string {
	for name, named := range nonFinites {
		if v == named || math.IsNaN(v) && math.IsNaN(named) {
			return name
		}
	}
	return ""
}
