// Package jetlog may import NATS, and the clock is its own.
package jetlog

import (
	"time"

	_ "github.com/ckptstore/ckptstore/tensor"
	_ "github.com/nats-io/nats.go/jetstream"
)

var start = time.Now()
