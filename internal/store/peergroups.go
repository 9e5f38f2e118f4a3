package store

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// maxGroups is what the kernel allows a process.
const maxGroups = 65536

// peerGroups are the supplementary groups of the process at the other end of a unix
// socket, as they were when it connected.
func peerGroups(fd int) ([]uint32, error) {
	for n := 64; n <= maxGroups; n *= 4 {
		groups := make([]uint32, n)
		size := uint32(4 * n) //nolint:gosec // of at most maxGroups
		_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, unix.SO_PEERGROUPS,
			uintptr(unsafe.Pointer(&groups[0])), uintptr(unsafe.Pointer(&size)), 0) //nolint:gosec // package unix has no call for it
		switch errno {
		case 0:
			return groups[:size/4], nil
		case unix.ERANGE:
			continue
		}
		return nil, fmt.Errorf("groups at the other end of a socket: %w", errno)
	}
	return nil, fmt.Errorf("groups at the other end of a socket: more than %d", maxGroups)
}
