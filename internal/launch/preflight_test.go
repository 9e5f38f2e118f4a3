package launch

import (
	"fmt"
	"testing"
)

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
