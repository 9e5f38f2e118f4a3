package gpu

import (
	"fmt"
	"slices"
	"time"
)

// EventKind classifies an [Event] by what caused it.
type EventKind string

// Kinds of events.
const (
	Hardware    EventKind = "hardware"    // the device: it is unhealthy
	Application EventKind = "application" // the program that used the device
	Other       EventKind = "other"       // the XID alone does not tell the cause
	Gone        EventKind = "gone"        // a device was lost: no device of this machine can be trusted
	Unwatched   EventKind = "unwatched"   // the device does not report events
)

// Event is an error that a device or its driver reported.
type Event struct {
	UUID string    `json:"uuid"` // of the device; its index if unknown
	XID  uint64    `json:"xid,omitempty"`
	Kind EventKind `json:"kind"`
	Why  string    `json:"why,omitempty"` // set for an unwatched device
}

// NVIDIA documents the meaning of XIDs. These are the XIDs that by themselves
// blame either the hardware or the program.
var (
	hardwareXIDs    = []uint64{48, 74, 79, 94, 95}
	applicationXIDs = []uint64{13, 31, 43, 45, 68, 109}
)

// xidMeanings are short descriptions of hardware XIDs.
var xidMeanings = map[uint64]string{
	48: "memory error that ECC could not correct",
	74: "NVLink error",
	79: "it has fallen off the bus",
	94: "contained memory error",
	95: "uncontained memory error",
}

func kindOf(xid uint64) EventKind {
	switch {
	case slices.Contains(hardwareXIDs, xid):
		return Hardware
	case slices.Contains(applicationXIDs, xid):
		return Application
	}
	return Other
}

// String formats the event without the device.
func (e Event) String() string {
	switch e.Kind {
	case Gone:
		return "a device of this machine is lost"
	case Unwatched:
		return "the device does not report errors while it runs: " + e.Why
	}
	if text, ok := xidMeanings[e.XID]; ok {
		return fmt.Sprintf("XID %d: %s", e.XID, text)
	}
	return fmt.Sprintf("XID %d", e.XID)
}

// Sick reports whether the device must no longer be used.
func (e Event) Sick() bool { return e.Kind == Hardware || e.Kind == Gone }

const (
	// waitMillis is the longest that one wait for events takes.
	waitMillis = 5000
	// silence is how long a wait may take before Watch abandons the driver.
	silence = 60 * time.Second
)
