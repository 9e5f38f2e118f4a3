// Command ckptstore is wiring, and borrows from the other command.
package main

import (
	_ "github.com/ckptstore/ckptstore/cmd/trainer/digits"
	_ "github.com/ckptstore/ckptstore/events/jetlog"
	_ "github.com/cockroachdb/pebble/v2/vfs"
)

func main() {}
