package worker

import (
	"cmp"
	"slices"
)

// failure is the bad end of one rank's process.
type failure struct {
	exit
	told   told
	at     int64 // when the process had ended, in unix seconds
	victim bool  // it ended without a word after another's failure had ended the group
}

func (f failure) String() string {
	if f.told.message == "" {
		return f.exit.String()
	}
	return f.exit.String() + ": " + f.told.message
}

// rootCause is the failure that came first by what the workers tell, in whole
// seconds, or else by the order of their ends; victims come last.
func rootCause(failures []failure) failure {
	when := func(f failure) int64 {
		if f.told.at > 0 {
			return f.told.at
		}
		return f.at
	}
	order := slices.SortedStableFunc(slices.Values(failures), func(a, b failure) int {
		switch {
		case a.victim != b.victim && a.victim:
			return 1
		case a.victim != b.victim:
			return -1
		}
		return cmp.Compare(when(a), when(b))
	})
	return order[0]
}
