package gpu

import (
	"fmt"
	"slices"
	"time"
)

// EventKind is whom an [Event] speaks against.
type EventKind string

// Kinds of events.
const (
	Hardware    EventKind = "hardware"    // the device: it is unhealthy
	Application EventKind = "application" // the program that used the device
	Other       EventKind = "other"       // an XID that says neither by itself
	Gone        EventKind = "gone"        // some device is lost: none can be trusted
	Unwatched   EventKind = "unwatched"   // the device tells of no events
)

// Event is something that a device or its driver has told.
type Event struct {
	UUID string    `json:"uuid"` // of the device; its index where that is not known
	XID  uint64    `json:"xid,omitempty"`
	Kind EventKind `json:"kind"`
	Why  string    `json:"why,omitempty"` // of an unwatched device
}

// What XIDs stand for is in NVIDIA's list of them; these are the ones that say
// by themselves whether the hardware failed or the program did.
var (
	hardwareXIDs    = []uint64{48, 74, 79, 94, 95}
	applicationXIDs = []uint64{13, 31, 43, 45, 68, 109}
)

// xidMeanings are the short texts of hardware XIDs.
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

// String is the event for people, without the device.
func (e Event) String() string {
	switch e.Kind {
	case Gone:
		return "a device of this machine is lost"
	case Unwatched:
		return "the device tells of no errors while it runs: " + e.Why
	}
	if text, ok := xidMeanings[e.XID]; ok {
		return fmt.Sprintf("XID %d: %s", e.XID, text)
	}
	return fmt.Sprintf("XID %d", e.XID)
}

// Sick reports whether the device must not be used any more.
func (e Event) Sick() bool { return e.Kind == Hardware || e.Kind == Gone }

const (
	// waitMillis is how long one wait for events takes at most.
	waitMillis = 5000
	// silence is how long a wait may take before the driver is given up.
	silence = 60 * time.Second
)
