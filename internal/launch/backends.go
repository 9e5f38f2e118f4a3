package launch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/gpu"
	"github.com/ckptstore/ckptstore/internal/launch/backend"
	"github.com/ckptstore/ckptstore/internal/launch/process"
)

// BackendConfig configures the communication backend and the workers' devices.
type BackendConfig struct {
	Backends *backend.Registry // default: the built-in ones
	// InitHook runs for each group before devices are shared and OnStart is called.
	InitHook    func(context.Context, *backend.Group) error
	HookTimeout time.Duration // of each hook; default 1 min

	// Devices are the GPUs that the job may use; each worker gets GPUsPerWorker
	// of them for itself. With 0, no worker is assigned a device, and the workers
	// inherit the trainer's GPU environment.
	Devices       []gpu.Device
	GPUsPerWorker int
	// ShareDevices is whether workers see each other's devices; nil leaves the
	// choice to the backend.
	ShareDevices *bool
}

// hooks holds a job's backend and the devices assigned to its workers.
type hooks struct {
	exec  *backend.Executor
	node  string     // name of this machine
	given [][]string // devices by local rank
}

// newHooks looks up the backend and assigns the devices, which it adds to cfg.
func newHooks(cfg *Config) (*hooks, error) {
	registry := cfg.Backends
	if registry == nil {
		registry = backend.Builtin()
	}
	chosen, err := registry.Lookup(cfg.Backend)
	if err != nil {
		return nil, fmt.Errorf("%w: --backend: %w", ErrConfig, err)
	}
	given, err := gpu.Assign(cfg.Devices, len(cfg.Local()), cfg.GPUsPerWorker)
	if err != nil {
		return nil, fmt.Errorf("%w: --gpus-per-worker: %w", ErrConfig, err)
	}
	h := &hooks{given: make([][]string, len(cfg.Local()))}
	if h.node, err = os.Hostname(); err != nil {
		return nil, fmt.Errorf("hostname: %w", err)
	}
	for _, w := range backend.Arrange(h.workers(given)) {
		h.given[w.Rank] = w.Devices
	}
	for _, ids := range h.given {
		cfg.DeviceIDs = append(cfg.DeviceIDs, ids...)
	}
	_, ordered := os.LookupEnv("CUDA_DEVICE_ORDER")
	h.exec = backend.NewExecutor(cfg.Backend, chosen.Backend(), backend.Options{
		Init: cfg.InitHook, Share: cfg.ShareDevices, Ordered: ordered && !slices.Contains(cfg.Withheld, "CUDA_DEVICE_ORDER"),
		Timeout: cfg.HookTimeout, Log: cfg.Logger,
	})
	share, err := h.exec.Shares()
	if err != nil {
		return nil, fmt.Errorf("%w: --backend: %w", ErrConfig, err)
	}
	if share {
		if _, err := gpu.ShareVisible(h.workers(h.given)); err != nil {
			return nil, fmt.Errorf("%w: %w; give --share-devices=false, and each worker's device becomes number 0", ErrConfig, err)
		}
	}
	return h, nil
}

// workers lists this node's workers with their assigned devices.
func (h *hooks) workers(given [][]string) (workers []gpu.Worker) {
	for _, ids := range given {
		workers = append(workers, gpu.Worker{Node: h.node, Devices: ids})
	}
	return workers
}

// place completes the placement of a rank for the log.
func (h *hooks) place(p events.RankPlacement) events.RankPlacement {
	if h != nil {
		p.Devices = h.given[p.LocalRank]
	}
	return p
}

// backendHooks is a backend's part in one attempt; nil if there is no backend.
type backendHooks struct {
	exec    *backend.Executor
	members *backend.Group
	ctx     context.Context // of the start hooks: ends when a worker dies
	end     context.CancelCauseFunc
	begun   chan struct{} // closed when training has started; nil: hellos are not held
}

// hookError is a failure of the group before its processes start.
type hookError struct{ error }

// Unwrap returns the hook's error.
func (e hookError) Unwrap() error { return e.error }

// enlist registers the workers with the backend, before their processes start:
// the backend may set their environment.
func (w *watch) enlist(ctx context.Context) error {
	if w.hooks == nil {
		return nil
	}
	e := &backendHooks{exec: w.hooks.exec, members: &backend.Group{
		Run: w.cfg.Run, Trial: w.cfg.Trial, Job: w.cfg.Job, Attempt: w.group.Number,
		MasterAddr: w.cfg.Torch.masterAddr(), MasterPort: w.port.port, Workers: backend.Arrange(w.hooks.workers(w.hooks.given)),
	}}
	e.ctx, e.end = context.WithCancelCause(ctx)
	w.backendHooks = e
	holds, err := e.exec.HoldsHello()
	if err != nil {
		return hookError{err}
	}
	if holds {
		e.begun = make(chan struct{})
	}
	if err := e.exec.Start(e.ctx, e.members); err != nil {
		return hookError{err}
	}
	return nil
}

// env returns the variables that the backend has set for a local rank.
func (e *backendHooks) env(local int) map[string]string {
	if e == nil {
		return nil
	}
	return e.members.Workers[local].Env
}

// died ends the start hooks when a worker has failed.
func (e *backendHooks) died(x process.Exit) {
	if e != nil && x.Failed() {
		e.end(errors.New(x.String()))
	}
}

// trains is called when all workers have sent hello. It returns true if training
// has started. It returns false if a worker died meanwhile; the worker's end is
// then about to be reported.
func (e *backendHooks) trains() (bool, error) {
	if e == nil {
		return true, nil
	}
	err := e.exec.TrainingStart(e.ctx)
	if e.ctx.Err() != nil {
		return false, nil
	}
	if err == nil && e.begun != nil {
		close(e.begun)
	}
	return err == nil, err
}

// failed ends the backend's part without OnShutdown.
func (e *backendHooks) failed() {
	if e != nil {
		e.exec.Abort()
	}
}

// observe passes the cause of a group's failure to a backend that observes
// failures.
func (e *backendHooks) observe(work context.Context, cause *FailedError, limit time.Duration) {
	if e == nil || cause == nil {
		return
	}
	ctx, cancel := context.WithTimeout(work, limit)
	defer cancel()
	e.exec.Failed(ctx, errors.New(cause.Cause))
}

// shutDown ends the backend's part gracefully, unless it has ended.
func (e *backendHooks) shutDown(work context.Context, limit time.Duration) {
	if e == nil {
		return
	}
	ctx, cancel := context.WithTimeout(work, limit)
	defer cancel()
	e.exec.Shutdown(ctx)
}

// over ends the backend's remaining part.
func (e *backendHooks) over() {
	if e != nil {
		e.exec.End()
		e.end(errors.New("the attempt is over"))
	}
}

// Begun implements [session.Hooks]: it holds hellos back if the backend requires
// that.
func (w *watch) Begun() <-chan struct{} {
	if w.backendHooks == nil {
		return nil
	}
	return w.begun
}

// Fetch implements [session.Hooks].
func (w *watch) Fetch(metrics map[string]any) (map[string]any, error) {
	if w.backendHooks == nil {
		return metrics, nil
	}
	return w.exec.Fetch(metrics)
}
