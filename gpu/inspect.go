//go:build cgo && linux

package gpu

import (
	"context"
	"fmt"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// Inspect takes inventory of this machine: its devices, their condition, and the
// links between them. Devices that do not answer are included, as lost. It
// returns [ErrNoDriver] if there is no driver. Like [List], it returns when ctx
// ends, even if the driver hangs, and is safe for concurrent use.
func Inspect(ctx context.Context) (Inventory, error) { return inspect(ctx, system) }

func inspect(ctx context.Context, lib nvml.Interface) (Inventory, error) {
	return ask(ctx, lib, "inspect GPUs", func(lib nvml.Interface) (i Inventory, err error) {
		handles, err := i.look(lib)
		if err == nil {
			i.link(lib, handles)
		}
		return i, err
	})
}

// look fills in the devices and returns their handles, nil for a lost device.
func (i *Inventory) look(lib nvml.Interface) ([]nvml.Device, error) {
	has := symbols(lib)
	driver, ret := lib.SystemGetDriverVersion()
	if ret == nvml.SUCCESS {
		i.Driver = driver
	} else {
		i.Unread = append(i.Unread, "driver version: "+name(ret))
	}
	if has("nvmlSystemGetCudaDriverVersion") {
		version, ret := lib.SystemGetCudaDriverVersion()
		if ret == nvml.SUCCESS {
			i.CUDA = fmt.Sprintf("%d.%d", version/1000, version%1000/10)
		} else {
			i.Unread = append(i.Unread, "CUDA version: "+name(ret))
		}
	}
	count, ret := lib.DeviceGetCount()
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("count devices: %v", name(ret))
	}
	var handles []nvml.Device
	for index := range count {
		s, handle := examine(lib, index, has)
		i.Devices = append(i.Devices, s)
		handles = append(handles, handle)
	}
	return handles, nil
}

// examine reads all that one device reports about itself.
func examine(lib nvml.Interface, index int, has func(string) bool) (Status, nvml.Device) {
	device, err := describe(lib, index, has("nvmlDeviceGetMigMode"))
	handle, ret := lib.DeviceGetHandleByIndex(index)
	if err == nil && ret != nvml.SUCCESS {
		err = fmt.Errorf("find: %v", name(ret))
	}
	if err != nil {
		s := Status{Device: Device{Index: index}, Lost: err.Error()}
		if ret == nvml.SUCCESS {
			if uuid, ret := handle.GetUUID(); ret == nvml.SUCCESS {
				s.UUID = uuid
			}
		}
		return s, nil
	}
	s := Status{Device: device}
	s.measure(handle, has)
	if s.Lost != "" {
		return s, nil
	}
	return s, handle
}

func (s *Status) measure(handle nvml.Device, has func(string) bool) {
	r := reader{s, has}
	s.UsedBytes = reading(r, "memory", "nvmlDeviceGetMemoryInfo", func() (uint64, nvml.Return) {
		info, ret := handle.GetMemoryInfo()
		return info.Used, ret
	})
	s.ECC = reading(r, "ECC errors", "nvmlDeviceGetTotalEccErrors", func() (uint64, nvml.Return) {
		return handle.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.VOLATILE_ECC)
	})
	s.Rows = reading(r, "remapped rows", "nvmlDeviceGetRemappedRows", func() (Rows, nvml.Return) {
		correctable, uncorrectable, pending, failed, ret := handle.GetRemappedRows()
		return Rows{correctable, uncorrectable, pending, failed}, ret
	})
	s.Celsius = reading(r, "temperature", "nvmlDeviceGetTemperature", func() (uint32, nvml.Return) {
		return handle.GetTemperature(nvml.TEMPERATURE_GPU)
	})
	s.SlowAtCelsius = reading(r, "temperature of slowdown", "nvmlDeviceGetTemperatureThreshold", func() (uint32, nvml.Return) {
		return handle.GetTemperatureThreshold(nvml.TEMPERATURE_THRESHOLD_SLOWDOWN)
	})
	s.Milliwatts = reading(r, "power", "nvmlDeviceGetPowerUsage", handle.GetPowerUsage)
	if !s.MIG {
		s.Utilization = reading(r, "utilization", "nvmlDeviceGetUtilizationRates", func() (uint32, nvml.Return) {
			rates, ret := handle.GetUtilizationRates()
			return rates.Gpu, ret
		})
	}
	s.NVLinks = reading(r, "NVLink state", "nvmlDeviceGetNvLinkState", func() (int, nvml.Return) { return activeLinks(handle) })
	if all := reading(r, "processes", computing, func() ([]Process, nvml.Return) { return processesOf(handle) }); all != nil {
		s.Processes = *all
	}
}

// computing is the oldest of the functions that list processes. The binding uses
// the newest one available.
const computing = "nvmlDeviceGetComputeRunningProcesses"

// reader records the values that a device failed to return.
type reader struct {
	of  *Status
	has func(symbol string) bool
}

