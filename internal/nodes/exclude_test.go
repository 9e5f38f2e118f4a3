package nodes

import (
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/problem"
)

// An excluded node is no member, its machine cannot join again under any key, and a spare takes
// its place.
func TestExclude(t *testing.T) {
	t.Parallel()
	r := newTestRoster(t, 2)
	mustJoin(t, r, at(0), node("b", 1), "s-b")
	r.activate(r.choose())
	mustJoin(t, r, at(0), node("c", -1), "s-c")
	joining := r.entries[1].joining
	if err := r.exclude(1, joining, "bad"); !kindIs(err, problem.Conflict) {
		t.Errorf("excluded from a running group: %v", err)
	}
	if r.spares(r.entries[1].node, 2) {
		t.Error("a running group leaves no nodes")
	}
	r.release([]int{0, 1})
	for name, err := range map[string]error{
		"the coordinator's own": r.exclude(0, r.entries[0].joining, "bad"),
		"an earlier joining":    r.exclude(1, joining-1, "bad"),
		"an absent node":        r.exclude(7, 1, "bad"),
	} {
		if err == nil {
			t.Errorf("%s is excluded", name)
		}
	}
	if !r.spares(r.entries[1].node, 2) || r.spares(r.entries[1].node, 3) {
		t.Error("a group of two, and no more, can start without node 1")
	}
	r.entries[2].node.Host = "host-b"
	if r.spares(r.entries[1].node, 2) {
		t.Error("a spare on the same machine takes its place")
	}
	r.entries[2].node.Host = "host-c"
	r.out = nil
	if err := r.exclude(1, joining, "its ranks fail"); err != nil {
		t.Fatal(err)
	}
	want := Excluded{Node: 1, Host: "host-b", Boot: "boot", Why: "its ranks fail"}
	if !slices.Equal(r.out, []Event{want}) {
		t.Errorf("events %+v", r.out)
	}
	if _, err := r.hear(at(1), "s-b"); !kindIs(err, problem.Failed) || !strings.Contains(err.Error(), "its ranks fail") {
		t.Errorf("its beat: %v", err)
	}
	group := r.choose()
	if len(group) != 2 || group[1].node.Key != "c" || group[1].place != 1 {
		t.Errorf("group %+v", group)
	}
	if r.spares(r.entries[2].node, 2) {
		t.Error("there is no other spare")
	}
	again, other, booted := node("b", -1), node("d", 1), node("b", 1)
	again.Key, other.Boot, booted.Boot = "another", "boot of another", "boot later"
	if _, err := r.join(at(2), again, "s-again"); !kindIs(err, problem.Failed) {
		t.Errorf("the machine joins again: %v", err)
	}
	if _, err := r.join(at(2), other, "s-d"); err != nil {
		t.Errorf("another machine: %v", err)
	}
	r.leave("s-d", "done")
	if _, err := r.join(at(2), booted, "s-booted"); err != nil {
		t.Errorf("after a reboot: %v", err)
	}
}

func kindIs(err error, kind problem.Kind) bool { return slices.Contains(problem.Kinds(err), kind) }

// Machines that an earlier coordinator has excluded cannot join.
func TestExclusionInherited(t *testing.T) {
	t.Parallel()
	r := newTestRoster(t, 2)
	x := Excluded{Node: 4, Host: "host-b", Boot: "boot", Why: "as before"}
	r.inherit([]Excluded{x})
	if !slices.Equal(r.out, []Event{x}) {
		t.Errorf("events %+v", r.out)
	}
	if _, err := r.join(at(1), node("b", 1), "s-b"); !kindIs(err, problem.Failed) {
		t.Errorf("joined: %v", err)
	}
	mustJoin(t, r, at(1), node("c", 1), "s-c")
}

// A coordinator that takes over in the same job lets no excluded machine in, and reports none again: another node may
// have its index by now.
func TestExclusionsOfTheSameJob(t *testing.T) {
	t.Parallel()
	for _, succeeds := range []bool{false, true} {
		j := listen(t, func(c *EndpointConfig) {
			c.Succeeds, c.Excluded = succeeds, []Excluded{{Node: 1, Host: "host-a", Boot: "boot-a", Why: "bad"}}
		})
		if _, err := Join(within(t), j.agent("a", 1)); !kindIs(err, problem.Failed) {
			t.Errorf("succeeds: %v: the excluded machine joined: %v", succeeds, err)
		}
		join1(t, j.agent("c", 1))
		_, reported := (<-j.Events()).(Excluded)
		if reported == succeeds {
			t.Errorf("succeeds: %v: exclusion reported: %v", succeeds, reported)
		}
	}
}

