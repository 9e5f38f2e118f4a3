package redact

import "strconv"

// Config returns a configuration without secrets. Below a name such as
// credentials nothing is left; below one such as auth, strings and lists go and
// objects are looked into.
func (n Names) Config(config map[string]any) map[string]any {
	if config == nil {
		return nil
	}
	out := make(map[string]any, len(config))
	for name, value := range config {
		out[name] = n.value(value, n.rank(name))
	}
	return out
}

// value redacts a value whose name has a rank.
func (n Names) value(value any, r rank) any {
	switch v := value.(type) {
	case nil, bool:
		return v
	case map[string]any:
		if r == always {
			return Mark
		}
		return n.Config(v)
	case []any:
		if r == always {
			return Mark
		}
		out := make([]any, len(v))
		for i := range v {
			out[i] = n.value(v[i], r)
		}
		return out
	case string:
		if r.hides(v) {
			return Mark
		}
		return n.text(v)
	case float64:
		if r.hides(strconv.FormatFloat(v, 'f', -1, 64)) {
			return Mark
		}
		return v
	}
	if r == always {
		return Mark
	}
	return value
}
