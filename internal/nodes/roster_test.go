package nodes

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/internal/problem"
)

var epoch = time.Date(2025, 1, 1, 0, 0, 0, 0, time.UTC)

// at is a moment of a test, in units of T/10.
func at(ticks int) time.Time { return epoch.Add(time.Duration(ticks) * time.Second) }

func newTestRoster(t testing.TB, limit int) *roster {
	t.Helper()
	r := newRoster(10*time.Second, limit, at(0))
	self, err := r.join(at(0), Node{Key: "self", Index: 0, Host: "h0", PID: 1}, "s-self")
	if err != nil {
		t.Fatal(err)
	}
	self.self = true
	r.out = nil
	return r
}

func node(key string, index int) Node {
	return Node{Key: key, Index: index, Host: "host-" + key, Boot: "boot", Net: "net:[1]", PID: 10}
}

func mustJoin(t testing.TB, r *roster, now time.Time, n Node, session string) int {
	t.Helper()
	e, err := r.join(now, n, session)
	if err != nil {
		t.Fatal(err)
	}
	return e.node.Index
}

// ticking ticks in time from one moment to another.
func ticking(r *roster, from, to int) {
	for i := from; i <= to; i++ {
		r.tick(at(i))
	}
}

// events drains the events as text.
func events(r *roster) string {
	var list []string
	for _, e := range r.out {
		switch e := e.(type) {
		case Joined:
			list = append(list, fmt.Sprint("joined ", e.Member.Index))
		case Rejoined:
			list = append(list, fmt.Sprint("rejoined ", e.Member.Index))
		case Left:
			list = append(list, fmt.Sprint("left ", e.Node))
		case Suspect:
			list = append(list, fmt.Sprint("suspect ", e.Node))
		case Recovered:
			list = append(list, fmt.Sprint("recovered ", e.Node))
		case Lost:
			list = append(list, fmt.Sprint("lost ", e.Node))
		case Paused:
			list = append(list, fmt.Sprint("paused ", e.For))
		}
	}
	r.out = nil
	return strings.Join(list, ", ")
}

func states(r *roster, now time.Time) string {
	var list []string
	for _, m := range r.members(now) {
		list = append(list, fmt.Sprintf("%d:%s", m.Index, m.State))
	}
	return strings.Join(list, " ")
}

func group(r *roster) string {
	chosen := r.choose()
	r.activate(chosen)
	var list []string
	for _, c := range chosen {
		list = append(list, fmt.Sprint(c.node.Index))
	}
	return strings.Join(list, " ")
}

// TestRosterIndexes: the declared index, else the key's, else the lowest free one.
func TestRosterIndexes(t *testing.T) {
	t.Parallel()
	r := newTestRoster(t, 4)
	for _, c := range []struct {
		key         string
		index, want int
	}{{"b", 2, 2}, {"a", -1, 1}, {"c", -1, 3}, {"far", 7, 7}, {"d", -1, 4}} {
		if got := mustJoin(t, r, at(0), node(c.key, c.index), "s-"+c.key); got != c.want {
			t.Errorf("%s has index %d, want %d", c.key, got, c.want)
		}
	}
	if got := states(r, at(0)); got != "0:ready 1:ready 2:ready 3:ready 4:spare 7:spare" {
		t.Error(got)
	}
	r.leave("s-a", "done")
	r.leave("s-b", "done")
	if got := mustJoin(t, r, at(0), node("b", -1), "s-b2"); got != 2 {
		t.Errorf("b has index %d now", got)
	}
	if got := mustJoin(t, r, at(0), node("e", -1), "s-e"); got != 1 {
		t.Errorf("e has index %d: the index of a node that left is free", got)
	}
	if got := mustJoin(t, r, at(0), node("a", -1), "s-a2"); got != 5 {
		t.Errorf("a has index %d: its index was taken", got)
	}
	if got := mustJoin(t, r, at(0), node("a", -1), "s-a2"); got != 5 {
		t.Errorf("a has index %d: a repeated join", got)
	}
	if got := events(r); got != "joined 2, joined 1, joined 3, joined 7, joined 4, left 1, left 2, rejoined 2, joined 1, rejoined 5" {
		t.Error(got)
	}
}

