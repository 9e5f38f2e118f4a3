package planner_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/tensor"
	"pgregory.net/rapid"
)

// checked is an item whose bytes have a check of one letter; none for "-".
func checked(it checkpoint.Item, check string) checkpoint.Item {
	if check != "-" {
		it.Check[3] = check[0]
	}
	return it
}

// halves offers the two halves of a replicated tensor w of 8 elements, one
// more tensor and a value on each rank; each rank's word has the checks of
// these four.
func halves(words ...string) (locals []checkpoint.Local) {
	shape := tensor.Shape{8}
	for rank, w := range words {
		locals = append(locals, checkpoint.Local{Rank: rank, Items: []checkpoint.Item{
			checked(item(shard("w", shape, part(0, 4))), w[:1]), checked(item(shard("w", shape, part(4, 4))), w[1:2]),
			checked(item(shard("other", shape, part(0, 8))), w[2:3]), checked(value("config", 3, false), w[3:]),
		}})
	}
	return locals
}

func TestDisagreements(t *testing.T) {
	const balanced = "r0: w[4]+[4] config(3)\nr1: other[0]+[8]\nr2: w[0]+[4]"
	for name, c := range map[string]struct {
		checks []string
		layout string
		want   []string
	}{
		"no checks":          {[]string{"----", "----", "----"}, balanced, nil},
		"all agree":          {[]string{"abcd", "abcd", "abcd"}, balanced, nil},
		"some have none":     {[]string{"a-c-", "-b-d", "abcd"}, balanced, nil},
		"the second half":    {[]string{"abcd", "abcd", "axcd"}, "r0: w[0]+[4] w[4]+[4] config(3)\nr1: other[0]+[8]", []string{`tensor "w": box [4]+[4] is not the same on all ranks: ranks [2] differ from rank 0`}},
		"both halves":        {[]string{"abcd", "xbcd", "axcd"}, "r0: w[0]+[4] w[4]+[4] config(3)\nr1: other[0]+[8]", []string{`tensor "w": box [0]+[4] is not the same on all ranks: ranks [1] differ from rank 0`, `tensor "w": box [4]+[4] is not the same on all ranks: ranks [2] differ from rank 0`}},
		"a value":            {[]string{"abcd", "abcx", "abcy"}, balanced, []string{`value "config" is not the same on all ranks: ranks [1 2] differ from rank 0`}},
		"the kept has none":  {[]string{"---d", "ab-d", "ax-d"}, "r0: w[0]+[4] w[4]+[4] config(3)\nr1: other[0]+[8]", []string{`tensor "w": box [4]+[4] is not the same on all ranks: ranks [2] differ from rank 0`}},
		"a value, none kept": {[]string{"----", "---d", "---x"}, balanced, []string{`value "config" is not the same on all ranks: ranks [2] differ from rank 0`}},
		"sorted by name":     {[]string{"abcd", "xbxx"}, "r0: other[0]+[8] w[0]+[4] w[4]+[4] config(3)", []string{`value "config" is not the same on all ranks: ranks [1] differ from rank 0`, `tensor "other": box [0]+[8] is not the same on all ranks: ranks [1] differ from rank 0`, `tensor "w": box [0]+[4] is not the same on all ranks: ranks [1] differ from rank 0`}},
	} {
		t.Run(name, func(t *testing.T) {
			locals := halves(c.checks...)
			slices.Reverse(locals)
			made, err := planner.Global(locals)
			if err != nil {
				t.Fatal(err)
			}
			if got := show(made.Layout); got != c.layout {
				t.Errorf("got\n%s\nwant\n%s", got, c.layout)
			}
			if c.want == nil {
				c.want = []string{"no error"}
			}
			problems(t, made.Disagreements.Err(), c.want...)
		})
	}
}

// Parts of a tensor that only one copy of the model has differ by nature.
func TestShardsDoNotDisagree(t *testing.T) {
	locals := parts(tensor.Shape{4}, []tensor.Box{part(0, 2)}, []tensor.Box{part(2, 2)})
	for i, check := range []string{"a", "b"} {
		locals[i].Items[0] = checked(locals[i].Items[0], check)
		locals[i].Items = append(locals[i].Items, checked(value("rng", 1, true), check))
	}
	made, err := planner.Global(locals)
	if err != nil || made.Disagreements != nil {
		t.Errorf("got %+v, %v", made.Disagreements, err)
	}
}

