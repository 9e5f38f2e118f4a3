// Package staging knows whom it serves.
package staging

import (
	_ "github.com/ckptstore/ckptstore/planner/plan"
	_ "github.com/ckptstore/ckptstore/worker"
)