// TestRosterRefuses lists the joins that are refused.
func TestRosterRefuses(t *testing.T) {
	t.Parallel()
	r := newTestRoster(t, 4)
	mustJoin(t, r, at(0), node("a", 1), "s-a")
	r.connect("s-a")
	mustJoin(t, r, at(0), node("x", 2), "s-x")
	if err := r.expel(2, r.entries[2].joining, "bad memory"); err != nil {
		t.Fatal(err)
	}
	mustJoin(t, r, at(0), node("gone", 3), "s-gone")
	r.leave("s-gone", "done")
	elsewhere, twin := node("a", 1), node("a", 1)
	elsewhere.Host, twin.PID = "host-b", 99
	for _, c := range []struct {
		name  string
		n     Node
		kind  problem.Kind
		parts []string
	}{
		{"the key of a live node on another host", elsewhere, problem.Conflict, []string{"host-a (process 10)", "host-b (process 10)", `key "a"`}},
		{"the key of a live process", twin, problem.Conflict, []string{"host-a (process 10)", "host-a (process 99)"}},
		{"the index of a live node", node("b", 1), problem.Conflict, []string{"index 1", "host-a (process 10)", "host-b (process 10)"}},
		{"another index than before", node("gone", 4), problem.Conflict, []string{`key "gone" has index 3`, "index 4"}},
		{"the coordinator's key", Node{Key: "self", Index: 0, Host: "h0", PID: 2}, problem.Conflict, []string{`key "self"`}},
		{"no key", node("", -1), problem.Invalid, []string{"key"}},
		{"an index out of range", node("b", maxIndex), problem.Invalid, []string{"index"}},
		{"a negative index", node("b", -2), problem.Invalid, []string{"index"}},
	} {
		_, err := r.join(at(1), c.n, "s-new")
		if kinds := problem.Kinds(err); len(kinds) == 0 || kinds[0] != c.kind {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		for _, part := range c.parts {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%s: no %q in %v", c.name, part, err)
			}
		}
	}
	for _, session := range []string{"s-gone", "s-x"} {
		if _, err := r.join(at(1), node("again", -1), session); !slices.Contains(problem.Kinds(err), problem.Gone) {
			t.Errorf("a session that has ended: %v", err)
		}
	}
	if _, err := r.hear(at(1), "s-x"); err == nil || !strings.Contains(err.Error(), "bad memory") {
		t.Errorf("a beat of an expelled node: %v", err)
	}
	if err := r.expel(0, 0, "no reason"); err == nil {
		t.Error("the coordinator's node was expelled")
	}
}