// The machine of a lost node is barred, whether its trainer is gone or has joined again, under any
// index. Without a boot ID, a reboot changes nothing.
func TestBar(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		again   Node   // joins before the exclusion; without a key: none does
		boot    string // of the exclusion
		booted  bool   // whether the machine can join when it was booted again
		release bool
		want    problem.Kind
	}{
		"gone":                    {boot: "boot", booted: true, release: true},
		"gone, for good":          {release: true},
		"joined again":            {again: node("b", 1), boot: "boot", booted: true, release: true},
		"joined as another":       {again: Node{Key: "x", Index: -1, Host: "host-b", Boot: "boot", PID: 11}, boot: "boot", booted: true, release: true},
		"joined after a reboot":   {again: Node{Key: "b", Index: 1, Host: "host-b", Boot: "second", PID: 11}, release: true},
		"its group has not ended": {again: node("b", 1), boot: "boot", want: problem.Conflict},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newTestRoster(t, 2)
			mustJoin(t, r, at(0), node("b", 1), "s-b")
			r.activate(r.choose())
			lost := r.member(at(0), r.entries[1], nil)
			for i := 1; i <= 10; i++ {
				r.tick(at(i))
			}
			if r.entries[1].lost == "" {
				t.Fatal("it is not lost")
			}
			r.release([]int{0, 1})
			if c.again.Key != "" {
				mustJoin(t, r, at(11), c.again, "s-again")
			}
			if !c.release {
				r.activate(r.choose())
			}
			r.out = nil
			lost.Boot = c.boot
			err := r.bar(lost, "lost again")
			if c.want != "" {
				if !kindIs(err, c.want) || len(r.excluded) > 0 || r.sessions["s-again"] == nil {
					t.Errorf("%v; excluded %v", err, r.excluded)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if want := []Event{Excluded{Node: 1, Host: "host-b", Boot: c.boot, Why: "lost again"}}; !slices.Equal(r.out, want) {
				t.Errorf("events %+v, want %+v", r.out, want)
			}
			if c.again.Key != "" {
				if _, err := r.hear(at(12), "s-again"); !kindIs(err, problem.Failed) || !strings.Contains(err.Error(), "lost again") {
					t.Errorf("its beat: %v", err)
				}
			}
			if len(r.entries) != 1 {
				t.Errorf("%d entries are left", len(r.entries))
			}
			if _, err := r.join(at(12), node("b", -1), "s-later"); !kindIs(err, problem.Failed) {
				t.Errorf("the machine joins: %v", err)
			}
			booted := node("b", -1)
			booted.Boot = "third"
			if _, err := r.join(at(12), booted, "s-booted"); (err == nil) != c.booted {
				t.Errorf("after a reboot: %v", err)
			}
		})
	}
}

// A coordinator's own machine is not barred for a node on it.
func TestBarOwnMachine(t *testing.T) {
	t.Parallel()
	r := newTestRoster(t, 2)
	self := r.entries[0]
	self.node.Boot = "boot"
	if err := r.bar(Member{Node: Node{Index: 1, Host: self.node.Host, Boot: self.node.Boot}, Joining: self.joining}, "lost"); !kindIs(err, problem.Invalid) || len(r.excluded) > 0 {
		t.Errorf("%v; excluded %v", err, r.excluded)
	}
}

// Without a boot ID, a node is excluded by its host and index: others of one host name, such as localhost,
// stay and can join. A node without an index of its own may be the excluded one.
func TestBarWithoutBootID(t *testing.T) {
	t.Parallel()
	r := newTestRoster(t, 4)
	local := func(key string, index int) Node {
		return Node{Key: key, Index: index, Host: "localhost", Boot: "boot of " + key, PID: 10}
	}
	r.entries[0].node.Host = "localhost"
	mustJoin(t, r, at(0), local("1", 1), "s-1")
	mustJoin(t, r, at(0), local("2", 2), "s-2")
	lost := r.member(at(0), r.entries[1], nil)
	lost.Boot = ""
	if !r.spares(lost.Node, 2) {
		t.Error("the nodes 0 and 2 are no group")
	}
	if err := r.bar(lost, "lost again"); err != nil {
		t.Fatal(err)
	}
	if len(r.entries) != 2 || r.entries[2] == nil {
		t.Errorf("entries %v", r.entries)
	}
	mustJoin(t, r, at(1), local("3", 3), "s-3")
	for name, n := range map[string]Node{"with its index": local("1", 1), "with its key": local("1", -1), "without an index": local("x", -1)} {
		if _, err := r.join(at(1), n, "s-"+name); !kindIs(err, problem.Failed) {
			t.Errorf("it joins %s: %v", name, err)
		}
	}
}
