// Package gpu takes inventory of this machine's NVIDIA devices, checks their
// health, and decides which devices a worker sees. Only this package talks to
// NVML.
//
//	device    one GPU, known by its UUID: the order of indices may change
//	          with a reboot or a replaced card
//	instance  a part of a device in MIG mode, with a UUID of its own; a CUDA
//	          process sees one instance at most
//	ID        what CUDA_VISIBLE_DEVICES holds: an index, a device's UUID
//	          ("GPU-…") or an instance's ("MIG-…")
//	status    a snapshot of a device: memory, errors, temperature
//	problem   a defect of a device, with the next step: a job does not use a
//	          device with an unhealthy problem; a warning is for people
//	XID       the driver's number for an error of a running device: some blame
//	          the hardware, some the program
//	holder    a process that holds memory of a device
//	ordinal   the number a process counts a device by: its place in
//	          CUDA_VISIBLE_DEVICES
//
// NVML needs cgo and Linux. In other builds the functions that call NVML return
// [ErrNotBuilt], and the rest works the same.
package gpu

import (
	"context"
	"errors"
)

var (
	// ErrNoDriver is returned when NVML or the kernel driver is missing, usually
	// because the machine has no NVIDIA devices.
	ErrNoDriver = errors.New("no NVIDIA driver found; on a machine with GPUs, check that nvidia-smi works here and, in a container, that the NVIDIA runtime is on; without GPUs, give the number of workers")

	// ErrNotBuilt is returned by a binary that cannot call NVML.
	ErrNotBuilt = errors.New("this binary was built without cgo or not for Linux, so it cannot ask NVML; build it on Linux with CGO_ENABLED=1, or give the number of workers")
)

// Device is one GPU of this machine.
type Device struct {
	UUID        string     `json:"uuid"`         // "GPU-…": the key
	Index       int        `json:"index"`        // from NVML, by PCI bus; CUDA counts the same with CUDA_DEVICE_ORDER=PCI_BUS_ID
	Name        string     `json:"name"`         // product name
	MemoryBytes uint64     `json:"memory_bytes"` // total; 0 if the GPU shares the host's memory
	MIG         bool       `json:"mig"`          // processes use the instances, never the device itself
	Instances   []Instance `json:"instances,omitempty"`
}

// Instance is a part of a device in MIG mode.
type Instance struct {
	UUID        string `json:"uuid"` // "MIG-…": the key
	Name        string `json:"name"`
	MemoryBytes uint64 `json:"memory_bytes"`
}

// Inventory is a snapshot of the devices of this machine.
type Inventory struct {
	Driver  string   `json:"driver,omitempty"` // version of the kernel driver, such as 550.54.15
	CUDA    string   `json:"cuda,omitempty"`   // newest CUDA that this driver can run, such as 12.4
	Devices []Status `json:"devices"`          // by index, including devices that do not answer
	Links   []Link   `json:"links,omitempty"`  // for each pair of devices that answer
	Unread  []string `json:"unread,omitempty"` // values that the driver failed to return
}

// Status is a device and its condition. Values that the device or its driver does
// not support are nil: a zero is always a measurement.
type Status struct {
	Device

	// Lost is why a listed device does not answer, for example because it fell
	// off the bus. It is "" for a device that answers. A lost device may have no
	// UUID.
	Lost string `json:"lost,omitempty"`

	UsedBytes     *uint64   `json:"used_bytes,omitempty"`
	ECC           *uint64   `json:"ecc_uncorrectable,omitempty"` // memory errors that ECC could not correct since the driver was loaded
	Rows          *Rows     `json:"remapped_rows,omitempty"`
	Celsius       *uint32   `json:"celsius,omitempty"`
	SlowAtCelsius *uint32   `json:"slow_at_celsius,omitempty"` // temperature from which the device throttles itself
	Milliwatts    *uint32   `json:"milliwatts,omitempty"`
	Utilization   *uint32   `json:"utilization,omitempty"` // percent of the time with a kernel running; not in MIG mode
	NVLinks       *int      `json:"nvlinks,omitempty"`     // active ones
	Processes     []Process `json:"processes,omitzero"`    // compute processes; nil if unknown, empty if there are none
	Unread        []string  `json:"unread,omitempty"`      // values that the device failed to return, with NVML's error
}

// Rows is the state of a device's remapped memory rows.
type Rows struct {
	Correctable   int  `json:"correctable"`
	Uncorrectable int  `json:"uncorrectable"`
	Pending       bool `json:"pending"` // a replacement takes effect at the next reset
	Failed        bool `json:"failed"`  // no spare row was left
}

// Process is a compute process on a device. Its PID is in the namespace that the
// driver sees, which in a container may be the host's.
type Process struct {
	PID   int     `json:"pid"`
	Bytes *uint64 `json:"bytes,omitempty"` // of device memory
}

// Link is the topological distance between two devices.
type Link struct {
	A     string `json:"a"` // UUIDs
	B     string `json:"b"`
	Level Level  `json:"level"`
}

// Level is the nearest common ancestor of two devices in the machine.
type Level string

// Levels, from near to far, as nvidia-smi topo names them.
const (
	SameBoard   Level = "board"   // two GPUs of one card
	OneSwitch   Level = "PIX"     // a single PCIe switch
	Switches    Level = "PXB"     // several PCIe switches
	HostBridge  Level = "PHB"     // the PCIe host bridge of a CPU
	NUMANode    Level = "NODE"    // bridges of one NUMA node
	AcrossNodes Level = "SYS"     // the link between NUMA nodes
	Unknown     Level = "unknown" // NVML returned a level unknown to this version
)

// Holder is a process that holds memory of a device.
type Holder struct {
	Device string  `json:"device"` // UUID
	PID    int     `json:"pid"`
	Bytes  *uint64 `json:"bytes,omitempty"`
}

// Find returns the device that an ID names: by its UUID, its index, or the UUID
// of one of its MIG instances. It returns false if there is none.
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

// System implements a caller's interface with this package's functions, so that
// tests can substitute the devices. Each method calls the function of the same
// name.
type System struct{}

// Inspect calls [Inspect].
func (System) Inspect(ctx context.Context) (Inventory, error) { return Inspect(ctx) }

// Watch calls [Watch].
func (System) Watch(ctx context.Context, told func(Event)) error { return Watch(ctx, told) }

// HoldersOf returns which of the processes hold memory of which devices. PIDs are
// those that the driver sees. It fails if a device does not list its processes,
// because then the answer is unknown. It returns when ctx ends, even if the
// driver hangs, and is safe for concurrent use.
func (System) HoldersOf(ctx context.Context, pids ...int) ([]Holder, error) {
	return systemHolders(ctx, pids...)
}