// TestRosterReplaces: a new agent of the key replaces an agent that has died.
func TestRosterReplaces(t *testing.T) {
	t.Parallel()
	restarted := node("a", 1)
	restarted.PID = 11
	machine, pod, unknown := restarted, restarted, restarted
	machine.Boot, pod.Net, unknown.Net, unknown.Boot = "boot2", "net:[2]", "", ""
	moved := restarted
	moved.Host = "host-z"
	for _, c := range []struct {
		name  string
		n     Node
		until int  // ticks of silence
		close bool // the old agent's connections
		ok    bool
	}{
		{"a restarted agent whose connections are closed", restarted, 0, true, true},
		{"a restarted agent with open connections", restarted, 0, false, false},
		{"a restarted agent after missed beats", restarted, 3, false, true},
		{"an agent that knows neither boot ID nor namespace, before T", unknown, 9, true, false},
		{"an agent that knows neither boot ID nor namespace, after T", unknown, 10, true, true},
		{"a machine with the same host name before T", machine, 9, true, false},
		{"a machine with the same host name after T", machine, 10, true, true},
		{"another pod of the machine before T", pod, 9, true, false},
		{"another pod of the machine after T", pod, 10, true, true},
		{"another host before T", moved, 9, true, false},
		{"another host after T", moved, 10, true, true},
	} {
		r := newTestRoster(t, 2)
		before := node("a", 1)
		mustJoin(t, r, at(0), before, "s-1")
		r.connect("s-1")
		r.activate(r.choose())
		if c.close {
			r.disconnect("s-1")
		}
		ticking(r, 1, c.until)
		// Another machine or pod joins after the coordinator has lost the node: its workers are dead by then.
		if lost := strings.Contains(events(r), "lost 1"); c.ok && c.n.elsewhere(before) && !lost {
			t.Errorf("%s: the node before is not lost", c.name)
		}
		e, err := r.join(at(c.until), c.n, "s-2")
		if (err == nil) != c.ok {
			t.Errorf("%s: %v", c.name, err)
		}
		if err != nil {
			continue
		}
		if got := events(r); got != "rejoined 1" || e.active || e.place != 1 {
			t.Errorf("%s: %s, %+v", c.name, got, e)
		}
		if _, err := r.hear(at(c.until), "s-1"); err == nil || !strings.Contains(err.Error(), "replaced by") {
			t.Errorf("%s: the old session: %v", c.name, err)
		}
	}
}

// TestRosterSilence: suspicion after missed beats, loss after T, and no way back.
func TestRosterSilence(t *testing.T) {
	t.Parallel()
	r := newTestRoster(t, 3)
	mustJoin(t, r, at(0), node("a", 1), "s-a")
	mustJoin(t, r, at(0), node("b", 2), "s-b")
	group(r)
	r.out = nil
	ticking(r, 1, 3)
	if got := events(r); got != "suspect 1, suspect 2" {
		t.Error(got)
	}
	_, _ = r.hear(at(3), "s-b")
	ticking(r, 4, 5)
	_, _ = r.hear(at(5), "s-b")
	ticking(r, 6, 7)
	_, _ = r.hear(at(7), "s-b")
	ticking(r, 8, 9)
	if got := events(r); got != "recovered 2" {
		t.Error(got)
	}
	ticking(r, 10, 10)
	if got := events(r) + "; " + states(r, at(10)); got != "lost 1, suspect 2; 0:active 1:lost 2:suspect" {
		t.Error(got)
	}
	if _, err := r.hear(at(10), "s-a"); !slices.Contains(problem.Kinds(err), problem.Gone) {
		t.Errorf("a beat of a lost node: %v", err)
	}
	if _, err := r.join(at(10), node("a", 1), "s-a"); !slices.Contains(problem.Kinds(err), problem.Gone) {
		t.Errorf("a repeated join of a lost session: %v", err)
	}
	_, _ = r.hear(at(10), "s-b")
	r.release([]int{0, 1, 2, 9})
	if got := states(r, at(10)); got != "0:ready 2:ready" {
		t.Error(got)
	}
	if _, err := r.hear(at(10), "s-a"); err == nil || !strings.Contains(err.Error(), "nothing was received for 10s") {
		t.Errorf("a beat of a node that is removed: %v", err)
	}
}

// TestRosterPause: a coordinator that did not run judges no node until it has ticked in
// time for T.
func TestRosterPause(t *testing.T) {
	t.Parallel()
	r := newTestRoster(t, 2)
	mustJoin(t, r, at(0), node("a", 1), "s-a")
	ticking(r, 1, 2)
	r.out = nil
	r.tick(at(32))
	if got := events(r); got != "paused 29s" {
		t.Error(got)
	}
	ticking(r, 33, 36)
	r.tick(at(39)) // again
	if got := events(r); got != "suspect 1, paused 2s" {
		t.Error(got)
	}
	ticking(r, 40, 48)
	if got := events(r); got != "" {
		t.Error(got)
	}
	r.tick(at(49))
	if got := events(r); got != "lost 1" {
		t.Error(got)
	}
}

