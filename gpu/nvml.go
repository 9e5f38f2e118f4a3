//go:build cgo && linux

package gpu

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// asking holds the one query that may run: loading NVML changes state of the
// whole process that the binding does not guard.
var asking = make(chan struct{}, 1)

// List is the devices of this machine by index, empty when the driver is there
// but no device. Devices that do not answer, such as one that fell off the
// bus, are left out and named in the error, which comes with the devices that
// do. [ErrNoDriver] when there is no driver.
//
// The driver may hang in a call that nothing can end. List then returns when
// ctx ends, and later calls wait behind that one until their ctx ends. Safe
// for concurrent use.
func List(ctx context.Context) ([]Device, error) {
	return list(ctx, nvml.New())
}

func list(ctx context.Context, lib nvml.Interface) ([]Device, error) {
	select {
	case asking <- struct{}{}:
	case <-ctx.Done():
		return nil, fmt.Errorf("list GPUs: an earlier query still waits for the driver: see whether nvidia-smi answers: %w", ctx.Err())
	}
	type answer struct {
		devices []Device
		err     error
	}
	answers := make(chan answer, 1)
	go func() {
		defer func() { <-asking }()
		devices, err := query(lib)
		answers <- answer{devices, err}
	}()
	select {
	case a := <-answers:
		if a.err != nil {
			return a.devices, fmt.Errorf("list GPUs: %w", a.err)
		}
		return a.devices, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("list GPUs: the driver does not answer: see whether nvidia-smi does, and the kernel's log for Xid: %w", ctx.Err())
	}
}

// query asks for everything in one session. Any call outside of a session that
// began with success, Shutdown included, kills the process.
func query(lib nvml.Interface) (devices []Device, err error) {
	switch ret := lib.Init(); ret {
	case nvml.SUCCESS:
	case nvml.ERROR_LIBRARY_NOT_FOUND, nvml.ERROR_DRIVER_NOT_LOADED:
		return nil, fmt.Errorf("%w (NVML: %v)", ErrNoDriver, name(ret))
	default:
		return nil, fmt.Errorf("start NVML: %v: after a driver update, reboot or reload the kernel modules", name(ret))
	}
	defer func() {
		if ret := lib.Shutdown(); ret != nvml.SUCCESS {
			err = errors.Join(err, fmt.Errorf("end NVML: %v", name(ret)))
		}
	}()
	count, ret := lib.DeviceGetCount()
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("count devices: %v", name(ret))
	}
	partitions := lib.Extensions().LookupSymbol("nvmlDeviceGetMigMode") == nil
	for index := range count {
		device, problem := describe(lib, index, partitions)
		if problem != nil {
			err = errors.Join(err, fmt.Errorf("device %d: %w: see the kernel's log for Xid, then reset or replace it", index, problem))
			continue
		}
		devices = append(devices, device)
	}
	slices.SortFunc(devices, func(a, b Device) int { return cmp.Compare(a.Index, b.Index) })
	return devices, err
}

func describe(lib nvml.Interface, index int, partitions bool) (Device, error) {
	handle, ret := lib.DeviceGetHandleByIndex(index)
	if ret != nvml.SUCCESS {
		return Device{}, fmt.Errorf("find: %v", name(ret))
	}
	uuid, title, memory, err := identify(handle)
	if err != nil {
		return Device{}, err
	}
	d := Device{UUID: uuid, Index: index, Name: title, MemoryBytes: memory}
	if !partitions {
		return d, nil
	}
	mode, _, ret := handle.GetMigMode()
	if ret == nvml.ERROR_NOT_SUPPORTED || ret == nvml.SUCCESS && mode != nvml.DEVICE_MIG_ENABLE {
		return d, nil
	}
	if ret != nvml.SUCCESS {
		return Device{}, fmt.Errorf("read MIG mode of %s: %v", uuid, name(ret))
	}
	d.MIG = true
	d.Instances, err = instances(handle)
	if err != nil {
		return Device{}, fmt.Errorf("MIG instances of %s: %w", uuid, err)
	}
	return d, nil
}

// instances are the MIG instances of a device, by UUID. Not every place for
// one is taken.
func instances(device nvml.Device) ([]Instance, error) {
	places, ret := device.GetMaxMigDeviceCount()
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("count: %v", name(ret))
	}
	var all []Instance
	for place := range places {
		handle, ret := device.GetMigDeviceHandleByIndex(place)
		if ret == nvml.ERROR_NOT_FOUND || ret == nvml.ERROR_INVALID_ARGUMENT {
			continue
		}
		if ret != nvml.SUCCESS {
			return nil, fmt.Errorf("find instance %d: %v", place, name(ret))
		}
		uuid, title, memory, err := identify(handle)
		if err != nil {
			return nil, fmt.Errorf("instance %d: %w", place, err)
		}
		all = append(all, Instance{UUID: uuid, Name: title, MemoryBytes: memory})
	}
	slices.SortFunc(all, func(a, b Instance) int { return cmp.Compare(a.UUID, b.UUID) })
	return all, nil
}

// identify reads what devices and instances both have.
func identify(handle nvml.Device) (uuid, title string, memory uint64, err error) {
	uuid, ret := handle.GetUUID()
	if ret != nvml.SUCCESS {
		return "", "", 0, fmt.Errorf("read UUID: %v", name(ret))
	}
	title, ret = handle.GetName()
	if ret != nvml.SUCCESS {
		return "", "", 0, fmt.Errorf("read name of %s: %v", uuid, name(ret))
	}
	info, ret := handle.GetMemoryInfo()
	if ret == nvml.ERROR_NOT_SUPPORTED {
		return uuid, title, 0, nil
	}
	if ret != nvml.SUCCESS {
		return "", "", 0, fmt.Errorf("read memory of %s: %v", uuid, name(ret))
	}
	return uuid, title, info.Total, nil
}

// name is the text of ret, made while NVML is loaded: the binding asks NVML
// for it.
func name(ret nvml.Return) string { return ret.Error() }
