package planner_test

import (
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/planner"
	"pgregory.net/rapid"
)

// tens stands for a tensor in a state dict.
type tens int

func isTensor(v any) bool { _, ok := v.(tens); return ok }

func key(k, v any) planner.Entry { return planner.Entry{Key: k, Value: v} }

// leaves is one line a leaf: its name, its path where that says more, and
// what it is.
func leaves(list []planner.Leaf) string {
	var lines []string
	for _, l := range list {
		line := l.FQN
		if !l.Path.Plain(l.FQN) {
			line += " " + l.Path.String()
		}
		lines = append(lines, fmt.Sprintf("%s = %T", line, l.Value))
	}
	return strings.Join(lines, "\n")
}

func TestFlatten(t *testing.T) {
	type tuple []any
	const x = tens(1)
	type of = []any
	for name, c := range map[string]struct {
		state planner.Mapping
		want  []string
	}{
		"nothing":                 {nil, []string{""}},
		"flat":                    {planner.Mapping{key("layers.0.weight", x), key("step", 3)}, []string{"layers.0.weight = planner_test.tens", "step = int"}},
		"mappings always descend": {planner.Mapping{key("a", planner.Mapping{key("b.c", map[string]any{"z": 1, "d": 2})})}, []string{`a.b.c.d ["a" "b.c" "d"] = int`, `a.b.c.z ["a" "b.c" "z"] = int`}},
		"the case of PyTorch":     {planner.Mapping{key("k2", of{x, 99, of{planner.Mapping{key("k3", x)}}})}, []string{`k2.0 ["k2" 0] = planner_test.tens`, `k2.1 ["k2" 1] = int`, `k2.2.0.k3 ["k2" 2 0 "k3"] = planner_test.tens`}},
		"lists of numbers stay":   {planner.Mapping{key("betas", of{0.9, 0.99}), key("empty", of{}), key("deep", of{of{1}, of{}})}, []string{"betas = []interface {}", "empty = []interface {}", "deep = []interface {}"}},
		"a tensor opens its list": {planner.Mapping{key("l", of{1, of{2, x}})}, []string{`l.0 ["l" 0] = int`, `l.1.0 ["l" 1 0] = int`, `l.1.1 ["l" 1 1] = planner_test.tens`}},
		"a mapping opens a list":  {planner.Mapping{key("l", of{planner.Mapping{key("lr", 1)}, 7})}, []string{`l.0.lr ["l" 0 "lr"] = int`, `l.1 ["l" 1] = int`}},
		"tuples are terminal":     {planner.Mapping{key("t", tuple{x, planner.Mapping{}}), key("l", of{tuple{x}})}, []string{"t = planner_test.tuple", "l = []interface {}"}},
		"keys become strings":     {planner.Mapping{key(0, x), key(int64(-1), x), key(true, x), key(nil, x), key(false, x)}, []string{"0 = planner_test.tens", "-1 = planner_test.tens", "True = planner_test.tens", "None = planner_test.tens", "False = planner_test.tens"}},
		"empty mappings":          {planner.Mapping{key("a", planner.Mapping{}), key("l", of{map[string]any{}, x})}, []string{`l.1 ["l" 1] = planner_test.tens`}},
		"a name twice":            {planner.Mapping{key("a", planner.Mapping{key("b", 1)}), key("a.b", 2)}, []string{`error: flatten the state dict: "a.b" is the name of both ["a" "b"] and ["a.b"]: rename one of them`}},
		"an index and a key":      {planner.Mapping{key("l", of{x}), key("l.0", 2)}, []string{`error: flatten the state dict: "l.0" is the name of both ["l" 0] and ["l.0"]: rename one of them`}},
		"keys that become equal":  {planner.Mapping{key(0, 1), key("0", 2)}, []string{`error: flatten the state dict: "0" is the name of both ["0"] and ["0"]: rename one of them`}},
		"no name":                 {planner.Mapping{key("", x)}, []string{`error: flatten the state dict: [""] has an empty name: rename its key`}},
		"keys without a string":   {planner.Mapping{key("a", planner.Mapping{key(1.5, x)}), key([2]int{}, x)}, []string{`error: flatten the state dict: ["a"]: a key of type float64 has no name: use a string`, `[]: a key of type [2]int has no name: use a string`}},
	} {
		t.Run(name, func(t *testing.T) {
			list, err := planner.Flatten(c.state, isTensor)
			got := leaves(list)
			if err != nil {
				got = "error: " + err.Error()
			}
			if want := strings.Join(c.want, "\n"); got != want {
				t.Errorf("got\n%s\nwant\n%s", got, want)
			}
		})
	}
}

