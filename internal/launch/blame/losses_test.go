package blame

import (
	"strconv"
	"strings"
	"testing"
	"time"
)

// A node must be excluded when it is lost so often in a row: no other node is lost in between, less
// than an hour passes between two losses, and no other node was excluded meanwhile.
func TestLosses(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		limit int
		// The hosts of the nodes that an attempt loses, - for none, with + after more than an hour. A
		// node has the index of its host's letter, or the one given, and the boot ID given.
		lost string
		want string // x: the node is excluded, n: the network is to blame
	}{
		"once":                         {2, "b", "-"},
		"twice":                        {2, "b b", "-x"},
		"others fall too":              {2, "b c b c b", "-----"},
		"another falls, then twice":    {2, "b c b b", "---x"},
		"together with another":        {2, "b b,c b", "---"},
		"at once":                      {1, "b", "x"},
		"three times":                  {3, "b b b", "--x"},
		"never":                        {0, "b b b b", "----"},
		"other failures in between":    {2, "b - - b", "---x"},
		"after a long time":            {2, "b b+", "--"},
		"a long time, then twice":      {2, "b b+ b", "--x"},
		"a second node":                {2, "b b c c c", "-x-nn"},
		"a second node, much later":    {2, "b b c+ c", "-x-x"},
		"with another index":           {2, "b1 b2", "-x"},
		"after a reboot":               {2, "b:1 b:2", "-x"},
		"other machine, other index":   {2, "b1:1 b2:2", "--"},
		"unknown boots, other index":   {2, "b1: b2:", "--"},
		"another host, the same index": {2, "b1 c1", "--"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l, now, got := Losses{Limit: c.limit}, time.Unix(0, 0), ""
			for _, attempt := range strings.Fields(c.lost) {
				now = now.Add(time.Minute)
				attempt, late := strings.CutSuffix(attempt, "+")
				if late {
					now = now.Add(lossesApart)
				}
				var of []Node
				for _, one := range strings.FieldsFunc(attempt, func(r rune) bool { return r == ',' || r == '-' }) {
					of = append(of, fallen(t, one))
				}
				switch l.Lost(now, of) {
				case TheNode:
					l.Excluded()
					got += "x"
				case TheNetwork:
					got += "n"
				default:
					got += "-"
				}
			}
			if got != c.want {
				t.Errorf("%s, want %s", got, c.want)
			}
		})
	}
}

// fallen returns a node from its text: HOST[INDEX][:BOOT].
func fallen(t *testing.T, text string) (n Node) {
	t.Helper()
	text, boot, given := strings.Cut(text, ":")
	if n.Boot = boot; !given {
		n.Boot = "same"
	}
	n.Host, n.Index = text[:1], int(text[0])
	if of := text[1:]; of != "" {
		var err error
		if n.Index, err = strconv.Atoi(of); err != nil {
			t.Fatal(err)
		}
	}
	return n
}

// A reboot ends an exclusion, unless the machine was rebooted between the losses already.
func TestExclusionOverReboots(t *testing.T) {
	t.Parallel()
	for lost, want := range map[string]string{"b:1 b:1": "1", "b:1 b:2": "", "b:1 b:2 b:2": "", "c:1 c:2 b:3 b:3": "3"} {
		var l Losses
		for _, one := range strings.Fields(lost) {
			l.Lost(time.Unix(0, 0), []Node{fallen(t, one)})
		}
		if got := l.Boot(); got != want {
			t.Errorf("%s: the exclusion holds for boot %q, want %q", lost, got, want)
		}
	}
}
