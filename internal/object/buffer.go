package object

import (
	"fmt"
	"unsafe"
)

// Align is the number of bytes of which offset, length and address of a write
// are best multiples: a page, which is also what disks ask of writes that go
// past the page cache.
const Align = 4096

// Buffer is memory of size bytes that begins at a multiple of [Align].
func Buffer(size int) []byte {
	b := make([]byte, size+Align)
	at := 0
	if over := address(b) % Align; over != 0 {
		at = Align - int(over)
	}
	return b[at : at+size : at+size]
}

// Aligned reports whether p begins at a multiple of [Align], and is written to
// one.
func Aligned(p []byte, off int64) bool {
	return len(p) > 0 && off%Align == 0 && address(p)%Align == 0
}

// address is where p lies. The collector does not move what it is asked of.
func address(p []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(p))) }

func quote(name string) string { return fmt.Sprintf("%.200q", name) }
