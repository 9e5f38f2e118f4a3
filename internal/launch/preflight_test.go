package launch

import (
	"fmt"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/nodes"
)

// A node that is still opening the store is not measured by a preflight of others, which does not wait for it: it is
// measured before its first group.
func TestPreflightOfNodeThatOpens(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	e, err := nodes.Listen(t.Context(), nodes.EndpointConfig{
		Address: "127.0.0.1:0", Dir: dir, Job: "job", Run: "run", Store: "store", Version: "test", Min: 1, Max: 2,
		Self: nodes.Node{Index: 0, Key: "0", Procs: 1},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = e.Close() })
	e.AwaitAdmission()
	link, err := nodes.Join(t.Context(), nodes.JoinConfig{
		Address: e.Addr().String(), Dir: dir, Wait: 30 * time.Second,
		Self: nodes.Node{Index: 1, Key: "1", Procs: 1, Version: "test", Store: "store"},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(link.Close)
	f := &fleet{endpoint: e}
	members := e.Members()
	if !f.unchecked(members[:1]) || f.unchecked(members[:1]) {
		t.Error("the first node is measured never, or twice")
	}
	if members = e.Members(); members[1].State != nodes.StateOpening {
		t.Fatalf("node 1 is %s", members[1].State)
	}
	e.Admit(1, members[1].Joining)
	if members = e.Members(); !f.unchecked(members) || f.unchecked(members) {
		t.Error("the node that has opened the store is measured never, or twice")
	}
}

// A disk that is slow for most nodes excludes none of them: they may share it. Other findings stay.
func TestSharedDiskBlamesNoNode(t *testing.T) {
	t.Parallel()
	clock := 0.0
	disk, memory := badDisk+": no answer after 8s", "its shared memory is bad: full"
	of := func(bad ...string) findings { return findings{bad, &clock} }
	for name, c := range map[string]struct {
		found   map[int]findings
		excused int
		want    string // the findings by index
	}{
		"most nodes":          {map[int]findings{0: of(disk), 1: of(memory, disk), 2: of()}, 2, "map[0:[] 1:[" + memory + "] 2:[]]"},
		"half of the nodes":   {map[int]findings{0: of(disk), 1: of()}, 0, "map[0:[" + disk + "] 1:[]]"},
		"one node of several": {map[int]findings{0: of(), 1: of(), 2: of(disk)}, 0, "map[0:[] 1:[] 2:[" + disk + "]]"},
		"the only examined":   {map[int]findings{0: of(disk), 1: {}}, 1, "map[0:[] 1:[]]"},
		"no disk":             {map[int]findings{0: of(memory), 1: of(memory)}, 0, "map[0:[" + memory + "] 1:[" + memory + "]]"},
	} {
		excused, such := excuseDisks(c.found)
		got := map[int][]string{}
		for index, of := range c.found {
			got[index] = of.bad
		}
		if such != "" != (excused > 0) || excused != c.excused || fmt.Sprint(got) != c.want {
			t.Errorf("%s: %d excused, %v; want %d, %s", name, excused, got, c.excused, c.want)
		}
	}
}
