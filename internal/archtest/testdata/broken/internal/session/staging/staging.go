// Package staging knows whom it serves.
package staging

import (
	_ "github.com/ckptstore/ckptstore/internal/checkpoint"
	_ "github.com/ckptstore/ckptstore/internal/launch"
)
