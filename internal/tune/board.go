package tune

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// States of a trial on a board.
const (
	StateRunning  = "running"   // it is trained now
	StateDue      = "due"       // it has steps to train or to save, and no slot
	StatePaused   = "paused"    // it has reached its rung, and may be trained further
	StateDone     = "done"      // it has reached the last rung
	StateFinished = "completed" // its workers ended by themselves before that
	StateErrored  = "errored"
	StateNew      = "new" // it was not assigned yet
)

// Board is the state of a search for people and programs.
type Board struct {
	Run       string     `json:"run"`
	Metric    string     `json:"metric"`
	Mode      string     `json:"mode"`
	Reduction int        `json:"reduction"`
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
}

// Board returns the state of a search. live has the names of the trials that are trained
// now, and unsaved those on the last rung whose steps are in no checkpoint.
func (out Replayed) Board(run string, live, unsaved []string) Board {
	s := out.Search
	b := Board{Run: run, Metric: s.Metric, Mode: s.Mode, Reduction: s.Reduction, Rungs: s.rungs, Decisions: len(out.Decisions)}
	for _, d := range out.Decisions {
		if d.Problem != "" {
			b.Differ = append(b.Differ, Differs{d.Sequence, d.Trial, d.Rung, d.Problem})
		}
	}
	results := s.results()
	for i := range s.Trials {
		row := BoardRow{Trial: s.Name(i), State: StateNew, Rung: -1, At: -1, Config: s.Config(i)}
		if i < len(s.trials) {
			t := s.trials[i]
			row.State, row.Rung, row.Steps = s.state(t, slices.Contains(live, t.Name), slices.Contains(unsaved, t.Name)), t.Rung, t.Step
		}
		if r, ok := results[i]; ok {
			row.At, row.AtStep = r.rung, r.step
			if math.IsNaN(r.value) || math.IsInf(r.value, 0) {
				row.NonFinite = nonFinite(r.value)
			} else {
				row.Value = &r.value
			}
		}
		b.Trials = append(b.Trials, row)
	}
	if best, ok := s.best(); ok {
		b.Best = &b.Trials[best]
	}
	_, more := s.Next()
	b.Over = !more && !s.Busy() && len(live)+len(unsaved) == 0
	return b
}

func (s *Search) state(t *Trial, live, unsaved bool) string {
	switch {
	case live:
		return StateRunning
	case unsaved:
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
	rows := [][]any{{"TRIAL", "STATE", "STEPS", "TRAINED TO", strings.ToUpper(b.Metric), "AT", "CONFIG"}}
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
		rows = append(rows, []any{t.Trial + mark, t.State, steps, to, value, at, configText(t.Config)})
	}
	return rows
}

// configText returns a configuration as NAME=VALUE pairs by name.
func configText(config map[string]any) string {
	var pairs []string
	for name, value := range config {
		if f, ok := value.(float64); ok {
			value = strconv.FormatFloat(f, 'g', 4, 64)
		}
		pairs = append(pairs, fmt.Sprint(name, "=", Text(value)))
	}
	slices.Sort(pairs)
	return strings.Join(pairs, " ")
}
