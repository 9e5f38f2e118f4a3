package projections

import (
	"testing"

	"pgregory.net/rapid"
)

// The rest of a branch has each iteration that no other branch of the attempt has,
// once, at its earlier place along the line.
func TestBranchWithout(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		draw := func(label string) branch {
			from := rapid.IntRange(0, 20).Draw(t, label)
			return branch{
				attempt: rapid.IntRange(1, 2).Draw(t, "attempt"), from: from, to: from + rapid.IntRange(0, 20).Draw(t, "length"),
				base: rapid.IntRange(0, 5).Draw(t, "base"), hidden: true,
			}
		}
		b := draw("from")
		var others []branch
		for range rapid.IntRange(0, 4).Draw(t, "others") {
			others = append(others, draw("other"))
		}
		want := map[int]int{} // iteration → place
		for i := b.from + 1; i <= b.to; i++ {
			want[i] = b.base + i - b.from
		}
		for _, o := range others {
			for i := o.from + 1; i <= o.to && o.attempt == b.attempt; i++ {
				delete(want, i)
			}
		}
		for _, rest := range b.without(others) {
			for i := rest.from + 1; i <= rest.to; i++ {
				if place := rest.base + i - rest.from; want[i] != place || rest.attempt != b.attempt || !rest.hidden {
					t.Fatalf("%+v less %+v has %d at %d, want %d", b, others, i, place, want[i])
				}
				delete(want, i)
			}
		}
		if len(want) > 0 {
			t.Fatalf("%+v less %+v leaves out %v", b, others, want)
		}
	})
}
