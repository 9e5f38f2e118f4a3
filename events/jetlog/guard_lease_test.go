package jetlog

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/front"
)

// TestWhoMayTakeALease checks that while its term lasts and its client lives, a lease
// belongs to its session, or to another session of the same principal.
func TestWhoMayTakeALease(t *testing.T) {
	g := &guard{owner: front.OfUser(1000)}
	value, err := json.Marshal(leaseValue{Token: "t", Holder: []byte("{}"), TermMS: 60_000})
	if err != nil {
		t.Fatal(err)
	}
	const mine = "mine"
	live := func(session, principal string) entryNow {
		return entryNow{m: stored{Seq: 7, Data: value, Time: time.Now()}, whose: front.Stamp{Session: session, Principal: principal}}
	}
	expired := live("other", "token")
	expired.m.Time = time.Now().Add(-time.Hour)
	removed := live("other", "token")
	removed.removed = true
	alice := front.Principal{Name: "cert:alice", Personal: true}
	for name, tc := range map[string]struct {
		now entryNow
		who front.Principal
		may bool
	}{
		"free":                             {entryNow{}, front.Principal{Name: "token"}, true},
		"my own":                           {live(mine, "token"), front.Principal{Name: "token"}, true},
		"another's who has the token too":  {live("other", "token"), front.Principal{Name: "token"}, false},
		"my own of another session":        {live("other", "cert:alice"), alice, true},
		"another person's":                 {live("other", "cert:bob"), alice, false},
		"the owner's":                      {live("", ""), alice, false},
		"the owner's, by the owner's user": {live("", ""), front.OfUser(1000), true},
		"the owner's, by another user":     {live("", ""), front.OfUser(1001), false},
		"another's whose client has ended": {live("gone", "token"), alice, true},
		"another's whose term has passed":  {expired, alice, true},
		"another's that it has released":   {removed, alice, true},
	} {
		if err := g.free(front.Whose{Session: mine, Principal: tc.who, Lives: func(session string) bool { return session != "gone" }}, tc.now); (err == nil) != tc.may {
			t.Errorf("%s: %v", name, err)
		}
	}
}
