package insight

import (
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/projections"
)

// A commit is missing after three usual intervals, which count from the job's start if it is later
// than the last commit.
func TestNoCommit(t *testing.T) {
	now := time.Unix(1e6, 0)
	ago := func(d time.Duration) time.Time { return now.Add(-d) }
	minutes := func(gaps ...int) (list []time.Duration) {
		for _, g := range gaps {
			list = append(list, time.Duration(g)*time.Minute)
		}
		return list
	}
	for _, c := range []struct {
		name            string
		gaps            []time.Duration
		commit, started time.Duration // ago
		late            bool
	}{
		{"on time", minutes(5, 5, 5), 14 * time.Minute, time.Hour, false},
		{"late", minutes(5, 5, 5), 16 * time.Minute, time.Hour, true},
		{"one gap is long", minutes(5, 300, 5), 16 * time.Minute, time.Hour, true},
		{"just resumed", minutes(5, 5), time.Hour, 2 * time.Minute, false},
		{"resumed long ago", minutes(5, 5), time.Hour, 20 * time.Minute, true},
		{"one commit", nil, time.Hour, 2 * time.Hour, false},
	} {
		risk, late := NoCommit(projections.Tally{Run: "a b", LastCommitAt: ago(c.commit), Gaps: c.gaps}, ago(c.started), now)
		if late != c.late || late && (risk.Run != "a b" || risk.Usual != 300 || risk.Seconds != min(c.commit, c.started).Seconds() || risk.Command != "ckptstore ls --all -- 'a b'") {
			t.Errorf("%s: %+v, %v", c.name, risk, late)
		}
	}
}
