package stragglers

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/events"
)

// twoEach watches nodes of two ranks each, whose indexes are ten times their places.
func twoEach(nodes int) *Watch {
	ranks := make([][]int, nodes)
	for place := range ranks {
		ranks[place] = []int{2 * place, 2*place + 1}
	}
	return New("j", 3, ranks, func(place int) int { return 10 * place })
}

// times returns the times of the ranks of nodes that take so long.
func times(nodes ...float64) (out []float64) {
	for _, t := range nodes {
		out = append(out, t, t)
	}
	return out
}

// TestRule gives samples, n times each, and names the facts after each of them.
func TestRule(t *testing.T) {
	t.Parallel()
	type step struct {
		n     int
		times []float64
	}
	equal, behind := times(1, 1, 1), times(1, 1.5, 1)
	var alternating []step
	for range 50 {
		alternating = append(alternating, step{1, behind}, step{1, equal})
	}
	for name, c := range map[string]struct {
		steps []step
		want  string // the samples that facts follow, from 1, and the nodes
	}{
		"equal nodes":                 {[]step{{100, equal}}, ""},
		"slow from the beginning":     {[]step{{100, behind}}, "20: 10 is slow "},
		"slow later":                  {[]step{{100, equal}, {100, behind}}, "120: 10 is slow "},
		"well again":                  {[]step{{30, behind}, {100, equal}}, "20: 10 is slow 50: 10 is well "},
		"one too few":                 {[]step{{19, behind}, {100, equal}}, ""},
		"below the ratio":             {[]step{{100, times(1, 1.29, 1)}}, ""},
		"at the ratio":                {[]step{{100, times(1, 1.3, 1)}}, "20: 10 is slow "},
		"one rank of a node is slow":  {[]step{{100, []float64{1, 1, 1, 1.4, 1, 1}}}, ""},
		"and slow enough":             {[]step{{100, []float64{1, 1, 1, 1.62, 1, 1}}}, "20: 10 is slow "},
		"most of the nodes are slow":  {[]step{{100, times(1, 40, 40)}}, ""},
		"half of the nodes are slow":  {[]step{{100, times(1, 1, 40, 40)}}, "20: 20 is slow 20: 30 is slow "},
		"of two nodes":                {[]step{{100, times(1, 1.5)}}, "20: 10 is slow "},
		"alone":                       {[]step{{100, times(1)}}, ""},
		"a node that measures none":   {[]step{{100, times(1, 1.5, 0)}}, "20: 10 is slow "},
		"only one node measures":      {[]step{{100, times(0, 1.5, 0)}}, ""},
		"the others take no time":     {[]step{{100, times(0, 1.5, 0)}, {100, times(0, 0, 0)}}, ""},
		"times that are no times":     {[]step{{100, times(1, math.NaN(), 1)}, {100, times(1, math.Inf(1), 1)}, {100, times(1, -2, 1)}}, ""},
		"missing ranks":               {[]step{{100, []float64{1, 1, 2}}}, "20: 10 is slow "},
		"too slow at every other one": {alternating, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, n, got := twoEach(len(c.steps[0].times)/2), 0, ""
			if len(c.steps[0].times)%2 == 1 {
				w = twoEach(2)
			}
			for _, s := range c.steps {
				for range s.n {
					n++
					for _, f := range w.Sample(Busy, s.times) {
						b, is := f.(*events.NodeSlow)
						if !is || b.Job != "j" || b.Attempt != 3 || b.By != string(Busy) || b.Of != min(n, window) {
							t.Fatalf("sample %d: %+v", n, f)
						}
						state := "slow"
						if b.Over {
							state = "well"
						}
						got += fmt.Sprintf("%d: %d is %s ", n, b.Node, state)
					}
				}
			}
			if got != c.want {
				t.Errorf("facts %q, want %q", got, c.want)
			}
		})
	}
}

// The fact has the medians of the samples that count.
func TestFact(t *testing.T) {
	t.Parallel()
	w := twoEach(3)
	for i := range 19 {
		w.Sample(Busy, []float64{1, 1, 1.5 + float64(i%3)/10, 1.5 + float64(i%3)/10, 1, 1.2})
	}
	got := w.Sample(Busy, times(1, 1.6, 1.1))
	want := events.NodeSlow{Job: "j", Attempt: 3, Node: 10, By: "busy", Seconds: 1.6, Others: 1.1, Behind: 20, Of: 20}
	if len(got) != 1 {
		t.Fatalf("facts %v", got)
	}
	b := *got[0].(*events.NodeSlow)
	b.Seconds, b.Others = math.Round(b.Seconds*1e9)/1e9, math.Round(b.Others*1e9)/1e9
	if b != want {
		t.Errorf("%+v, want %+v", b, want)
	}
}

