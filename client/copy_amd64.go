//go:build amd64 && !race

package client

import "unsafe"

//go:noescape
func stream(to, from *byte, n uintptr)

const (
	line       = 64       // bytes per iteration of stream
	streamFrom = 32 << 10 // bytes of the smallest copy that is streamed
	streamStep = 1 << 20  // bytes per call, which the scheduler cannot preempt
)

// copyOut copies like copy, but bypasses the caches, for memory that this process
// does not read again. An ordinary copy reads each line of the slot before it
// overwrites it: with two ranks on two cores, it copied tensors of 286 kB at
// 15.4 GB/s, and copyOut at 21.5 GB/s. Go's own copy does the same from 1 MiB on.
func copyOut(to, from []byte) {
	n := min(len(to), len(from))
	to, from = to[:n], from[:n]
	if n < streamFrom {
		copy(to, from)
		return
	}
	head := int(-uintptr(unsafe.Pointer(unsafe.SliceData(to))) % line)
	copy(to[:head], from)
	to, from = to[head:], from[head:]
	for len(to) >= line {
		step := min(len(to), streamStep) / line * line
		stream(&to[0], &from[0], uintptr(step))
		to, from = to[step:], from[step:]
	}
	copy(to, from)
}
