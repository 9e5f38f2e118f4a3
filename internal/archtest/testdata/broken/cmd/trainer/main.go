// Command trainer may import what is below it.
package main

import _ "github.com/ckptstore/ckptstore/cmd/trainer/digits"

func main() {}
