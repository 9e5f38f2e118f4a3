package gpu

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Visible returns the devices that a process with this value of
// CUDA_VISIBLE_DEVICES may use, in the order of the value. The value holds
// indices, UUIDs, MIG instances, or unique prefixes of UUIDs. Indices count by
// PCI bus, as [Device.Index] does. An empty value, "-1" and "NoDevFiles" select
// no device, and "-1" after others ends the list, as in CUDA. Each named instance
// is returned as its device with that instance alone.
//
// Visible returns an error for what CUDA would silently drop: an unknown or
// repeated ID, and a device in MIG mode that is named itself.
func Visible(devices []Device, value string) ([]Device, error) {
	var out []Device
	var taken []string
	if value == "" || value == "NoDevFiles" {
		return nil, nil
	}
	for _, id := range strings.Split(value, ",") {
		id = strings.TrimSpace(id)
		if id == "-1" {
			break
		}
		d, unit, err := find(devices, id)
		if err == nil && slices.Contains(taken, unit) {
			err = fmt.Errorf("%q is %s, which is already in the list; name each device once", id, unit)
		}
		if err != nil {
			return nil, fmt.Errorf("CUDA_VISIBLE_DEVICES %q: %w", value, err)
		}
		out, taken = append(out, d), append(taken, unit)
	}
	return out, nil
}

// find returns the device that an ID names, and the UUID of its assignable unit.
func find(devices []Device, id string) (Device, string, error) {
	if err := checkID(id); err != nil {
		return Device{}, "", err
	}
	type match struct {
		device Device
		unit   string
	}
	var matches []match
	for _, d := range devices {
		if strconv.Itoa(d.Index) == id || strings.HasPrefix(id, "GPU-") && strings.HasPrefix(d.UUID, id) {
			matches = append(matches, match{d, d.UUID})
		}
		for _, i := range d.Instances {
			if strings.HasPrefix(id, "MIG-") && strings.HasPrefix(i.UUID, id) {
				one := d
				one.Instances = []Instance{i}
				matches = append(matches, match{one, i.UUID})
			}
		}
	}
	switch {
	case len(matches) == 0:
		return Device{}, "", fmt.Errorf("%q is no device of this machine, which has %s; see nvidia-smi -L", id, names(devices))
	case len(matches) > 1:
		return Device{}, "", fmt.Errorf("%q is a prefix of both %s and %s; write more digits", id, matches[0].unit, matches[1].unit)
	case matches[0].device.MIG && strings.HasPrefix(matches[0].unit, "GPU-"):
		return Device{}, "", fmt.Errorf("%q is a device in MIG mode, which processes cannot use directly; name one of its instances (%s)", id, names([]Device{matches[0].device}))
	}
	return matches[0].device, matches[0].unit, nil
}

func names(devices []Device) string {
	all := units(devices)
	if len(all) == 0 {
		return "none"
	}
	return strings.Join(all, ", ")
}

// units lists what workers can be assigned: devices, and for a device in MIG mode
// its instances.
func units(devices []Device) (ids []string) {
	for _, d := range devices {
		if !d.MIG {
			ids = append(ids, d.UUID)
		}
		for _, i := range d.Instances {
			ids = append(ids, i.UUID)
		}
	}
	return ids
}

// Units returns the number of workers that can have a device to themselves.
func Units(devices []Device) int { return len(units(devices)) }

// Assign gives each worker perWorker devices of its own, by UUID, in the order of
// devices. Left-over devices are not assigned. An instance of a device in MIG
// mode counts as a device. With perWorker 0, no worker gets a device.
//
// Assign returns an error if there are too few devices, or if a worker would get
// more than one instance, since a CUDA process sees at most one.
func Assign(devices []Device, workers, perWorker int) ([][]string, error) {
	if workers < 1 || perWorker < 0 {
		return nil, fmt.Errorf("assign %d GPUs to each of %d workers: give 1 worker or more, and 0 GPUs or more", perWorker, workers)
	}
	if perWorker == 0 {
		return make([][]string, workers), nil
	}
	ids := units(devices)
	// A product could overflow.
	if len(ids)/perWorker < workers {
		return nil, fmt.Errorf("assign %d GPUs to each of %d workers: %d are visible here: start fewer workers, give each fewer (0 leaves the environment as it is), or see whether CUDA_VISIBLE_DEVICES and nvidia-smi -L show all", perWorker, workers, len(ids))
	}
	given := make([][]string, workers)
	for w := range given {
		mine := ids[w*perWorker : (w+1)*perWorker]
		if at := slices.IndexFunc(mine, isInstance); at >= 0 && perWorker > 1 {
			return nil, fmt.Errorf("assign %d GPUs to each of %d workers: %s is a MIG instance and a process sees one at most: give each worker 1", perWorker, workers, mine[at])
		}
		given[w] = slices.Clone(mine)
	}
	return given, nil
}

func isInstance(id string) bool { return strings.HasPrefix(id, "MIG-") }
