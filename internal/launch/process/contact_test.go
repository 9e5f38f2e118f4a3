package process

import (
	"testing"
	"testing/synctest"
	"time"
)

// A contact counts each time that its deadline has passed, before it is extended or after.
func TestContactLapses(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const timeout = 2 * time.Second
		c := &Contact{}
		want := func(n int) {
			t.Helper()
			if got := c.Lapsed(); got != n {
				t.Errorf("%d lapses, want %d", got, n)
			}
		}
		want(0)
		for round := range 3 {
			c.Answered(time.Now(), timeout)
			want(round)
			<-time.After(timeout/2 - 1)
			want(round)
			<-time.After(2)
			want(round + 1)
		}
		if n := (*Contact)(nil).Lapsed(); n != 0 {
			t.Errorf("%d lapses on one node", n)
		}
	})
}
