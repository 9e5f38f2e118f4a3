package gpu

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Visible is which of devices a process may use that has value as its
// CUDA_VISIBLE_DEVICES, in the order of value: indices, UUIDs or instances, or
// the beginning of a UUID that no other begins with. Indices count by PCI bus,
// as [Device.Index] does. An empty value, "-1" and "NoDevFiles" are none, and
// "-1" after others ends the list, as in CUDA. Each instance that is named comes
// as its device with that instance alone.
//
// What CUDA would drop without a word is an error: an ID that is not there or
// stands twice, and a device in MIG mode that is named itself.
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
			err = fmt.Errorf("%q is %s, which is there already: name each device once", id, unit)
		}
		if err != nil {
			return nil, fmt.Errorf("CUDA_VISIBLE_DEVICES %q: %w", value, err)
		}
		out, taken = append(out, d), append(taken, unit)
	}
	return out, nil
}

// find is the device that an ID names, and the UUID of what a process gets.
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
		return Device{}, "", fmt.Errorf("%q is no device of this machine, which has %s: see nvidia-smi -L", id, names(devices))
	case len(matches) > 1:
		return Device{}, "", fmt.Errorf("%q is the beginning of %s and of %s: write more of it", id, matches[0].unit, matches[1].unit)
	case matches[0].device.MIG && strings.HasPrefix(matches[0].unit, "GPU-"):
		return Device{}, "", fmt.Errorf("%q is a device in MIG mode, which no process uses itself: name one of its instances (%s)", id, names([]Device{matches[0].device}))
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

// units are what workers can be given: devices, and of those in MIG mode their
// instances.
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

// Units is how many workers can have a device to themselves.
func Units(devices []Device) int { return len(units(devices)) }

// Assign gives each of so many workers perWorker devices for itself, by UUID,
// in the order of devices; those that are left over nobody gets. An instance of
// a device in MIG mode counts as a device. With perWorker 0 nobody gets any.
//
// Refused is more than there is, and more than one instance for a worker, since
// a CUDA process sees one at most.
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
