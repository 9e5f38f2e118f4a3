package tensor

import _ "github.com/nats-io/nats.go"
