// Package planner is a core room that reads the clock and the disk.
package planner

import (
	"context"
	clock "time"

	_ "github.com/ckptstore/ckptstore/projections/viewdb"
)

func now() clock.Time {
	return clock.Now()
}

var (
	wait    = clock.Sleep
	timeout = context.WithTimeout
	limit   = 5 * clock.Second
)
