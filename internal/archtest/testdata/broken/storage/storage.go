// Package storage may import the engine's filesystem, not the engine.
package storage

import (
	_ "os"

	_ "github.com/ckptstore/ckptstore/storage/safetensors"
	_ "github.com/cockroachdb/pebble/v2/sstable"
	_ "github.com/cockroachdb/pebble/v2/vfs"
	_ "github.com/cockroachdb/pebble/v2/vfs/errorfs"
)
