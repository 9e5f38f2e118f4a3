package local

import (
	"errors"
	"fmt"
	"os"
	"runtime/debug"

	"golang.org/x/sys/unix"
)

// Mapped gives bytes of a file as they are in the page cache, without a copy. A
// file that is cut meanwhile, or cannot be read, is an error.
func Mapped(fd uintptr, path string, offset int64, size int, use func(data []byte)) (err error) {
	if size == 0 {
		use(nil)
		return nil
	}
	skip := int(offset % int64(os.Getpagesize()))
	data, err := unix.Mmap(int(fd), offset-int64(skip), size+skip, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("map %d bytes at %d of %s: %w", size, offset, path, err)
	}
	defer func() { err = errors.Join(err, unix.Munmap(data)) }()
	// All at once is faster than page by page. An older kernel cannot, and a file
	// that was cut is found below.
	_ = unix.Madvise(data, unix.MADV_POPULATE_READ)
	if !Readable(func() { use(data[skip:]) }) {
		return fmt.Errorf("read %d bytes at %d of %s: the file was cut, or the disk does not give them", size, offset, path)
	}
	return nil
}

// Readable runs use, which reads mapped memory. It reports false if that memory
// is not there, because its file was cut, or a disk or full shared memory does
// not give it: use has not ended then.
func Readable(use func()) (ok bool) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		switch fault := recover().(type) {
		case nil:
		case interface{ Addr() uintptr }:
			ok = false
		default:
			panic(fault)
		}
	}()
	use()
	return true
}
