// Package gpu is the inventory of this machine's NVIDIA devices, how they fare,
// and the rule of which of them a worker sees. It alone talks to NVML.
//
//	device    one GPU, known by its UUID: the order of indices may change
//	          with a reboot or a replaced card
//	instance  a part of a device in MIG mode, with a UUID of its own; a CUDA
//	          process sees one instance at most
//	ID        what CUDA_VISIBLE_DEVICES holds: an index, a device's UUID
//	          ("GPU-…") or an instance's ("MIG-…")
//	status    what a device says of itself at one look: memory, errors, heat
//	problem   what is wrong with a device, and what to do: a device with an
//	          unhealthy one is not to be used, a warning is for people
//	XID       the driver's number for an error of a device, told while it runs:
//	          some speak against the hardware, some against the program
//	holder    a process that holds memory of a device
//	ordinal   the number a process counts a device by: its place in
//	          CUDA_VISIBLE_DEVICES
//
// NVML needs cgo and Linux. In other builds what asks it returns [ErrNotBuilt] and
// the rest works alike.
package gpu

import (
	"context"
	"errors"
)

var (
	// ErrNoDriver is returned when NVML or the kernel driver is not there:
	// usually a machine without NVIDIA devices.
	ErrNoDriver = errors.New("no NVIDIA driver found: on a machine with GPUs, check that nvidia-smi works here and, in a container, that the NVIDIA runtime is on; without GPUs, give the number of workers")

	// ErrNotBuilt is returned by a binary that cannot ask NVML at all.
	ErrNotBuilt = errors.New("this binary was built without cgo or not for Linux, so it cannot ask NVML: build it on Linux with CGO_ENABLED=1, or give the number of workers")
)

// Device is one GPU of this machine.
type Device struct {
	UUID        string     `json:"uuid"`         // "GPU-…": the key
	Index       int        `json:"index"`        // NVML's: by PCI bus; CUDA counts alike with CUDA_DEVICE_ORDER=PCI_BUS_ID
	Name        string     `json:"name"`         // the product's
	MemoryBytes uint64     `json:"memory_bytes"` // in total; 0 where the GPU shares the host's memory
	MIG         bool       `json:"mig"`          // processes use the instances, never the device itself
	Instances   []Instance `json:"instances,omitempty"`
}

// Instance is a part of a device in MIG mode.
type Instance struct {
	UUID        string `json:"uuid"` // "MIG-…": the key
	Name        string `json:"name"`
	MemoryBytes uint64 `json:"memory_bytes"`
}

// Inventory is what one look at the devices of this machine has found.
type Inventory struct {
	Driver  string   `json:"driver,omitempty"` // version of the kernel driver, such as 550.54.15
	CUDA    string   `json:"cuda,omitempty"`   // newest CUDA that this driver can run, such as 12.4
	Devices []Status `json:"devices"`          // by index; those that do not answer too
	Links   []Link   `json:"links,omitempty"`  // each pair of devices that answer
	Unread  []string `json:"unread,omitempty"` // what the driver should have told and did not
}

// Status is a device and how it fares. What the device or its driver does not
// support is nil: nothing is zero unless it was measured.
type Status struct {
	Device

	// Lost says how a device that is listed does not answer, as after it has
	// fallen off the bus; "" when it does. Of a lost device the UUID may be "".
	Lost string `json:"lost,omitempty"`

	UsedBytes     *uint64   `json:"used_bytes,omitempty"`
	ECC           *uint64   `json:"ecc_uncorrectable,omitempty"` // memory errors that ECC could not correct since the driver was loaded
	Rows          *Rows     `json:"remapped_rows,omitempty"`
	Celsius       *uint32   `json:"celsius,omitempty"`
	SlowAtCelsius *uint32   `json:"slow_at_celsius,omitempty"` // from here on the device slows itself down
	Milliwatts    *uint32   `json:"milliwatts,omitempty"`
	Utilization   *uint32   `json:"utilization,omitempty"` // percent of the time with a kernel running; not in MIG mode
	NVLinks       *int      `json:"nvlinks,omitempty"`     // active ones
	Processes     []Process `json:"processes,omitzero"`    // that compute on it; nil when that is not known, empty when there is none
	Unread        []string  `json:"unread,omitempty"`      // what the device should have told and did not, with NVML's word for it
}

// Rows are the rows of a device's memory that are replaced by spare ones.
type Rows struct {
	Correctable   int  `json:"correctable"`
	Uncorrectable int  `json:"uncorrectable"`
	Pending       bool `json:"pending"` // a replacement that takes effect with the next reset
	Failed        bool `json:"failed"`  // there was no spare row left
}

// Process is one that computes on a device. Its PID is of the namespace that
// the driver sees, which in a container may be the host's.
type Process struct {
	PID   int     `json:"pid"`
	Bytes *uint64 `json:"bytes,omitempty"` // of the device's memory
}

// Link is how near two devices are to each other.
type Link struct {
	A     string `json:"a"` // UUIDs
	B     string `json:"b"`
	Level Level  `json:"level"`
}

// Level is the nearest part of a machine that two devices have in common.
type Level string

// Levels, from near to far, in the words of nvidia-smi topo.
const (
	SameBoard   Level = "board"   // two GPUs of one card
	OneSwitch   Level = "PIX"     // a single PCIe switch
	Switches    Level = "PXB"     // several PCIe switches
	HostBridge  Level = "PHB"     // the PCIe host bridge of a CPU
	NUMANode    Level = "NODE"    // bridges of one NUMA node
	AcrossNodes Level = "SYS"     // the link between NUMA nodes
	Unknown     Level = "unknown" // of a number that this version does not know
)

// Holder is a process that holds memory of a device.
type Holder struct {
	Device string  `json:"device"` // UUID
	PID    int     `json:"pid"`
	Bytes  *uint64 `json:"bytes,omitempty"`
}

// Find is the device that an ID names: by its UUID, its index, or the UUID of
// one of its MIG instances. False when there is none.
func (i Inventory) Find(id string) (Status, bool) {
	number, isIndex := parseIndex(id)
	for _, s := range i.Devices {
		if s.UUID == id && id != "" || isIndex && uint64(s.Index) == number {
			return s, true
		}
		for _, part := range s.Instances {
			if part.UUID == id {
				return s, true
			}
		}
	}
	return Status{}, false
}

// System is this machine's devices, for who asks for them by an interface of
// his own. Its methods are the functions of the same names.
type System struct{}

// Inspect calls [Inspect].
func (System) Inspect(ctx context.Context) (Inventory, error) { return Inspect(ctx) }

// Watch calls [Watch].
func (System) Watch(ctx context.Context, told func(Event)) error { return Watch(ctx, told) }

// HoldersOf calls [HoldersOf].
func (System) HoldersOf(ctx context.Context, pids ...int) ([]Holder, error) {
	return HoldersOf(ctx, pids...)
}
