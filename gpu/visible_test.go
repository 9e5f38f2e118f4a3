package gpu

import (
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestShareVisible(t *testing.T) {
	for name, c := range map[string]struct {
		workers []Worker
		want    []string
	}{
		"the union of each node": {
			[]Worker{{"n1", []string{"0", "1"}}, {"n1", []string{"2", "3"}}, {"n2", []string{"0", "1"}}},
			[]string{"0,1,2,3", "0,1,2,3", "0,1"},
		},
		"numbers by value": {
			[]Worker{{"n1", []string{"10"}}, {"n1", []string{"2"}}, {"n1", []string{"1"}}},
			[]string{"1,2,10", "1,2,10", "1,2,10"},
		},
		"each once": {
			[]Worker{{"n1", []string{"1", "0"}}, {"n1", []string{"0", "1", "1"}}},
			[]string{"0,1", "0,1"},
		},
		"UUIDs by text": {
			[]Worker{{"n1", []string{"GPU-b10"}}, {"n1", []string{"GPU-b2"}}, {"n1", []string{"GPU-a9"}}},
			[]string{"GPU-a9,GPU-b10,GPU-b2", "GPU-a9,GPU-b10,GPU-b2", "GPU-a9,GPU-b10,GPU-b2"},
		},
		"no devices":                 {[]Worker{{"n1", nil}, {"n1", nil}}, []string{"", ""}},
		"one without devices":        {[]Worker{{"n1", []string{"0"}}, {"n1", nil}}, []string{"0", ""}},
		"one MIG instance a node":    {[]Worker{{"n1", []string{"MIG-x"}}, {"n2", []string{"MIG-y"}}}, []string{"MIG-x", "MIG-y"}},
		"the same instance for both": {[]Worker{{"n1", []string{"MIG-x"}}, {"n1", []string{"MIG-x"}}}, []string{"MIG-x", "MIG-x"}},
		"no workers":                 {nil, nil},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := ShareVisible(c.workers)
			if err != nil || !slices.Equal(got, c.want) {
				t.Errorf("got %q, %v, want %q", got, err, c.want)
			}
		})
	}
}

func TestShareVisibleRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		workers []Worker
		want    string
	}{
		"MIG instances":  {[]Worker{{"n1", []string{"0"}}, {"n2", []string{"MIG-a"}}, {"n2", []string{"MIG-b"}}}, "node n2: MIG-a is a MIG instance"},
		"MIG and device": {[]Worker{{"n1", []string{"GPU-a", "MIG-b"}}}, "node n1: MIG-b is a MIG instance"},
		"mixed forms":    {[]Worker{{"n1", []string{"0"}}, {"n1", []string{"GPU-a"}}}, "node n1: 0,GPU-a mix indices and UUIDs"},
		"an empty ID":    {[]Worker{{"n1", []string{"0"}}, {"n1", []string{""}}}, `node n1: worker 1: "" is no device ID`},
		"a joined ID":    {[]Worker{{"n1", []string{"0,1"}}}, `"0,1" is no device ID`},
		"a leading zero": {[]Worker{{"n1", []string{"1", "01"}}}, `device index "01": write it as 1`},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := ShareVisible(c.workers)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %q, %v, want an error with %q", got, err, c.want)
			}
		})
	}
}

func TestSortIDs(t *testing.T) {
	ids := []string{"MIG-b", "10", "GPU-2", "2", "GPU-10", "MIG-a", "0"}
	SortIDs(ids)
	if want := []string{"0", "2", "10", "GPU-10", "GPU-2", "MIG-a", "MIG-b"}; !slices.Equal(ids, want) {
		t.Errorf("got %q, want %q", ids, want)
	}
}

// For any assignment, all workers of a node see the same devices, all of them,
// each once, and ordinals count them from 0.
func TestShareVisibleIsTheUnion(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		workers := rapid.SliceOf(rapid.Custom(func(t *rapid.T) Worker {
			return Worker{
				Node:    rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "node"),
				Devices: rapid.SliceOfN(rapid.SampledFrom([]string{"0", "1", "2", "9", "10", "11"}), 1, 4).Draw(t, "devices"),
			}
		})).Draw(t, "workers")
		visible, err := ShareVisible(workers)
		if err != nil {
			t.Fatal(err)
		}
		for i, w := range workers {
			ordinals := map[string]int{}
			for at, id := range strings.Split(visible[i], ",") {
				ordinals[id] = at
			}
			if len(ordinals) != strings.Count(visible[i], ",")+1 {
				t.Fatalf("%q has an ID twice", visible[i])
			}
			given := map[string]bool{}
			for j, other := range workers {
				if other.Node != w.Node {
					continue
				}
				if visible[j] != visible[i] {
					t.Fatalf("node %s: %q and %q", w.Node, visible[i], visible[j])
				}
				for _, id := range other.Devices {
					given[id] = true
					if _, ok := ordinals[id]; !ok {
						t.Fatalf("%q lacks %s", visible[i], id)
					}
				}
			}
			if len(given) != len(ordinals) {
				t.Fatalf("%q has a device that no worker was assigned", visible[i])
			}
		}
	})
}
