//go:build cgo && linux

package gpu

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// system is this machine's NVML. Loading it changes state of the whole process
// that the binding does not guard, so there is one for all.
var system = &shared{Interface: nvml.New()}

// shared is a library in which several sessions are one: the first Init starts
// it and the last Shutdown ends it, so that the end of a query does not take
// the library away from a watch.
type shared struct {
	nvml.Interface

	mu       sync.Mutex
	sessions int
}

// Init begins a session.
func (s *shared) Init() nvml.Return {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sessions == 0 {
		if ret := s.Interface.Init(); ret != nvml.SUCCESS {
			return ret
		}
	}
	s.sessions++
	return nvml.SUCCESS
}

// Shutdown ends a session that began with success.
func (s *shared) Shutdown() nvml.Return {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sessions--; s.sessions > 0 {
		return nvml.SUCCESS
	}
	return s.Interface.Shutdown()
}

// asking holds the one query that may run: when the driver hangs, one thread
// hangs with it and not one for each caller.
var asking = make(chan struct{}, 1)

// ask runs a query in a session of its own. It returns when ctx ends, whatever
// the driver does.
func ask[T any](ctx context.Context, lib nvml.Interface, what string, query func(nvml.Interface) (T, error)) (T, error) {
	var none T
	select {
	case asking <- struct{}{}:
	case <-ctx.Done():
		return none, fmt.Errorf("%s: an earlier query still waits for the driver: see whether nvidia-smi answers: %w", what, ctx.Err())
	}
	type answer struct {
		value T
		err   error
	}
	answers := make(chan answer, 1)
	go func() {
		defer func() { <-asking }()
		var a answer
		a.err = inSession(lib, func() (err error) {
			a.value, err = query(lib)
			return err
		})
		answers <- a
	}()
	select {
	case a := <-answers:
		if a.err != nil {
			return a.value, fmt.Errorf("%s: %w", what, a.err)
		}
		return a.value, nil
	case <-ctx.Done():
		return none, fmt.Errorf("%s: the driver does not answer: see whether nvidia-smi does, and the kernel's log for Xid: %w", what, ctx.Err())
	}
}

// inSession calls do in a session. Any call outside of a session that began
// with success, Shutdown included, kills the process.
func inSession(lib nvml.Interface, do func() error) (err error) {
	switch ret := lib.Init(); ret {
	case nvml.SUCCESS:
	case nvml.ERROR_LIBRARY_NOT_FOUND, nvml.ERROR_DRIVER_NOT_LOADED:
		return fmt.Errorf("%w (NVML: %v)", ErrNoDriver, name(ret))
	default:
		return fmt.Errorf("start NVML: %v: after a driver update, reboot or reload the kernel modules", name(ret))
	}
	defer func() {
		if ret := lib.Shutdown(); ret != nvml.SUCCESS {
			err = errors.Join(err, fmt.Errorf("end NVML: %v", name(ret)))
		}
	}()
	return do()
}

// symbols tells which of a library's functions are there: a driver that is
// older than this program lacks some, and a call of one kills the process.
func symbols(lib nvml.Interface) func(symbol string) bool {
	known := lib.Extensions()
	return func(symbol string) bool { return known.LookupSymbol(symbol) == nil }
}

// name is the text of ret, made while NVML is loaded: the binding asks NVML
// for it.
func name(ret nvml.Return) string { return ret.Error() }
