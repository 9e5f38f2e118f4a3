//go:build !testbed

package nodes

import "time"

// skewed returns the time after which this node's clock has counted d: d itself, except
// in the programs of a testbed.
func skewed(d time.Duration) time.Duration { return d }
