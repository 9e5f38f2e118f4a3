// Package projections is a core room that subscribes by itself.
package projections

import _ "github.com/nats-io/nats.go"
