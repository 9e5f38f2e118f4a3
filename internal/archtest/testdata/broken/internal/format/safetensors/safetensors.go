// Package safetensors is a codec that opens files.
package safetensors

import (
	_ "os"

	_ "github.com/cockroachdb/pebble/v2/vfs"
)
