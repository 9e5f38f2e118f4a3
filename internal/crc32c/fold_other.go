//go:build !amd64

package crc32c

const wide = false

func fold(uint32, []byte, *[2]uint64) uint32 { panic("crc32c: fold is not to be called here") }
