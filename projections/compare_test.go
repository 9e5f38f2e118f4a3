package projections

import (
	"testing"

	"github.com/ckptstore/ckptstore/events"
)

func line(values ...any) (reports []Report) {
	for i, v := range values {
		r := Report{LineIteration: i + 1, Step: int64(10 * (i + 1)), Metrics: map[string]any{}}
		if v != nil {
			r.Metrics["loss"] = v
		}
		reports = append(reports, r)
	}
	return reports
}

func TestCompareReports(t *testing.T) {
	for name, c := range map[string]struct {
		a, b   []Report
		equal  bool
		common int
		first  int64 // step; 0: none
	}{
		"equal":                     {line(2.0, 1.0), line(2.0, 1.0), true, 2, 0},
		"NaN equals NaN":            {line("NaN", "Infinity"), line("NaN", "Infinity"), true, 2, 0},
		"the second differs":        {line(2.0, 1.0, 0.5), line(2.0, 1.5, 0.6), false, 3, 20},
		"a number and a text":       {line(2.0, 1.0), line(2.0, "1"), false, 2, 20},
		"one is longer":             {line(2.0, 1.0, 0.5), line(2.0, 1.0), false, 2, 0},
		"the other is longer":       {line(2.0), line(2.0, 1.0), false, 1, 0},
		"one skips a step":          {line(2.0, nil, 0.5), line(2.0, 1.0, 0.7), false, 2, 30},
		"never reported":            {line(nil), line(2.0), false, 0, 0},
		"the last report of a step": {append(line(2.0), Report{LineIteration: 2, Step: 10, Metrics: map[string]any{"loss": 1.0}}), line(1.0), true, 1, 0},
	} {
		t.Run(name, func(t *testing.T) {
			got := CompareReports(c.a, c.b)
			if len(got) != 1 || got[0].Name != "loss" {
				t.Fatalf("%+v", got)
			}
			first := int64(0)
			if got[0].FirstDifference != nil {
				first = got[0].FirstDifference.Step
			}
			if got[0].Equal != c.equal || got[0].CommonSteps != c.common || first != c.first {
				t.Errorf("%+v, first difference at %d", got[0], first)
			}
		})
	}
	e := CompareReports(line(2.0, 1.0, "NaN", 1.0, 5.0, "text"), nil)[0].A
	if e.Reports != 6 || e.Last.Value != "text" || e.Min.Step != 40 || e.Max.Step != 50 {
		t.Errorf("ends %+v: last %v, least %v, greatest %v", e, e.Last, e.Min, e.Max)
	}
}

// Lines of descent meet in a trial and across a fork; an abandoned line meets at its
// beginning.
func TestCommonAncestor(t *testing.T) {
	at := func(run, id, parent string, parentSeq uint64) Checkpoint {
		return Checkpoint{Run: run, Trial: "main", ID: id, Parent: parent, ParentSeq: parentSeq}
	}
	known := []Checkpoint{
		at("x", "s1", "", 0), at("x", "s2", "s1", 1), at("x", "old3", "s2", 2), at("x", "s3", "s2", 2),
		at("y", "s1", "s2", 0), at("y", "s2", "s1", 9), at("z", "s1", "", 0),
	}
	trials := []Trial{{Run: "x", Name: "main"}, {Run: "y", Name: "main", Parent: &events.TrialParent{Run: "x", Trial: "main", Checkpoint: "s2"}}, {Run: "z", Name: "main"}}
	for _, c := range []struct {
		a, b int
		want string
	}{
		{3, 1, "x s2"},
		{1, 3, "x s2"},
		{2, 3, "x s2"},
		{3, 3, "x s3"},
		{5, 3, "x s2"},
		{3, 5, "x s2"},
		{5, 0, "x s1"},
		{6, 5, ""},
		{0, 6, ""},
	} {
		got, found := CommonAncestor(known[c.a], known[c.b], known, trials)
		if text := got.Run + " " + got.ID; found != (c.want != "") || found && text != c.want {
			t.Errorf("of %d and %d it is %q, want %q", c.a, c.b, text, c.want)
		}
	}
	loop := []Checkpoint{at("x", "a", "b", 1), at("x", "b", "a", 1)}
	if _, found := CommonAncestor(loop[0], known[6], loop, trials); found {
		t.Error("found in a loop")
	}
	if _, found := CommonAncestor(known[6], loop[0], loop, trials); found {
		t.Error("found in a loop")
	}
}
