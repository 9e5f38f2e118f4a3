package check

import (
	"slices"
	"testing"
)

func TestReplay(t *testing.T) {
	t.Parallel()
	of := func(verbs ...string) (all []event) {
		for i := 0; i < len(verbs); i += 2 {
			all = append(all, event{uint64(len(all) + 1), "r", verbs[i], verbs[i+1]})
		}
		return all
	}
	back := of("a", "begun", "a", "committed")
	back[1].sequence = 1
	for name, c := range map[string]struct {
		log  []event
		want []string
	}{
		"a log":                     {of("a", "begun", "a", "committed", "b", "begun", "b", "committed", "a", "deleted"), nil},
		"the newest is deleted":     {of("a", "begun", "a", "committed", "b", "begun", "a", "deleted", "b", "committed"), []string{"r@a was deleted, and was the newest of r"}},
		"what never was":            {of("a", "begun", "a", "committed", "b", "begun", "b", "deleted"), []string{"r@b is deleted, and was never committed"}},
		"a commit twice":            {of("a", "begun", "a", "committed", "a", "committed"), []string{"r@a is committed twice, at 2 and 3"}},
		"a sequence that goes back": {back, []string{"events: sequence 1 follows 1"}},
	} {
		t.Run(name, func(t *testing.T) {
			c2 := &checker{}
			c2.replay(c.log)
			if !slices.Equal(c2.Findings, c.want) {
				t.Errorf("%q, want %q", c2.Findings, c.want)
			}
		})
	}
}

func TestParseEvent(t *testing.T) {
	t.Parallel()
	e, err := parseEvent([]byte(`{"sequence":7,"subject":"ckpt.r.main.s.checkpoint.begun","data":{"checkpoint":"a"}}`))
	if err != nil || e != (event{7, "r", "a", "begun"}) {
		t.Errorf("%+v, %v", e, err)
	}
	for _, line := range []string{"", `{}`, `{"sequence":7,"subject":"ckpt.r.main.s.group.begun","data":{"checkpoint":"a"}}`, `{"sequence":7,"subject":"ckpt.r.main.s.checkpoint.begun","data":{}}`} {
		if _, err := parseEvent([]byte(line)); err == nil {
			t.Errorf("%q is taken for an event", line)
		}
	}
}