// A node that is slow by two sources is well again when it is by neither.
func TestTwoSources(t *testing.T) {
	t.Parallel()
	w := twoEach(3)
	count := func(source Source, n int, of []float64) (facts int) {
		for range n {
			facts += len(w.Sample(source, of))
		}
		return facts
	}
	behind, equal := times(1, 2, 1), times(1, 1, 1)
	if n := count(Busy, 30, behind) + count(Copy, 30, behind); n != 1 {
		t.Errorf("%d facts about a node that is slow by both", n)
	}
	if n := count(Copy, 60, equal); n != 0 {
		t.Errorf("%d facts about a node that is still slow by its work", n)
	}
	if n := count(Busy, 60, equal); n != 1 {
		t.Errorf("%d facts about a node that is well again", n)
	}
}

// A node that an earlier coordinator has found slow by its work is slow until there are enough samples
// of that. Saves of the earlier coordinator are samples, and no facts follow from them again.
func TestEarlierCoordinator(t *testing.T) {
	t.Parallel()
	w, n := twoEach(3), 0
	save := func(seconds ...float64) string {
		n++
		id := fmt.Sprint("step-", n)
		for rank, s := range times(seconds...) {
			w.Sealed(&events.WriteSealed{Attempt: 3, Checkpoint: id, Rank: rank, Bytes: 1e9, Copied: &s})
		}
		return id
	}
	w.Recorded(&events.NodeSlow{Attempt: 2, Node: 0, By: "busy"}) // of another group
	w.Recorded(&events.NodeSlow{Attempt: 3, Node: 10, By: "busy"})
	w.Recorded(&events.NodeSlow{Attempt: 3, Node: 20, By: "busy"})
	w.Recorded(&events.NodeSlow{Attempt: 3, Node: 20, By: "busy", Over: true})
	for range 25 {
		w.Replayed(save(2, 1, 1))
	}
	var got []events.Body
	equal := func(samples int) {
		for range samples {
			got = append(got, w.Sample(Busy, times(1, 1, 1))...)
		}
	}
	got = append(got, w.Saved(save(2, 1, 1))...)
	if len(got) != 1 || got[0].(*events.NodeSlow).Node != 0 || got[0].(*events.NodeSlow).Of != 26 {
		t.Fatalf("facts %+v, want that node 0 is slow", got)
	}
	if equal(19); len(got) != 1 {
		t.Errorf("facts %+v after 19 samples", got[1:])
	}
	if equal(1); len(got) != 2 || got[1].(*events.NodeSlow).Node != 10 || !got[1].(*events.NodeSlow).Over {
		t.Errorf("facts %+v after 20 samples, want that node 10 is well again", got[1:])
	}
	var none *Watch
	none.Replayed("step-1")
	none.Recorded(&events.NodeSlow{})
}

