package session

import (
	"math"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
)

// parsePath is the path of an item in its state dict; nil is that of the FQN.
func parsePath(fqn string, keys []any) (checkpoint.Path, error) {
	if len(keys) == 0 {
		return nil, nil
	}
	path := make(checkpoint.Path, len(keys))
	for i, key := range keys {
		switch key := key.(type) {
		case string:
			path[i] = checkpoint.Key(key)
		case float64:
			if key != math.Trunc(key) || math.Abs(key) > math.MaxInt32 {
				return nil, badRequest("%q has a path with the index %v: give keys as strings and indexes as integers", fqn, key)
			}
			path[i] = checkpoint.Index(int(key))
		case map[string]any:
			literal, ok := key["literal"].(string)
			if !ok || len(key) != 1 {
				return nil, badRequest("%q has a path with %v: give keys that are no strings as {\"literal\": \"3\"}", fqn, key)
			}
			path[i] = checkpoint.Literal(literal)
		default:
			return nil, badRequest("%q has a path with %v: give keys as strings and indexes as integers", fqn, key)
		}
	}
	if path.Plain(fqn) {
		return nil, nil // equal plans encode equally
	}
	if err := path.Validate(fqn); err != nil {
		return nil, badRequest("%w", err)
	}
	return path, nil
}