// reading returns the result of an NVML call. It returns nil if the device or the
// driver does not support the call, or the device no longer answers.
func reading[T any](r reader, what, symbol string, read func() (T, nvml.Return)) *T {
	if r.of.Lost != "" || !r.has(symbol) {
		return nil
	}
	value, ret := read()
	switch ret {
	case nvml.SUCCESS:
		return &value
	case nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_FUNCTION_NOT_FOUND:
	case nvml.ERROR_GPU_IS_LOST, nvml.ERROR_RESET_REQUIRED:
		r.of.Lost = fmt.Sprintf("read %s: %s", what, name(ret))
	default:
		r.of.Unread = append(r.of.Unread, fmt.Sprintf("%s (%s)", what, name(ret)))
	}
	return nil
}

// activeLinks counts the NVLinks of a device that are up. A device without
// NVLinks does not support the query. A device with fewer links than the maximum
// rejects the higher numbers.
func activeLinks(handle nvml.Device) (active int, _ nvml.Return) {
	for link := range nvml.NVLINK_MAX_LINKS {
		state, ret := handle.GetNvLinkState(link)
		switch {
		case ret == nvml.SUCCESS:
			if state == nvml.FEATURE_ENABLED {
				active++
			}
		case link > 0 && (ret == nvml.ERROR_INVALID_ARGUMENT || ret == nvml.ERROR_NOT_SUPPORTED):
			return active, nvml.SUCCESS
		default:
			return 0, ret
		}
	}
	return active, nvml.SUCCESS
}

// processesOf lists the compute processes on a device. A process on several MIG
// instances is listed once.
func processesOf(handle nvml.Device) ([]Process, nvml.Return) {
	infos, ret := handle.GetComputeRunningProcesses()
	all := []Process{}
	for _, info := range infos {
		p := Process{PID: int(info.Pid)}
		if notAvailable := nvml.VALUE_NOT_AVAILABLE; info.UsedGpuMemory != uint64(notAvailable) {
			p.Bytes = &info.UsedGpuMemory
		}
		at := slices.IndexFunc(all, func(q Process) bool { return q.PID == p.PID })
		switch {
		case at < 0:
			all = append(all, p)
		case all[at].Bytes == nil || p.Bytes == nil:
			all[at].Bytes = nil
		default:
			sum := *all[at].Bytes + *p.Bytes
			all[at].Bytes = &sum
		}
	}
	return all, ret
}

// levels maps NVML's numbers.
var levels = map[nvml.GpuTopologyLevel]Level{
	nvml.TOPOLOGY_INTERNAL: SameBoard, nvml.TOPOLOGY_SINGLE: OneSwitch, nvml.TOPOLOGY_MULTIPLE: Switches,
	nvml.TOPOLOGY_HOSTBRIDGE: HostBridge, nvml.TOPOLOGY_NODE: NUMANode, nvml.TOPOLOGY_SYSTEM: AcrossNodes,
}

// link fills in the distance between devices.
func (i *Inventory) link(lib nvml.Interface, handles []nvml.Device) {
	if !symbols(lib)("nvmlDeviceGetTopologyCommonAncestor") {
		return
	}
	for a, from := range handles {
		for b := a + 1; b < len(handles); b++ {
			if from == nil || handles[b] == nil {
				continue
			}
			pair := Link{A: i.Devices[a].UUID, B: i.Devices[b].UUID}
			number, ret := from.GetTopologyCommonAncestor(handles[b])
			switch {
			case ret == nvml.ERROR_NOT_SUPPORTED:
				continue
			case ret != nvml.SUCCESS:
				i.Unread = append(i.Unread, fmt.Sprintf("topology of devices %d and %d: %s", a, b, name(ret)))
				continue
			}
			pair.Level = Unknown
			if level, ok := levels[number]; ok {
				pair.Level = level
			}
			i.Links = append(i.Links, pair)
		}
	}
}

// systemHolders finds holders on this machine: see [System.HoldersOf].
func systemHolders(ctx context.Context, pids ...int) ([]Holder, error) {
	return holdersOf(ctx, system, pids)
}

func holdersOf(ctx context.Context, lib nvml.Interface, pids []int) ([]Holder, error) {
	return ask(ctx, lib, "find holders of GPU memory", func(lib nvml.Interface) ([]Holder, error) {
		count, ret := lib.DeviceGetCount()
		if ret != nvml.SUCCESS {
			return nil, fmt.Errorf("count devices: %v", name(ret))
		}
		if count > 0 && !symbols(lib)(computing) {
			return nil, fmt.Errorf("this driver has no %s; update it", computing)
		}
		var all []Holder
		for index := range count {
			held, err := holdersAt(lib, index)
			if err != nil {
				return nil, fmt.Errorf("device %d: %w; check whether nvidia-smi lists its processes", index, err)
			}
			for _, h := range held {
				if slices.Contains(pids, h.PID) {
					all = append(all, h)
				}
			}
		}
		return all, nil
	})
}

func holdersAt(lib nvml.Interface, index int) ([]Holder, error) {
	handle, ret := lib.DeviceGetHandleByIndex(index)
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("find: %v", name(ret))
	}
	uuid, ret := handle.GetUUID()
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("read UUID: %v", name(ret))
	}
	processes, ret := processesOf(handle)
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("list processes of %s: %v", uuid, name(ret))
	}
	var all []Holder
	for _, p := range processes {
		all = append(all, Holder{uuid, p.PID, p.Bytes})
	}
	return all, nil
}