// Every box of a tensor that differs somewhere is the lowest rank's that has
// it; what is reported is exactly what differs; nothing else is moved.
func TestDisagreeingTensorIsTheLowestRanks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		words := rapid.SliceOfN(rapid.StringMatching("[ab-]{4}"), 2, 5).Draw(t, "checks")
		locals := halves(words...)
		made, err := planner.Global(locals)
		if err != nil {
			t.Fatal(err)
		}
		differs := func(at int) bool {
			return strings.ContainsFunc(column(words, at), func(r rune) bool { return r == 'a' }) && strings.Contains(column(words, at), "b")
		}
		want := 0
		for at := range 4 {
			if differs(at) {
				want++
			}
		}
		if got := len(made.Disagreements); got != want {
			t.Fatalf("%d disagreements, want %d: %v", got, want, made.Disagreements)
		}
		for _, tensor := range made.Layout.Tensors {
			pinned := tensor.FQN == "other" && differs(2) || tensor.FQN == "w" && (differs(0) || differs(1))
			for _, c := range tensor.Chunks {
				if pinned && c.Rank != 0 {
					t.Fatalf("%s disagrees and is taken from rank %d", tensor.FQN, c.Rank)
				}
			}
		}
		for rank := range locals {
			for i := range locals[rank].Items {
				locals[rank].Items[i].Check = checkpoint.Check{}
			}
		}
		if plain := global(t, locals); want == 0 && show(plain) != show(made.Layout) {
			t.Fatalf("checks that agree change the layout from\n%s\nto\n%s", show(plain), show(made.Layout))
		}
	})
}

func column(words []string, at int) string {
	var s strings.Builder
	for _, w := range words {
		s.WriteByte(w[at])
	}
	return s.String()
}

// The coordinator lists what differs in the global plan; a strict one aborts
// and names the ranks.
func TestCoordinatorTellsDisagreements(t *testing.T) {
	save := func(strict bool, locals []checkpoint.Local) events.Body {
		c := cluster{t: t, world: len(locals)}
		cfg := config(c.world)
		cfg.Strict = strict
		coord := planner.NewCoordinator(cfg)
		for rank, l := range locals {
			p := c.plan("step-5.a2", rank)
			p.Plan = events.InlineBlob(checkpoint.EncodeLocal(l))
			if err := coord.Apply(c.append(p)); err != nil {
				t.Fatal(err)
			}
		}
		c.settle(coord, start)
		body, err := c.log[len(c.log)-1].Body()
		if err != nil {
			t.Fatal(err)
		}
		return body
	}
	locals := halves("abcd", "abcx", "axcd")
	g := save(false, locals).(*events.GlobalPlan)
	want := []events.Disagreement{{FQN: "config", Kept: 0, Ranks: []int{1}}, {FQN: "w", Offsets: []int64{4}, Sizes: []int64{4}, Kept: 0, Ranks: []int{2}}}
	if fmt.Sprint(g.Disagreements) != fmt.Sprint(want) || g.MoreDisagreements != 0 {
		t.Errorf("plan.global lists %v and %d more, want %v", g.Disagreements, g.MoreDisagreements, want)
	}
	a := save(true, locals).(*events.CheckpointAborted)
	if !strings.Contains(a.Reason, `tensor "w": box [4]+[4]`) || !strings.Contains(a.Reason, `value "config"`) || !slices.Equal(a.Ranks, []int{1, 2}) {
		t.Errorf("aborted for %q of ranks %v", a.Reason, a.Ranks)
	}
	if g, ok := save(true, halves("abcd", "abcd")).(*events.GlobalPlan); !ok || g.Disagreements != nil {
		t.Errorf("a strict save whose replicas agree ended as %+v", g)
	}

	many := []checkpoint.Local{{Rank: 0}, {Rank: 1}}
	for i := range 2000 {
		it := item(shard(fmt.Sprintf("tensor.%04d", i), tensor.Shape{4}, part(0, 4)))
		many[0].Items = append(many[0].Items, checked(it, "a"))
		many[1].Items = append(many[1].Items, checked(it, "b"))
	}
	g = save(false, many).(*events.GlobalPlan)
	if n := len(g.Disagreements); n < 100 || n+g.MoreDisagreements != 2000 {
		t.Errorf("%d disagreements are listed and %d are not, want 2000 in all", n, g.MoreDisagreements)
	}
}
