package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/bytesize"
)

const moreShared = "docker run --shm-size, an emptyDir with medium Memory at /dev/shm in Kubernetes, or mount -o remount,size= /dev/shm"

func (e *examination) memory(ctx context.Context) {
	e.check(ctx, "shm.room", func(context.Context) answer { return sharedRoom(e.Shared) })
	e.check(ctx, "shm.map", func(context.Context) answer { return sharedMap(e.Shared) })
}

func sharedRoom(dir string) answer {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return problem("mount a tmpfs at /dev/shm", "%s: %v", dir, err)
	}
	free, total := st.Bavail*uint64(st.Bsize), st.Blocks*uint64(st.Bsize)
	saw := fmt.Sprintf("%s: %s free of %s", dir, bytesize.Text(free), bytesize.Text(total))
	switch {
	case st.Type != unix.TMPFS_MAGIC && st.Type != unix.RAMFS_MAGIC:
		return warning("mount a tmpfs at /dev/shm", "%s, which is not memory: saves are staged on a disk", saw)
	case free < enoughShared:
		return warning(moreShared, "%s: larger saves cannot be staged", saw)
	}
	return ok("%s", saw)
}

// sharedMap creates, maps and touches a file as staging slots do.
func sharedMap(dir string) answer {
	f, err := os.CreateTemp(dir, probeName)
	if err != nil {
		return problem("check who may write there", "create a file: %v", err)
	}
	const bytes = 1 << 20
	err = errors.Join(os.Remove(f.Name()), f.Truncate(bytes))
	if err == nil {
		err = mapped(f, bytes)
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return problem(moreShared, "map a file of %s: %v", dir, err)
	}
	return ok("a file of %s can be mapped, written and read", dir)
}

func mapped(f *os.File, bytes int) error {
	// Allocate first: touching a page without space would end this process.
	if err := unix.Fallocate(int(f.Fd()), 0, 0, int64(bytes)); err != nil {
		return fmt.Errorf("reserve: %w", err)
	}
	m, err := unix.Mmap(int(f.Fd()), 0, bytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("mmap: %w", err)
	}
	m[bytes-1] = 7
	var last [1]byte
	_, err = f.ReadAt(last[:], int64(bytes)-1)
	if err == nil && last[0] != 7 {
		err = errors.New("data written to the mapping is not in the file")
	}
	return errors.Join(err, unix.Munmap(m))
}
