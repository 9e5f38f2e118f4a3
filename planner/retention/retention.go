// Package retention decides which checkpoints stay. It reads rows and returns verdicts; the
// caller appends the decisions and removes the files.
//
//	policy    rules, as data; written "last=2,best=1:loss:min"
//	trial     the rows of one trial: the input of a decision
//	held      a checkpoint that is needed whatever the policy, and why
//	verdict   keep or delete, for each committed checkpoint, with the reason
//
// A policy, items in any order, each at most once except best:
//
//	last=N               the newest N of the line
//	every=Nsteps         of each N steps of the line the newest: with 1000,
//	                     steps 1..1000, 1001..2000 and so on
//	best=N:METRIC:MODE   the N of the line with the best METRIC, MODE is min
//	                     or max; "," "%" and blanks in METRIC are %XX
//	keep-tagged          no rule of its own: only held checkpoints stay
//	superseded=S         of checkpoints that are not in the line: keep (the
//	                     default) or delete
//
// Checkpoints that were removed by name, as by the program that saved them, are deleted under
// every policy once they are not held.
//
// A file that is a checkpoint by itself is in no line. Of each name last=N keeps the newest
// N; policies without last keep all.
//
// A checkpoint of the line stays if any rule keeps it. A policy without last, every, best or
// keep-tagged keeps the whole line. Under every policy, these checkpoints are held: pinned
// and tagged ones, the origin of a fork, those being restored, the head of any line, and the
// newest of the trial. So the last checkpoint of the current line is never deleted, and no
// checkpoint is deleted before its successor is committed.
package retention

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/projections"
)

// Verdict is the decision about one committed checkpoint.
type Verdict struct {
	Checkpoint projections.Checkpoint
	Keep       bool
	Reason     string // the rules and holds that keep it, or why none does
}

// Decide returns a verdict on each committed checkpoint of a trial, the newest begun first.
// It is a function of its arguments alone. Deciding again after the deletions deletes nothing
// more.
func Decide(p Policy, t Trial) []Verdict {
	var verdicts []Verdict
	for _, c := range t.Checkpoints {
		if c.State == projections.Committed {
			verdicts = append(verdicts, Verdict{Checkpoint: c})
		}
	}
	slices.SortStableFunc(verdicts, func(a, b Verdict) int {
		return cmp.Compare(b.Checkpoint.BegunSeq, a.Checkpoint.BegunSeq)
	})
	ruled := p.rule(t, verdicts)
	for i := range verdicts {
		c := verdicts[i].Checkpoint
		why := slices.Concat(t.holds(c), ruled[c.BegunSeq])
		switch {
		case len(why) > 0:
		case c.Withdrawn:
			verdicts[i].Reason = c.Reason
			continue
		case c.Superseded && p.Superseded == DeleteSuperseded:
			verdicts[i].Reason = "superseded: not in the current line"
			continue
		case c.Superseded:
			why = []string{"superseded, which the policy keeps"}
		case p.keepsLine():
			why = []string{"no rule is about the line"}
		default:
			verdicts[i].Reason = "no rule keeps it"
			continue
		}
		verdicts[i].Keep, verdicts[i].Reason = true, strings.Join(why, ", ")
	}
	return verdicts
}

// rule returns the rules that keep each checkpoint of the line, by begun sequence.
func (p Policy) rule(t Trial, verdicts []Verdict) map[uint64][]string {
	kept := map[uint64][]string{}
	var line []projections.Checkpoint // the newest first
	files := map[string]int{}         // number of newer ones of the name
	for _, v := range verdicts {
		switch c := v.Checkpoint; {
		case !c.Visible():
		case !c.IsFile():
			line = append(line, c)
		case p.Last == 0:
			kept[c.BegunSeq] = []string{"a file by itself, for which only last=N is a rule"}
		default:
			if files[c.Name]++; files[c.Name] <= p.Last {
				kept[c.BegunSeq] = []string{fmt.Sprintf("number %d of last=%d of the file", files[c.Name], p.Last)}
			}
		}
	}
	keep := func(c projections.Checkpoint, why string, args ...any) {
		kept[c.BegunSeq] = append(kept[c.BegunSeq], fmt.Sprintf(why, args...))
	}
	for i, c := range line[:min(p.Last, len(line))] {
		keep(c, "number %d of last=%d", i+1, p.Last)
	}
	if p.Every > 0 {
		newest := map[int64]projections.Checkpoint{}
		for _, c := range slices.Backward(line) {
			if old, ok := newest[p.window(c.Step)]; !ok || c.Step >= old.Step {
				newest[p.window(c.Step)] = c
			}
		}
		for _, c := range newest {
			keep(c, "the newest of its steps of every=%dsteps", p.Every)
		}
	}
	for _, b := range p.Best {
		for i, c := range b.of(t, line) {
			keep(c, "number %d of %s", i+1, b)
		}
	}
	return kept
}

// window returns the number of the stretch of Every steps that a step ends or is in.
func (p Policy) window(step int64) int64 {
	w := step / p.Every
	if step > w*p.Every {
		w++
	}
	return w
}

// of returns the best checkpoints of the line, the best first. Checkpoints without a value,
// or with NaN, are never among them; of two equal ones the newer is better.
func (b Best) of(t Trial, line []projections.Checkpoint) []projections.Checkpoint {
	value := func(c projections.Checkpoint) float64 {
		if v, ok := t.Values[b.Metric][c.ID]; ok {
			return float64(v)
		}
		return math.NaN()
	}
	// Stable sorts keep the newer of two equal ones first.
	line = slices.DeleteFunc(slices.Clone(line), func(c projections.Checkpoint) bool { return math.IsNaN(value(c)) })
	slices.SortStableFunc(line, func(x, y projections.Checkpoint) int {
		if b.Greatest {
			x, y = y, x
		}
		return cmp.Compare(value(x), value(y))
	})
	return line[:min(b.N, len(line))]
}
