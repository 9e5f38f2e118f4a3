package trainer

import (
	"testing"

	"github.com/ckptstore/ckptstore/internal/launch"
)

// Without --max-node-failures, only the preflight excludes, and only a node with a spare. A number
// excludes always, and an explicit 0 never.
func TestExclusion(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		limit int
		given bool
		want  launch.Exclusion
	}{{0, false, launch.ExcludeSpared}, {0, true, launch.ExcludeNever}, {1, true, launch.ExcludeAlways}, {2, true, launch.ExcludeAlways}} {
		if got := exclusion(c.limit, c.given); got != c.want {
			t.Errorf("--max-node-failures %d, given: %v: %v, want %v", c.limit, c.given, got, c.want)
		}
	}
}