// The copies of a save count when all of its ranks have sealed it.
func TestCopies(t *testing.T) {
	t.Parallel()
	w := twoEach(2)
	seal := func(checkpoint string, attempt, rank int, bytes int64, seconds float64) {
		w.Sealed(&events.WriteSealed{Attempt: attempt, Checkpoint: checkpoint, Rank: rank, Bytes: bytes, Copied: &seconds})
	}
	// save makes a save in which node 1 has so many times the bytes of node 0, and takes so many
	// times as long for each.
	save := func(n int, more int64, longer float64, bytes int64) (facts []events.Body) {
		id := fmt.Sprint("step-", n)
		for rank := range 4 {
			size, seconds := bytes, float64(bytes)/1e9
			if rank >= 2 {
				size, seconds = bytes*more, float64(bytes*more)/1e9*longer
			}
			seal(id, 3, rank, size, seconds)
		}
		return w.Saved(id)
	}
	for n := range 40 {
		if facts := save(n, 10, 1, 1<<20); len(facts) > 0 {
			t.Fatalf("a node with more bytes is slow: %v", facts)
		}
		if facts := save(n, 1, 10, 1<<20-1); len(facts) > 0 {
			t.Fatalf("a node with a small copy is slow: %v", facts)
		}
	}
	w.Sealed(&events.WriteSealed{Attempt: 3, Checkpoint: "unknown", Rank: 1, Bytes: 1 << 30})
	for n := range 19 {
		if facts := save(n, 1, 2, 1<<20); len(facts) > 0 {
			t.Fatalf("after %d saves: %v", n+1, facts)
		}
	}
	// A save of another attempt, and an aborted one, do not count.
	seal("old", 2, 0, 1<<30, 1)
	seal("old", 2, 2, 1<<30, 3)
	seal("aborted", 3, 0, 1<<30, 1)
	seal("aborted", 3, 2, 1<<30, 3)
	w.Aborted("aborted")
	if facts := slices.Concat(w.Saved("old"), w.Saved("aborted")); len(facts) > 0 {
		t.Errorf("facts %v", facts)
	}
	facts := save(19, 1, 2, 1<<20)
	if len(facts) != 1 || facts[0].(*events.NodeSlow).By != "copy" || facts[0].(*events.NodeSlow).Node != 10 {
		t.Errorf("facts %v", facts)
	}
	for n := range 10 * mostSaves { // seals after an abort stay few
		seal(fmt.Sprint("late-", n), 3, 0, 1<<30, 1)
	}
	if len(w.copies) > mostSaves {
		t.Errorf("the copies of %d saves are kept", len(w.copies))
	}
	var none *Watch
	none.Sealed(&events.WriteSealed{})
	none.Aborted("step-1")
	if facts := none.Saved("step-1"); facts != nil {
		t.Errorf("facts of no group: %v", facts)
	}
}

// Whatever the times are: facts about a node alternate and are few, a node is called slow only
// if it was behind in 20 of its last 30 samples, and well only if in at most 10; and never are
// half of the nodes or more behind in one sample.
func TestFactsAreBounded(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		nodes := rapid.IntRange(2, 6).Draw(t, "nodes")

		ranks := make([][]int, nodes)
		for place := range ranks {
			ranks[place] = []int{place}
		}
		w := New("j", 1, ranks, func(place int) int { return place })
		slow, facts, seen := map[int]bool{}, map[int]int{}, map[int][]bool{}
		for range rapid.IntRange(0, 12).Draw(t, "phases") {
			phase := make([]float64, nodes)
			for i := range phase {
				phase[i] = rapid.SampledFrom([]float64{0, 1, 1.1, 1.3, 1.5, 40}).Draw(t, "time")
			}
			for range rapid.IntRange(1, 60).Draw(t, "samples") {
				late, known := 0, 0
				for i, own := range phase {
					others := slices.DeleteFunc(slices.Clone(slices.Delete(slices.Clone(phase), i, i+1)), func(v float64) bool { return v == 0 })
					if own == 0 || len(others) == 0 {
						continue
					}
					slices.Sort(others)
					known++
					is := own >= ratio*others[len(others)/2]
					if seen[i] = append(seen[i], is); is {
						late++
					}
				}
				if 2*late > known {
					t.Fatalf("%d of %d nodes are behind at %v", late, known, phase)
				}
				for _, f := range w.Sample(Busy, phase) {
					b := f.(*events.NodeSlow)
					behind, last := 0, seen[b.Node][max(0, len(seen[b.Node])-window):]
					for _, is := range last {
						if is {
							behind++
						}
					}
					if b.Over == !slow[b.Node] || b.Behind != behind || b.Of != len(last) || !b.Over && behind < enough || b.Over && behind > few {
						t.Fatalf("%+v, slow before: %v, behind in %d of %d", b, slow[b.Node], behind, len(last))
					}
					slow[b.Node] = !b.Over
					facts[b.Node]++
				}
			}
		}
		for node, n := range facts {
			if n > 2*mostOnes-1 {
				t.Fatalf("%d facts about node %d", n, node)
			}
		}
	})
}

// A node that becomes slow again and again stays slow after the fifth time.
func TestComesAndGoes(t *testing.T) {
	t.Parallel()
	w, facts, last := twoEach(3), 0, false
	for range 20 {
		for _, of := range [][]float64{times(1, 2, 1), times(1, 1, 1)} {
			for range 30 {
				for _, f := range w.Sample(Busy, of) {
					facts++
					last = f.(*events.NodeSlow).Over
				}
			}
		}
	}
	if facts != 9 || last {
		t.Errorf("%d facts, the last that the node is well: %v", facts, last)
	}
}