// TestRosterConnections: without a connection a node is suspect until its next request.
func TestRosterConnections(t *testing.T) {
	t.Parallel()
	r := newTestRoster(t, 2)
	mustJoin(t, r, at(0), node("a", 1), "s-a")
	r.out = nil
	r.connect("s-a")
	r.connect("s-a")
	r.disconnect("s-a")
	if got := events(r); got != "" {
		t.Error(got)
	}
	r.disconnect("s-a")
	if got := events(r) + "; " + group(r); got != "suspect 1; 0" {
		t.Error(got)
	}
	_, _ = r.hear(at(1), "s-a")
	r.connect("unknown")
	r.disconnect("unknown")
	if got := events(r); got != "recovered 1" {
		t.Error(got)
	}
}

// TestRosterSpares: a spare takes the place of a lost node, and no other node moves.
func TestRosterSpares(t *testing.T) {
	t.Parallel()
	r := newTestRoster(t, 3)
	beat := func(now int, sessions ...string) {
		for _, s := range sessions {
			_, _ = r.hear(at(now), s)
		}
	}
	for i, key := range []string{"a", "b", "c"} {
		mustJoin(t, r, at(0), node(key, i+1), "s-"+key)
	}
	if got := group(r) + "; " + states(r, at(0)); got != "0 1 2; 0:active 1:active 2:active 3:spare" {
		t.Error(got)
	}
	for i := 1; i <= 10; i++ {
		beat(i, "s-b", "s-c")
		r.tick(at(i))
	}
	if got := group(r); got != "3" {
		t.Errorf("the rest of the running group: %s", got)
	}
	if got := group(r); got != "" {
		t.Errorf("the rest of a full group: %s", got)
	}
	r.release([]int{0, 1, 2, 3})
	if got := group(r); got != "0 3 2" {
		t.Errorf("the group after the loss: %s", got)
	}
	r.release([]int{0, 3, 2})
	if got := mustJoin(t, r, at(10), node("a", -1), "s-a2"); got != 1 {
		t.Errorf("the lost node has index %d", got)
	}
	if got := states(r, at(10)) + "; " + group(r); got != "0:ready 1:spare 2:ready 3:ready; 0 3 2" {
		t.Errorf("the group after it returned: %s", got)
	}
	r.release([]int{0, 3, 2})
	r.leave("s-c", "done")
	if got := group(r); got != "0 1 2" {
		t.Errorf("the group without the spare: %s", got)
	}
}

// TestRosterTakesLostIndex: a new key may take the index of a lost node, and that node
// comes back with another.
func TestRosterTakesLostIndex(t *testing.T) {
	t.Parallel()
	r := newTestRoster(t, 2)
	mustJoin(t, r, at(0), node("a", 1), "s-a")
	group(r)
	ticking(r, 1, 10)
	if got := mustJoin(t, r, at(10), node("b", -1), "s-b"); got != 1 {
		t.Errorf("b has index %d", got)
	}
	if got := mustJoin(t, r, at(10), node("a", -1), "s-a2"); got != 2 {
		t.Errorf("a has index %d", got)
	}
	r.release([]int{0, 1})
	if got := group(r); got != "0 1" {
		t.Error(got)
	}
}

