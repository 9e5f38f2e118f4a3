package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

const (
	rawWrite  = 4 << 20 // bytes of one raw write
	rawDepth  = 2       // writes of a file at a time
	sharedDir = "/dev/shm"
)

// sharedMemory returns a shared mapping of an unnamed file, like a slot.
func sharedMemory(size int64) ([]byte, error) {
	f, err := os.CreateTemp(sharedDir, "ckptstore-bench-*")
	if err != nil {
		return nil, fmt.Errorf("stage in shared memory: %w", err)
	}
	err = os.Remove(f.Name())
	if err == nil {
		// Reserved, so that a lack of memory is an error here and not a fault later.
		err = unix.Fallocate(int(f.Fd()), 0, 0, size)
	}
	var data []byte
	if err == nil {
		data, err = unix.Mmap(int(f.Fd()), 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, fmt.Errorf("stage %d bytes in %s: %w; give a smaller --size", size, sharedDir, err)
	}
	return data, nil
}

// close releases the shared memory.
func (s *benchSaver) close() {
	for _, r := range s.ranks {
		_ = unix.Munmap(r.slot) // none of it is needed any more
	}
}

// raw writes each rank's slot to a separate file, all in parallel, and syncs it: the
// speed of the disk without digests, headers and names.
func (s *benchSaver) raw(ctx context.Context) (took time.Duration, direct bool, err error) {
	var cached atomic.Bool
	began := time.Now()
	g, ctx := errgroup.WithContext(ctx)
	for rank, r := range s.ranks {
		g.Go(func() error {
			past, err := rawFile(ctx, filepath.Join(s.dir, fmt.Sprintf("raw%d", rank)), r.slot)
			if !past {
				cached.Store(true)
			}
			return err
		})
	}
	err = g.Wait()
	took = time.Since(began)
	for rank := range s.ranks {
		name := filepath.Join(s.dir, fmt.Sprintf("raw%d", rank))
		if gone := os.Remove(name); !errors.Is(gone, os.ErrNotExist) {
			err = errors.Join(err, gone)
		}
	}
	return took, !cached.Load(), err
}

// rawFile writes data past the page cache, if the filesystem supports that, except for
// its unaligned end.
func rawFile(ctx context.Context, name string, data []byte) (direct bool, err error) {
	const flags = os.O_WRONLY | os.O_CREATE | os.O_TRUNC
	f, err := os.OpenFile(name, flags|syscall.O_DIRECT, 0o600)
	direct = err == nil
	if errors.Is(err, syscall.EINVAL) {
		f, err = os.OpenFile(name, flags, 0o600)
	}
	if err != nil {
		return direct, err
	}
	const block = 4096
	whole := len(data) / block * block
	g, ctx := errgroup.WithContext(ctx)
	for lane := range rawDepth {
		g.Go(func() error {
			for at := lane * rawWrite; at < whole; at += rawDepth * rawWrite {
				if err := ctx.Err(); err != nil {
					return err
				}
				if _, err := f.WriteAt(data[at:min(at+rawWrite, whole)], int64(at)); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err = g.Wait(); err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil || whole == len(data) {
		return direct, err
	}
	if f, err = os.OpenFile(name, os.O_WRONLY, 0); err != nil {
		return direct, err
	}
	_, err = f.WriteAt(data[whole:], int64(whole))
	return direct, errors.Join(err, f.Sync(), f.Close())
}

// raw reads as many bytes as are loaded from the same files into the same memory,
// without checks.
func (l *benchLoader) raw(ctx context.Context, files []string) (time.Duration, error) {
	const piece = 4 << 20
	began := time.Now()
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(runtime.GOMAXPROCS(0) + 2)
	rest := l.memory
	var open []*os.File
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			return 0, errors.Join(err, g.Wait(), closeAll(open))
		}
		open = append(open, f)
		info, err := f.Stat()
		if err != nil {
			return 0, errors.Join(err, g.Wait(), closeAll(open))
		}
		// The header makes the files a little longer than the loaded bytes.
		for at := int64(0); at < info.Size() && len(rest) > 0; at += piece {
			n := min(int64(len(rest)), piece, info.Size()-at)
			into := rest[:n]
			rest = rest[n:]
			g.Go(func() error {
				if err := ctx.Err(); err != nil {
					return err
				}
				_, err := f.ReadAt(into, at)
				return err
			})
		}
	}
	err := errors.Join(g.Wait(), closeAll(open))
	return time.Since(began), err
}

func closeAll(files []*os.File) error {
	var errs []error
	for _, f := range files {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}
