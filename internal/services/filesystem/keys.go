package filesystem

import (
	"regexp"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
)

// textKeys are the containers of which PyTorch's planner has made text of keys that may
// have been numbers or other values of Python, by name, with one such key of each. The
// root has the empty name. The state of an optimizer that has tensors alone is left out: its
// groups list the keys as they are. Python's _keys.texts is the same for paths that it has.
func textKeys(l checkpoint.Layout) map[string]string {
	found, optimizers := map[string]container{}, map[string]bool{}
	look := func(fqn string, path checkpoint.Path, value bool) {
		if len(path) == 0 {
			path = checkpoint.Path{checkpoint.PathKey(fqn)}
		}
		for i, e := range path {
			switch {
			case e.List || e.Literal:
			case e.Key == "param_groups":
				optimizers[path[:i].FQN()] = true
			case isText(e.Key):
				name := path[:i].FQN()
				of, ok := found[name]
				if !ok {
					of = container{path: path[:i], key: e.Key}
				}
				of.valued = of.valued || value
				found[name] = of
			}
		}
	}
	for _, t := range l.Tensors {
		look(t.FQN, t.Path, false)
	}
	for _, v := range l.Values {
		look(v.FQN, v.Path, true)
	}
	keys := map[string]string{}
	for name, of := range found {
		if last := len(of.path) - 1; of.valued || last < 0 || of.path[last] != checkpoint.PathKey("state") || !optimizers[of.path[:last].FQN()] {
			keys[name] = of.key
		}
	}
	return keys
}

type container struct {
	path   checkpoint.Path
	key    string
	valued bool // something below such a key is no tensor
}

var text = regexp.MustCompile(`^(?:-?[0-9][0-9.e+-]*|True|False|None|\(.*\))$`)

// isText reports whether a key is one that Python writes so and that is no string.
func isText(key string) bool {
	if key == "" || (key[0] < '0' || key[0] > '9') && key[0] != '-' && key[0] != '(' && key[0] != 'T' && key[0] != 'F' && key[0] != 'N' {
		return false
	}
	return text.MatchString(key)
}
