package main

import (
	"fmt"
	"log/slog"

	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/session/shm"
	"github.com/ckptstore/ckptstore/internal/session/staging"
)

// staging checks what is said of the staging slots.
func (o runOptions) staging() (memory staging.Memory, err error) {
	if o.stagingSlots < 1 || o.stagingSlots > 16 {
		return memory, fmt.Errorf("%w: --staging-slots %d: give a number from 1 to 16", launch.ErrConfig, o.stagingSlots)
	}
	switch staging.WhenBusy(o.whenBusy) {
	case staging.BusyWait, staging.BusySkip, staging.BusyFail:
	default:
		return memory, fmt.Errorf("%w: --when-busy %s: give wait, skip or fail", launch.ErrConfig, o.whenBusy)
	}
	if o.stagingMemory == "" {
		return memory, nil
	}
	if memory, err = staging.ParseMemory(o.stagingMemory); err != nil {
		return memory, fmt.Errorf("%w: --staging-memory: %w", launch.ErrConfig, err)
	}
	return memory, nil
}

// sharedMemory is where staging slots live.
func sharedMemory(log *slog.Logger) string {
	dir, memory := shm.Dir()
	if !memory {
		log.Warn("no /dev/shm on this machine: staging goes to files on disk, which is slower", "dir", dir)
	}
	return dir
}