// TestRosterProperties runs random joins, beats, ticks and pauses. No two live nodes have
// one key; each live key keeps its index; a node is lost only after T without a request,
// in which the coordinator ticked in time; a group has no place twice.
func TestRosterProperties(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.IntRange(1, 4).Draw(t, "max")
		r := newRoster(10*time.Second, limit, at(0))
		now := at(0)
		steady := now
		beats := map[string]time.Time{} // by session
		index := map[string]int{}       // by key
		sessions := []string{"none"}
		lastTick := now
		for i := range rapid.IntRange(1, 80).Draw(t, "steps") {
			switch rapid.IntRange(0, 9).Draw(t, "step") {
			case 0, 1:
				n := node(rapid.SampledFrom([]string{"a", "b", "c", "d", "e"}).Draw(t, "key"), rapid.IntRange(-1, 4).Draw(t, "index"))
				n.Host = rapid.SampledFrom([]string{"h1", "h2"}).Draw(t, "host")
				n.Boot = rapid.SampledFrom([]string{"b1", "b2"}).Draw(t, "boot")
				session := fmt.Sprint("s", i)
				before := r.entryOf(n.Key)
				e, err := r.join(now, n, session)
				if err != nil {
					break
				}
				if before != nil && before.lost == "" && (before.node.Host != n.Host || before.node.Boot != n.Boot) {
					t.Fatalf("%v replaced a live node on another machine: %v", n, before.node)
				}
				if old, ok := index[n.Key]; ok && old != e.node.Index {
					taken := false
					for key, other := range index {
						taken = taken || key != n.Key && other == old
					}
					if !taken {
						t.Fatalf("%s had index %d and has %d, and no other key has it", n.Key, old, e.node.Index)
					}
				}
				index[n.Key] = e.node.Index
				beats[session] = now
				sessions = append(sessions, session)
			case 2, 3:
				session := rapid.SampledFrom(sessions).Draw(t, "session")
				if _, err := r.hear(now, session); err == nil {
					beats[session] = now
				}
			case 4:
				r.leave(rapid.SampledFrom(sessions).Draw(t, "session"), "done")
			case 5:
				session := rapid.SampledFrom(sessions).Draw(t, "session")
				r.connect(session)
				r.disconnect(session)
			case 6:
				chosen := r.choose()
				if len(chosen) > limit {
					t.Fatalf("%d nodes in a group of %d", len(chosen), limit)
				}
				places := map[int]bool{}
				for _, c := range chosen {
					if places[c.place] || c.place < 0 || c.place >= limit || c.lost != "" || c.suspect != "" || c.active {
						t.Fatalf("%+v at place %d", c.node, c.place)
					}
					places[c.place] = true
				}
				r.activate(chosen)
			case 7:
				r.release([]int{0, 1, 2, 3, 4, 5, 6})
			default:
				now = now.Add(time.Duration(rapid.SampledFrom([]int{500, 1000, 1000, 1000, 2000, 2500, 12000}).Draw(t, "ms")) * time.Millisecond)
				if now.Sub(lastTick) > 2*time.Second {
					steady = now
				}
				lastTick = now
				r.tick(now)
			}
			for _, e := range r.out {
				if lost, ok := e.(Lost); ok {
					session := r.entries[lost.Node].session
					if now.Sub(beats[session]) < r.timeout || now.Sub(steady) < r.timeout {
						t.Fatalf("node %d is lost after %v, ticked in time for %v", lost.Node, now.Sub(beats[session]), now.Sub(steady))
					}
				}
			}
			r.out = nil
			keys := map[string]bool{}
			for index, e := range r.entries {
				if e.node.Index != index || keys[e.node.Key] || r.sessions[e.session] != e {
					t.Fatalf("entry %d: %+v", index, e)
				}
				keys[e.node.Key] = true
			}
			if len(r.sessions) != len(r.entries) {
				t.Fatalf("%d sessions, %d entries", len(r.sessions), len(r.entries))
			}
			r.members(now)
		}
	})
}

// TestErrorsAreKinds: the errors of requests name their kinds.
func TestErrorsAreKinds(t *testing.T) {
	t.Parallel()
	for err, kind := range map[error]problem.Kind{ErrExpelled: problem.Gone, ErrNoContact: problem.Unavailable, ErrRestarted: problem.Gone} {
		if kinds := problem.Kinds(errors.Join(err)); len(kinds) != 1 || kinds[0] != kind {
			t.Errorf("%v: %v", err, kinds)
		}
	}
}

