package tune

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/ckptstore/ckptstore/events"
)

// States of a trial on a board.
const (
	StateRunning  = "running"   // it is trained now
	StateDue      = "due"       // it has steps to train or to save, and no slot
	StatePaused   = "paused"    // it has reached its rung, and may be trained further
	StateDone     = "done"      // it has reached the last rung
	StateFinished = "completed" // its workers ended by themselves before that
	StateErrored  = "errored"
	StateNew      = "new"      // it was not assigned yet
	StateReplaced = "replaced" // a clone of a better one took its place
)

// Board is the state of a search for people and programs.
type Board struct {
	Run       string     `json:"run"`
	Scheduler string     `json:"scheduler,omitempty"` // pbt; absent: asynchronous successive halving
	Metric    string     `json:"metric"`
	Mode      string     `json:"mode"`
	Reduction int        `json:"reduction"`        // 0 in population-based training
	Rungs     []int64    `json:"rungs"`            // steps of each
	Decisions int        `json:"decisions"`        // in the log
	Differ    []Differs  `json:"differ,omitempty"` // decisions that do not follow from the log
	Over      bool       `json:"over"`             // nothing is left to train, and no trial is live
	Best      *BoardRow  `json:"best,omitempty"`   // the best on the highest rung with a result
	Trials    []BoardRow `json:"trials"`           // by name
}

// Differs is a decision that does not follow from the events before it.
type Differs struct {
	Sequence uint64 `json:"sequence"`
	Trial    string `json:"trial"`
	Rung     int    `json:"rung"`
	Problem  string `json:"problem"`
}

// BoardRow is one trial on a board.
type BoardRow struct {
	Trial     string         `json:"trial"`
	State     string         `json:"state"`
	Rung      int            `json:"rung"`                // the last assigned; -1: none
	Steps     int64          `json:"steps"`               // of its last report
	Value     *float64       `json:"value,omitempty"`     // of the metric, on the highest rung with a result; absent for none
	NonFinite string         `json:"nonfinite,omitempty"` // the value if it is no finite number: NaN, Infinity or -Infinity
	At        int            `json:"at"`                  // that rung; -1: none
	AtStep    int64          `json:"at_step"`             // step of the report that has the value
	Config    map[string]any `json:"config"`

	// Of a trial of population-based training.
	Parent     *events.TrialParent `json:"parent,omitempty"`      // the checkpoint that it was forked from
	Replaces   string              `json:"replaces,omitempty"`    // the trial whose place it took
	ReplacedBy string              `json:"replaced_by,omitempty"` // the trial that took its place
	Changed    []Change            `json:"changed,omitempty"`     // how its configuration differs from that of its parent's trial
}

// Board returns the state of a search. live has the names of the trials that are trained
// now, and unsaved those on the last rung whose steps are in no checkpoint.
func (out Replayed) Board(run string, live, unsaved []string) Board {
	s := out.Search
	b := Board{
		Run: run, Scheduler: s.Scheduler, Metric: s.Metric, Mode: s.Mode, Reduction: s.Reduction,
		Rungs: s.rungs, Decisions: len(out.Decisions),
	}
	for _, d := range out.Decisions {
		if d.Problem != "" {
			b.Differ = append(b.Differ, Differs{d.Sequence, d.Trial, d.Rung, d.Problem})
		}
	}
	results := s.results()
	best, at := -1, -1
	if i, ok := s.best(); ok {
		best = i
	}
	for _, i := range s.order() {
		t := s.trials[i]
		row := BoardRow{
			Trial: t.Name, State: s.state(t, slices.Contains(live, t.Name), slices.Contains(unsaved, t.Name)), Rung: t.Rung, Steps: t.Step, At: -1,
			Config: t.Config, Parent: t.Parent, Replaces: t.Replaces, ReplacedBy: t.ReplacedBy, Changed: s.changes(t),
		}
		if r, ok := results[i]; ok {
			row.At, row.AtStep = r.rung, r.step
			if math.IsNaN(r.value) || math.IsInf(r.value, 0) {
				row.NonFinite = nonFinite(r.value)
			} else {
				row.Value = &r.value
			}
		}
		if i == best {
			at = len(b.Trials)
		}
		b.Trials = append(b.Trials, row)
	}
	for i := s.begun(); i < s.Trials; i++ {
		b.Trials = append(b.Trials, BoardRow{Trial: s.Name(i), State: StateNew, Rung: -1, At: -1, Config: s.Drawn(i)})
	}
	if at >= 0 {
		b.Best = &b.Trials[at]
	}
	_, more := s.Next()
	b.Over = !more && !s.Busy() && len(live)+len(unsaved) == 0
	return b
}

// order returns the places of the trials, those of one place in the population together.
func (s *Search) order() []int {
	all := make([]int, len(s.trials))
	for i := range all {
		all[i] = i
	}
	slices.SortFunc(all, func(a, b int) int {
		x, y := s.trials[a], s.trials[b]
		return cmp.Or(cmp.Compare(x.Number, y.Number), cmp.Compare(x.Life, y.Life))
	})
	return all
}

// begun returns how many trials have begun, without clones.
func (s *Search) begun() int {
	if s.PBT() {
		return len(s.members)
	}
	return len(s.trials)
}

func (s *Search) state(t *Trial, live, unsaved bool) string {
	switch {
	case live:
		return StateRunning
	case t.ReplacedBy != "":
		return StateReplaced
	case unsaved || s.unsettled(t):
		return StateDue
	case t.Ended == Errored:
		return StateErrored
	case t.Reached && t.Rung == s.Top() && t.ToppedAt > 0:
		return StateDone
	case t.Ended == Completed:
		return StateFinished
	case t.Reached:
		return StatePaused
	}
	return StateDue
}

// Table returns the rows of a table for people, with its head first.
func (b Board) Table() [][]any {
	head := []any{"TRIAL", "STATE", "STEPS", "TRAINED TO", strings.ToUpper(b.Metric), "AT"}
	if b.Scheduler == PBT {
		head = append(head, "FORKED FROM")
	}
	rows := [][]any{append(head, "CONFIG")}
	for _, t := range b.Trials {
		steps, to, value := "", "", ""
		if t.Rung >= 0 {
			steps, to = strconv.FormatInt(t.Steps, 10), strconv.FormatInt(b.Rungs[t.Rung], 10)
		}
		if t.Value != nil {
			value = strconv.FormatFloat(*t.Value, 'g', 6, 64)
		} else if t.At >= 0 {
			value = t.NonFinite
		}
		at := ""
		if t.At >= 0 {
			at = strconv.FormatInt(t.AtStep, 10)
		}
		mark := ""
		if b.Best != nil && b.Best.Trial == t.Trial {
			mark = " (best)"
		}
		cells := []any{t.Trial + mark, t.State, steps, to, value, at}
		if b.Scheduler == PBT {
			from := "-"
			if t.Parent != nil {
				from = t.Parent.Trial + "@" + t.Parent.Checkpoint
			}
			cells = append(cells, from)
		}
		rows = append(rows, append(cells, configText(t.Config, t.Changed)))
	}
	return rows
}

// configText returns a configuration as NAME=VALUE pairs by name; changed values with the old
// ones before them.
func configText(config map[string]any, changed []Change) string {
	var pairs []string
	for name, value := range config {
		text := brief(value)
		if i := slices.IndexFunc(changed, func(c Change) bool { return c.Name == name }); i >= 0 {
			text = brief(changed[i].From) + "→" + text
		}
		pairs = append(pairs, fmt.Sprint(name, "=", text))
	}
	slices.Sort(pairs)
	return strings.Join(pairs, " ")
}
