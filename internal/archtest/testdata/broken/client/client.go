// Package client goes into other people's programs.
package client

import (
	_ "net"

	_ "github.com/ckptstore/ckptstore/events"
	_ "github.com/ckptstore/ckptstore/tensor"
	_ "github.com/zeebo/blake3"
)
