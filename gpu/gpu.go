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

import "errors"

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
