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

// List returns the devices of this machine by index. The list is empty if the
// driver is installed but finds no device. Devices that do not answer, such as
// a device that fell off the bus, are left out and named in the error, which comes
// with the other devices. It returns [ErrNoDriver] if there is no driver.
//
// The driver may hang in a call that cannot be cancelled. List then returns when
// ctx ends, and later calls wait for that call until their own ctx ends. List is
// safe for concurrent use.
func List(ctx context.Context) ([]Device, error) { return list(ctx, system) }

func list(ctx context.Context, lib nvml.Interface) ([]Device, error) {
	return ask(ctx, lib, "list GPUs", query)
}

// query asks for everything in the session that its caller has begun.
func query(lib nvml.Interface) (devices []Device, err error) {
	count, ret := lib.DeviceGetCount()
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("count devices: %v", name(ret))
	}
	partitions := symbols(lib)("nvmlDeviceGetMigMode")
	for index := range count {
		device, problem := describe(lib, index, partitions)
		if problem != nil {
			err = errors.Join(err, fmt.Errorf("device %d: %w; see the kernel's log for Xid, then reset or replace it", index, problem))
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

// instances lists the MIG instances of a device, by UUID. Some places may be
// empty.
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

// identify reads the properties that devices and instances share.
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
