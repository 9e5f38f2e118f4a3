package filesystem

import (
	"regexp"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
)

// textKeys returns the containers in which PyTorch's planner has turned keys into
// text that may have been numbers or other values of Python, by name, with one
// such key of each. The root has the empty name. The state of an optimizer with
// only tensors is left out: its groups list the original keys. Python's
// _keys.texts does the same for paths.
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
	valued bool // a value, not a tensor, is below such a key
}

var text = regexp.MustCompile(`^(?:-?[0-9][0-9.e+-]*|True|False|None|\(.*\))$`)

// isText reports whether a key is the Python notation of a value other than a
// string.
func isText(key string) bool {
	if key == "" || (key[0] < '0' || key[0] > '9') && key[0] != '-' && key[0] != '(' && key[0] != 'T' && key[0] != 'F' && key[0] != 'N' {
		return false
	}
	return text.MatchString(key)
}
