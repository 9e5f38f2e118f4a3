//go:build cgo && linux

package gpu

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// system is this machine's NVML. Loading it changes process-wide state that the
// binding does not guard, so all callers share one.
var system = &shared{Interface: nvml.New()}

// shared merges several sessions of a library into one: the first Init starts it
// and the last Shutdown ends it. So the end of a query does not unload the
// library under a running watch.
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

// Shutdown ends a session that Init began successfully.
func (s *shared) Shutdown() nvml.Return {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sessions--; s.sessions > 0 {
		return nvml.SUCCESS
	}
	return s.Interface.Shutdown()
}

// asking limits queries to one at a time: when the driver hangs, one thread hangs
// with it, not one for each caller.
var asking = make(chan struct{}, 1)

// ask runs a query in a session of its own. It returns when ctx ends, even if the
// driver hangs.
func ask[T any](ctx context.Context, lib nvml.Interface, what string, query func(nvml.Interface) (T, error)) (T, error) {
	var none T
	select {
	case asking <- struct{}{}:
	case <-ctx.Done():
		return none, fmt.Errorf("%s: an earlier query still waits for the driver: check whether nvidia-smi answers: %w", what, ctx.Err())
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
		return none, fmt.Errorf("%s: the driver does not answer: check nvidia-smi, and the kernel's log for Xid: %w", what, ctx.Err())
	}
}

// inSession calls do in a session. Any call outside of a successfully begun
// session, Shutdown included, kills the process.
func inSession(lib nvml.Interface, do func() error) (err error) {
	switch ret := lib.Init(); ret {
	case nvml.SUCCESS:
	case nvml.ERROR_LIBRARY_NOT_FOUND, nvml.ERROR_DRIVER_NOT_LOADED:
		return fmt.Errorf("%w (NVML: %v)", ErrNoDriver, name(ret))
	default:
		return fmt.Errorf("start NVML: %v; after a driver update, reboot or reload the kernel modules", name(ret))
	}
	defer func() {
		if ret := lib.Shutdown(); ret != nvml.SUCCESS {
			err = errors.Join(err, fmt.Errorf("end NVML: %v", name(ret)))
		}
	}()
	return do()
}

// symbols returns a test for the functions of a library. A driver older than this
// program lacks some, and calling a missing one kills the process.
func symbols(lib nvml.Interface) func(symbol string) bool {
	known := lib.Extensions()
	return func(symbol string) bool { return known.LookupSymbol(symbol) == nil }
}

// name is the text of ret. Call it while NVML is loaded: the binding asks NVML
// for the text.
func name(ret nvml.Return) string { return ret.Error() }
