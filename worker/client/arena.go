package client

import (
	"fmt"
	"os"
	"syscall"
)

// arena is a mapped file in shared memory. The file belongs to the trainer;
// the worker maps it for the time of one copy.
type arena struct{ data []byte }

func mapArena(path string, size int64, write bool) (*arena, error) {
	if size == 0 {
		return &arena{}, nil
	}
	mode, prot := os.O_RDONLY, syscall.PROT_READ
	if write {
		mode, prot = os.O_RDWR, syscall.PROT_READ|syscall.PROT_WRITE
	}
	f, err := os.OpenFile(path, mode, 0)
	if err != nil {
		return nil, fmt.Errorf("open shared memory: %w", err)
	}
	defer func() { _ = f.Close() }()
	data, err := syscall.Mmap(int(f.Fd()), 0, int(size), prot, syscall.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes of %s: %w", size, path, err)
	}
	return &arena{data}, nil
}

func (a *arena) close() error {
	if a.data == nil {
		return nil
	}
	return syscall.Munmap(a.data)
}