func TestUnflattenRefusesContradictions(t *testing.T) {
	leaf := func(path ...checkpoint.PathElement) planner.Leaf {
		return planner.Leaf{FQN: checkpoint.Path(path).FQN(), Path: path, Value: 1}
	}
	a, b, zero := checkpoint.PathKey("a"), checkpoint.PathKey("b"), checkpoint.PathIndex(0)
	for name, c := range map[string]struct {
		leaves []planner.Leaf
		want   string
	}{
		"no path":         {[]planner.Leaf{{FQN: "a"}}, `"a" has no path`},
		"another's path":  {[]planner.Leaf{{FQN: "a", Path: checkpoint.Path{b}}}, `"a" has the path ["b"], which is that of "b"`},
		"twice":           {[]planner.Leaf{leaf(a), leaf(a)}, `["a"] is there twice`},
		"in a value":      {[]planner.Leaf{leaf(a), leaf(a, b)}, `["a" "b"] is in ["a"], which is a value itself`},
		"around a value":  {[]planner.Leaf{leaf(a, b), leaf(a)}, `["a"] is a value and holds others`},
		"list or mapping": {[]planner.Leaf{leaf(a, b), leaf(a, zero)}, `["a" 0] has a list and a mapping in one place, ["a"]`},
		"root is a list":  {[]planner.Leaf{leaf(zero)}, `[0] begins with an index`},
		"a long list":     {[]planner.Leaf{leaf(a, checkpoint.PathIndex(1<<31))}, `["a"] is a list of 2147483649 entries, of which only 1 are there`},
		"negative index":  {[]planner.Leaf{leaf(a, checkpoint.PathIndex(-1))}, `neither a key nor an index`},
	} {
		t.Run(name, func(t *testing.T) {
			if got, err := planner.Unflatten(c.leaves); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v and error %v, want one with %q", got, err, c.want)
			}
		})
	}
	got, err := planner.Unflatten([]planner.Leaf{leaf(a, checkpoint.PathIndex(2))})
	if want := (planner.Mapping{key("a", []any{nil, nil, 1})}); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %v and error %v, want %v", got, err, want)
	}
}

// states draws a state dict without an empty mapping and with keys that are
// strings; dots in them may give two leaves one name.
func states() *rapid.Generator[planner.Mapping] {
	var value func(depth int) *rapid.Generator[any]
	mapping := func(depth, least int) *rapid.Generator[planner.Mapping] {
		return rapid.Custom(func(t *rapid.T) (m planner.Mapping) {
			for _, k := range rapid.SliceOfNDistinct(rapid.SampledFrom([]string{"a", "b", "0", "1", "a.b", "0.1", "x."}), least, 4, rapid.ID[string]).Draw(t, "keys") {
				m = append(m, key(k, value(depth-1).Draw(t, "value")))
			}
			return m
		})
	}
	value = func(depth int) *rapid.Generator[any] {
		kinds := []*rapid.Generator[any]{rapid.Map(rapid.Int(), func(n int) any { return tens(n) }), rapid.Int().AsAny()}
		if depth > 0 {
			kinds = append(kinds, mapping(depth, 1).AsAny(), rapid.SliceOfN(value(depth-1), 0, 3).AsAny())
		}
		return rapid.OneOf(kinds...)
	}
	return mapping(4, 0)
}

func TestUnflattenIsTheInverse(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		state := states().Draw(t, "state")
		list, err := planner.Flatten(state, isTensor)
		if err != nil {
			if !strings.Contains(err.Error(), "is the name of both") {
				t.Fatal(err)
			}
			return
		}
		for _, l := range list {
			if err := l.Path.Validate(l.FQN); err != nil {
				t.Fatal(err)
			}
		}
		got, err := planner.Unflatten(list)
		if err != nil || !reflect.DeepEqual(got, state) {
			t.Fatalf("%v came back as %v, %v", state, got, err)
		}
	})
}

// The lowest rank's path stands for all, and a layout brings it back.
func TestLayoutKeepsPaths(t *testing.T) {
	nested := checkpoint.Path{checkpoint.PathKey("w"), checkpoint.PathIndex(0)}
	at := func(it checkpoint.Item, p checkpoint.Path) checkpoint.Item { it.Path = p; return it }
	w := item(shard("w.0", []int64{4}, part(0, 4)))
	l := global(t, []checkpoint.Local{
		{Rank: 1, Items: []checkpoint.Item{w, value("v.0", 1, true), at(value("v", 1, false), checkpoint.Path{checkpoint.PathKey("v")})}},
		{Rank: 0, Items: []checkpoint.Item{at(w, nested), at(value("v.0", 1, true), checkpoint.Path{checkpoint.PathKey("v"), checkpoint.PathKey("0")})}},
	})
	got, err := checkpoint.DecodeLayout(checkpoint.EncodeLayout(l))
	if err != nil || !reflect.DeepEqual(got, l) {
		t.Fatalf("%+v came back as %+v, %v", l, got, err)
	}
	if p := l.Tensors[0].Path; !reflect.DeepEqual(p, nested) {
		t.Errorf("tensor w.0 has the path %v, want %v", p, nested)
	}
	for i, want := range []string{"[]", `["v" "0"]`, `["v" "0"]`} {
		if got := l.Values[i].Path.String(); got != want {
			t.Errorf("%s of rank %d has the path %v, want %v", l.Values[i].FQN, l.Values[i].Rank, got, want)
		}
	}
	_, err = planner.Global([]checkpoint.Local{{Rank: 3, Items: []checkpoint.Item{at(w, checkpoint.Path{checkpoint.PathKey("x")}), at(value("v", 1, false), checkpoint.Path{checkpoint.PathKey("x")})}}})
	problems(t, err, `rank 3: "w.0" has the path ["x"], which is that of "x"`, `rank 3: "v" has the path ["x"], which is that of "x"`)
}
