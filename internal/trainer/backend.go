package trainer

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/ckptstore/ckptstore/gpu"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/launch/backend"
)

// backendOptions choose the communication backend and the workers' GPUs.
type backendOptions struct {
	known         *backend.Registry // nil: the built-in ones
	backend       string
	gpusPerWorker string
	shareDevices  bool
	sharing       *bool // the value of --share-devices; nil if not given
}

// deviceTimeout bounds a query of the GPU driver, which may hang.
const deviceTimeout = 30 * time.Second

func (o *backendOptions) flags(f *pflag.FlagSet) {
	f.StringVar(&o.backend, "backend", backend.Torch, "how the workers communicate: "+strings.Join(o.registry().Names(), ", "))
	f.StringVar(&o.gpusPerWorker, "gpus-per-worker", "auto", "GPUs for each worker alone: a number, or auto (GPUs divided by workers); 0 leaves their CUDA_VISIBLE_DEVICES as it is")
	f.BoolVar(&o.shareDevices, "share-devices", false, "let each worker see the GPUs of all, as scripts of torchrun expect; $"+backend.EnvShareDevices+" takes precedence (default: the backend's choice; torch shares)")
}

// registry returns the backends that --backend may name.
func (o *backendOptions) registry() *backend.Registry {
	if o.known == nil {
		return backend.Builtin()
	}
	return o.known
}

// noteSharing records --share-devices if it was given.
func (o *backendOptions) noteSharing(f *pflag.FlagSet) {
	if f.Changed("share-devices") {
		share := o.shareDevices
		o.sharing = &share
	}
}

// machine is the hardware that a job may use.
type machine struct {
	cores   int
	list    func(context.Context) ([]gpu.Device, error)
	visible func() (string, bool) // CUDA_VISIBLE_DEVICES
}

func thisMachine() machine {
	return machine{
		cores: runtime.NumCPU(), list: gpu.List,
		visible: func() (string, bool) { return os.LookupEnv("CUDA_VISIBLE_DEVICES") },
	}
}

// resolve returns the number of workers that --nproc selects, and the devices
// assigned to them. Notes report GPUs that are present but not assigned.
func (o *backendOptions) resolve(ctx context.Context, m machine, nproc string) (workers int, cfg launch.BackendConfig, notes []string, err error) {
	fail := func(err error) (int, launch.BackendConfig, []string, error) {
		return 0, launch.BackendConfig{}, nil, fmt.Errorf("%w: %w", launch.ErrConfig, err)
	}
	if _, err := o.registry().Lookup(o.backend); err != nil {
		return fail(fmt.Errorf("--backend: %w", err))
	}
	each := -1 // auto
	if o.gpusPerWorker != "auto" {
		if each, err = strconv.Atoi(o.gpusPerWorker); err != nil || each < 0 {
			return fail(fmt.Errorf("--gpus-per-worker %s: give a number of 0 or more, or auto", o.gpusPerWorker))
		}
	}
	if cfg.ShareDevices, err = backend.Sharing(o.sharing, os.Getenv(backend.EnvShareDevices)); err != nil {
		return fail(err)
	}
	switch nproc {
	case "cpu":
		workers = m.cores
	case "gpu", "auto":
	default:
		if workers, err = strconv.Atoi(nproc); err != nil || workers < 1 {
			return fail(fmt.Errorf("--nproc %s: give a number of 1 or more, gpu, cpu or auto", nproc))
		}
		if each == 0 {
			return workers, cfg, nil, nil // no GPUs requested
		}
	}
	devices, problem := m.devices(ctx)
	units := gpu.Units(devices)
	must := nproc == "gpu" || each > 0
	switch {
	case units == 0 && must && problem == nil:
		return fail(fmt.Errorf("%s: no GPU found, or CUDA_VISIBLE_DEVICES hides them; use --nproc N and --gpus-per-worker 0", o.asks(nproc, each)))
	case must && problem != nil && (units == 0 || each > 0):
		return fail(fmt.Errorf("%s: %w; use --nproc N and --gpus-per-worker 0", o.asks(nproc, each), problem))
	case problem != nil && !errors.Is(problem, gpu.ErrNoDriver) && !errors.Is(problem, gpu.ErrNotBuilt):
		notes = append(notes, fmt.Sprintf("not all GPUs can be used: %v", problem))
	}
	per := max(each, 1)
	switch {
	case workers > 0:
	case units > 0:
		if workers = units / per; workers == 0 {
			return fail(fmt.Errorf("--gpus-per-worker %d: %d GPUs are visible here; give fewer", each, units))
		}
	default:
		workers = m.cores
	}
	cfg.Devices, cfg.GPUsPerWorker = devices, each
	if each < 0 {
		cfg.GPUsPerWorker = units / workers
		if anyInstance(devices) {
			cfg.GPUsPerWorker = min(cfg.GPUsPerWorker, 1)
		}
		if units > 0 && cfg.GPUsPerWorker == 0 {
			notes = append(notes, fmt.Sprintf("%d workers have %d GPUs: none is assigned, and CUDA_VISIBLE_DEVICES is left as it is", workers, units))
		}
	}
	if _, err := gpu.Assign(cfg.Devices, workers, cfg.GPUsPerWorker); err != nil {
		return fail(fmt.Errorf("--gpus-per-worker: %w", err))
	}
	return workers, cfg, notes, nil
}

func (o *backendOptions) asks(nproc string, each int) string {
	if each > 0 {
		return fmt.Sprint("--gpus-per-worker ", each)
	}
	return "--nproc " + nproc
}

func anyInstance(devices []gpu.Device) bool {
	for _, d := range devices {
		if d.MIG {
			return true
		}
	}
	return false
}

// devices returns the devices that answer and that an outer CUDA_VISIBLE_DEVICES
// allows.
func (m machine) devices(ctx context.Context) ([]gpu.Device, error) {
	ctx, cancel := context.WithTimeout(ctx, deviceTimeout)
	defer cancel()
	devices, problem := m.list(ctx)
	if len(devices) == 0 {
		return nil, problem
	}
	if value, set := m.visible(); set {
		visible, err := gpu.Visible(devices, value)
		if err != nil {
			return nil, err
		}
		devices = visible
	}
	return devices, problem
}
