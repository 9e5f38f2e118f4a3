package events

import (
	"slices"
	"testing"
)

// An event lists participants unless they are all ranks, and is read as it was meant.
func TestParticipantsAreListedUnlessAll(t *testing.T) {
	for _, c := range []struct {
		world                int
		participants, listed []int
	}{
		{3, []int{0, 1, 2}, nil},
		{1, []int{0}, nil},
		{4, []int{0, 1, 2}, []int{0, 1, 2}},
		{3, []int{0, 2, 1}, []int{0, 2, 1}},
		{2, []int{1}, []int{1}},
	} {
		listed := Listed(c.participants, c.world)
		if !slices.Equal(listed, c.listed) {
			t.Errorf("of %d ranks, %v are listed as %v, want %v", c.world, c.participants, listed, c.listed)
		}
		for _, form := range [][]int{listed, c.participants} {
			if got := (CheckpointBegun{WorldSize: c.world, Participants: form}).All(); !slices.Equal(got, c.participants) {
				t.Errorf("of %d ranks, %v is read as %v, want %v", c.world, form, got, c.participants)
			}
		}
	}
	if got := (CheckpointBegun{}).All(); len(got) > 0 {
		t.Errorf("of no world, %v take part", got)
	}
}
