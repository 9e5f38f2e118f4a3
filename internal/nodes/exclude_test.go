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
	if r.spares(1, 2) {
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
	if !r.spares(1, 2) || r.spares(1, 3) {
		t.Error("a group of two, and no more, can start without node 1")
	}
	r.entries[2].node.Host = "host-b"
	if r.spares(1, 2) {
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
	if r.spares(2, 2) {
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
