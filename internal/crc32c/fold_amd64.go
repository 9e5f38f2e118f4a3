package crc32c

import "golang.org/x/sys/cpu"

var wide = cpu.X86.HasAVX512F && cpu.X86.HasAVX512VPCLMULQDQ && cpu.X86.HasSSE42

// fold is the state of a CRC after p, whose length is a multiple of stride and not 0.
//
//go:noescape
func fold(crc uint32, p []byte, k *[2]uint64) uint32
