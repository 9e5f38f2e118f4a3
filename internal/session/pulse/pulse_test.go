package pulse

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// A rank is silent if it made requests before and has none unanswered. Ranks that
// wait for others in the trainer are reported as waiting.
func TestSilentRanks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const limit = time.Minute
		p := New(6)
		p.Begin(0, "report")                              // waits for all
		p.Begin(1, "hello")()                             // silent since
		p.Begin(2, "wait")                                // the trainer works for it
		answered := p.Begin(3, "gather")                  // and again
		p.Begin(4, "load")()                              // has ended
		p.Begin(1, "recv")                                // its agent's
		lives := func(rank int) bool { return rank != 4 } // 5 never spoke
		look := func(wantSilent, wantWaiting []int) {
			t.Helper()
			silent, waiting := p.Silent(limit, time.Now(), lives)
			var ranks []int
			for _, s := range silent {
				ranks = append(ranks, s.Rank)
			}
			if !slices.Equal(ranks, wantSilent) || !slices.Equal(waiting, wantWaiting) {
				t.Errorf("silent %v, waiting %v, want %v and %v", ranks, waiting, wantSilent, wantWaiting)
			}
		}
		time.Sleep(limit - 1) //nolint:forbidigo // the clock of the test's bubble
		look(nil, []int{0, 3})
		p.Begin(1, "recv")() // answers an agent, not the training
		answered()
		time.Sleep(1 * time.Nanosecond) //nolint:forbidigo // the clock of the test's bubble
		look([]int{1}, []int{0})
		p.Begin(1, "heartbeat")()
		look(nil, []int{0})
		time.Sleep(limit) //nolint:forbidigo // the clock of the test's bubble
		look([]int{1, 3}, []int{0})
		p.Shift(limit)
		look(nil, []int{0})

		silent, _ := p.Silent(0, time.Now(), lives)
		if len(silent) != 2 || silent[0] != (Silence{1, "heartbeat", 0}) {
			t.Errorf("silent %v", silent)
		}
	})
}
