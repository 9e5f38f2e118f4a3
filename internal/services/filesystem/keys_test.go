package filesystem

import (
	"maps"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
)

// Keys that may have been numbers are found by their containers, except an
// optimizer's.
func TestTextKeys(t *testing.T) {
	path := func(keys ...any) (p checkpoint.Path) {
		for _, k := range keys {
			if i, ok := k.(int); ok {
				p = append(p, checkpoint.PathIndex(i))
			} else {
				p = append(p, checkpoint.PathKey(k.(string)))
			}
		}
		return p
	}
	var l checkpoint.Layout
	for _, p := range []checkpoint.Path{
		path("model", "0.weight"), path("model", "Tail"), path("list", 3), path("opt", "state", "0", "exp_avg"),
		path("other", "state", "1", "n"), path("losses", "-7"), path("losses", "8"), path("pairs", "(1, 'a')"), path("flags", "None"),
		path("rates", "2.5"), path("a.b", 2, "True"),
	} {
		l.Tensors = append(l.Tensors, checkpoint.Tensor{FQN: p.FQN(), Path: p})
	}
	l.Values = []checkpoint.Value{{FQN: "7"}, {FQN: "8x"}}
	for _, p := range []checkpoint.Path{path("opt", "param_groups", 0, "params"), path("sgd", "param_groups", 0, "params"), path("sgd", "state", "0", "step")} {
		l.Values = append(l.Values, checkpoint.Value{FQN: p.FQN(), Path: p})
	}
	want := map[string]string{"other.state": "1", "sgd.state": "0", "losses": "-7", "pairs": "(1, 'a')", "flags": "None", "rates": "2.5", "a.b.2": "True", "": "7"}
	if got := textKeys(l); !maps.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}
