// Package data may import the engine's filesystem, not the engine.
package data

import (
	_ "os"

	_ "github.com/ckptstore/ckptstore/internal/format/safetensors"
	_ "github.com/cockroachdb/pebble/v2/sstable"
	_ "github.com/cockroachdb/pebble/v2/vfs"
	_ "github.com/cockroachdb/pebble/v2/vfs/errorfs"
)