// TestRosterGrowth: nodes that have come to stay while a whole group runs, up to the most.
func TestRosterGrowth(t *testing.T) {
	t.Parallel()
	r := newTestRoster(t, 4)
	mustJoin(t, r, at(0), node("a", -1), "s-a")
	mustJoin(t, r, at(0), node("b", -1), "s-b")
	want := func(now time.Time, what string, more int, settled time.Duration) {
		t.Helper()
		if m, s := r.growth(now); m != more || s != settled {
			t.Errorf("%s: %d more for %v, want %d for %v", what, m, s, more, settled)
		}
	}
	want(at(1), "without a group", 0, 0)
	group(r)
	want(at(1), "without a spare", 0, 0)
	mustJoin(t, r, at(2), node("c", -1), "s-c")
	want(at(5), "one spare", 1, at(5).Sub(at(2)))
	mustJoin(t, r, at(4), node("d", -1), "s-d")
	want(at(5), "two spares and one place", 1, at(5).Sub(at(2)))
	r.doubt(r.sessions["s-c"], "a cut")
	want(at(6), "the first one is suspect", 1, at(6).Sub(at(4)))
	if _, err := r.hear(at(7), "s-c"); err != nil {
		t.Fatal(err)
	}
	want(at(8), "it came back", 1, at(8).Sub(at(7)))
	r.doubt(r.sessions["s-b"], "a cut")
	want(at(9), "a node of the group is suspect", 0, 0)
	r.release([]int{0, 1, 2})
	want(at(9), "after the group", 0, 0)
}

// Groups are made of admitted nodes only: a node that has joined, and hangs while it opens the store, is in
// none, replaces none, and makes none grow. A node that joins again is not admitted by what the one
// before has told.
func TestRosterAdmission(t *testing.T) {
	t.Parallel()
	r := newTestRoster(t, 3)
	r.admits = true
	mustJoin(t, r, at(0), node("a", -1), "s-a")
	mustJoin(t, r, at(0), node("b", -1), "s-b")
	if got := states(r, at(0)); got != "0:ready 1:opening 2:opening" {
		t.Error(got)
	}
	if r.spares(r.entries[2].node, 2) {
		t.Error("a node that is opening the store is a spare")
	}
	r.admit(at(1), 1, r.entries[1].joining)
	if got := group(r); got != "0 1" {
		t.Errorf("group %s", got)
	}
	if more, _ := r.growth(at(2)); more != 0 {
		t.Errorf("it grows by %d", more)
	}
	r.admit(at(3), 2, r.entries[2].joining)
	r.admit(at(4), 2, r.entries[2].joining)
	if more, settled := r.growth(at(5)); more != 1 || settled != at(5).Sub(at(3)) {
		t.Errorf("it grows by %d, settled for %v", more, settled)
	}
	before := r.entries[2].joining
	r.leave("s-b", "again")
	mustJoin(t, r, at(6), node("b", -1), "s-b2")
	r.admit(at(7), 2, before)
	if got := states(r, at(7)); got != "0:active 1:active 2:opening" {
		t.Error(got)
	}
}

// An agent that joins again and again, each time as another, does not grow the roster without bound, and
// live nodes keep their keys.
func TestRosterForgets(t *testing.T) {
	t.Parallel()
	r := newTestRoster(t, 4)
	mustJoin(t, r, at(0), node("a", 1), "s-a")
	for i := range maxGone + 100 {
		name := fmt.Sprint("x", i)
		mustJoin(t, r, at(0), node(name, -1), "s-"+name)
		r.leave("s-"+name, "again")
		r.out = nil
	}
	if len(r.known) > maxGone+3 || len(r.kept) > maxGone+3 || len(r.ended) > maxGone+1 {
		t.Errorf("%d keys, %d indexes, %d sessions", len(r.known), len(r.kept), len(r.ended))
	}
	if !r.known["a"] || r.kept["a"] != 1 || !r.known["self"] {
		t.Error("a live node is forgotten")
	}
}
