package jetlog

import (
	"fmt"
	"math/rand/v2"
	"os"
	"testing"
)

// TestSeenIDs checks that seenIDs finds the same IDs as a map, with any memory limit.
func TestSeenIDs(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(1, 2))
	for _, most := range []int{1, 2, 7, 100, 1000} {
		dir := t.TempDir()
		s := seenIDs{dir: dir, most: most}
		first, want := map[string]uint64{}, map[uint64]uint64{}
		for seq := uint64(1); seq <= 500; seq++ {
			id := fmt.Sprint(random.IntN(400))
			if before, again := first[id]; again {
				want[seq] = before
			} else {
				first[id] = seq
			}
			if err := s.add(id, seq); err != nil {
				t.Fatal(err)
			}
		}
		got := map[uint64]uint64{}
		if err := s.repeats(func(seq, before uint64) { got[seq] = before }); err != nil {
			t.Fatal(err)
		}
		if len(want) == 0 || fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("with %d in memory found %v, want %v", most, got, want)
		}
		if err := s.close(); err != nil {
			t.Error(err)
		}
		if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
			t.Errorf("left are %v, %v", left, err)
		}
	}
}
