// Package viewdb may import the engine and its filesystem.
package viewdb

import (
	_ "github.com/cockroachdb/pebble/v2"
	_ "github.com/cockroachdb/pebble/v2/vfs"
)
