//go:build ignore

package main

import _ "github.com/nats-io/nats.go"

func Undocumented() {}
