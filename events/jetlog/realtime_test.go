package jetlog

import (
	"cmp"
	"fmt"
	"slices"
	"testing"
	"time"
)

// ended is an end of the lane that a caller received.
type ended struct {
	end              uint64
	called, returned time.Time
}

// realTime returns contradictions to the claim that every call took effect at one
// moment between its beginning and its end. The sequences are the order of those
// moments, and every decision of a lane names its predecessor, so comparing times is
// enough. No event may follow an event whose call began after its own call had
// returned. No look at the lane may miss a decision that had returned before, or show
// a decision that had not begun.
//
//	A  ├──── 7 ────┤                       A < B, so 7 < 9
//	B                 ├──── 9 ────┤
//	C           ├─ end ≥ 7, ≤ 9 ──────┤
func (h *history) realTime() (problems []string) {
	byCall := slices.SortedFunc(slices.Values(h.acked), func(a, b acked) int { return a.called.Compare(b.called) })
	byReturn := slices.SortedFunc(slices.Values(h.acked), func(a, b acked) int { return a.returned.Compare(b.returned) })
	var newest acked // of those that had returned
	for _, a := range byCall {
		for len(byReturn) > 0 && byReturn[0].returned.Before(a.called) {
			newest = maxBy(newest, byReturn[0], func(a acked) uint64 { return a.sequence })
			byReturn = byReturn[1:]
		}
		if a.sequence < newest.sequence {
			problems = append(problems, fmt.Sprintf("event %d was appended after event %d was acknowledged", a.sequence, newest.sequence))
		}
	}
	for _, e := range h.ends {
		for _, a := range h.acked {
			switch {
			case !a.decision:
			case a.returned.Before(e.called) && a.sequence > e.end:
				problems = append(problems, fmt.Sprintf("the lane ended at %d after decision %d was acknowledged", e.end, a.sequence))
			case a.called.After(e.returned) && a.sequence <= e.end:
				problems = append(problems, fmt.Sprintf("the lane ended at %d before decision %d was made", e.end, a.sequence))
			}
		}
	}
	return problems
}

func maxBy[T any, K cmp.Ordered](a, b T, key func(T) K) T {
	if key(b) > key(a) {
		return b
	}
	return a
}

// The comparison finds contradictions.
func TestRealTime(t *testing.T) {
	at := func(ms int) time.Time { return time.UnixMilli(int64(ms)) }
	event := func(seq uint64, from, to int) acked {
		return acked{sequence: seq, decision: true, called: at(from), returned: at(to)}
	}
	for name, c := range map[string]struct {
		h    *history
		want int
	}{
		"in order":                  {&history{acked: []acked{event(1, 0, 2), event(2, 3, 4)}}, 0},
		"at the same time":          {&history{acked: []acked{event(2, 0, 2), event(1, 1, 4)}}, 0},
		"against the time":          {&history{acked: []acked{event(2, 0, 2), event(1, 3, 4)}}, 1},
		"a fresh look":              {&history{acked: []acked{event(2, 0, 2)}, ends: []ended{{2, at(3), at(4)}}}, 0},
		"an early or a late look":   {&history{acked: []acked{event(2, 0, 2)}, ends: []ended{{0, at(1), at(4)}, {2, at(1), at(4)}}}, 0},
		"a stale look":              {&history{acked: []acked{event(2, 0, 2)}, ends: []ended{{0, at(3), at(4)}}}, 1},
		"a look into the future":    {&history{acked: []acked{event(2, 5, 6)}, ends: []ended{{2, at(3), at(4)}}}, 1},
		"stale amid many that hold": {&history{acked: []acked{event(1, 0, 1), event(4, 2, 3), event(3, 2, 5), event(2, 4, 5)}}, 1},
	} {
		if got := c.h.realTime(); len(got) != c.want {
			t.Errorf("%s: %q", name, got)
		}
	}
}
