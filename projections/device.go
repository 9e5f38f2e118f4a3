package projections

import (
	"time"

	"github.com/ckptstore/ckptstore/events"
)

// Device is a GPU that a trial's job has reported as unhealthy. A device that
// was healthy throughout has no row.
type Device struct {
	Run         string    `json:"run"`
	Trial       string    `json:"trial"`
	Node        int       `json:"node"`
	Device      string    `json:"device"` // UUID
	Healthy     bool      `json:"healthy"`
	Reason      string    `json:"reason"` // of the newest failure
	UnhealthyAt time.Time `json:"unhealthy_at,omitzero"`
	RecoveredAt time.Time `json:"recovered_at,omitzero"`
}

// deviceUnhealthy and deviceRecovered change the row of a device. A repeated fact
// carries the time of the first, so a fact that is not newer than the last fact of its
// kind changes nothing.

func (f *fold) deviceUnhealthy(b *events.GPUUnhealthy) error {
	return f.changeDevice(b.Node, b.Device, func(d *Device) bool {
		if !f.at().After(d.UnhealthyAt) {
			return false
		}
		d.UnhealthyAt, d.Reason = f.at(), b.Reason
		return true
	})
}

func (f *fold) deviceRecovered(b *events.GPURecovered) error {
	return f.changeDevice(b.Node, b.Device, func(d *Device) bool {
		if !f.at().After(d.RecoveredAt) {
			return false
		}
		d.RecoveredAt = f.at()
		return true
	})
}

func (f *fold) changeDevice(node int, device string, change func(*Device) bool) error {
	k := deviceKey(f.run, f.name, node, device)
	d, found, err := load[Device](f.t, k)
	if err != nil {
		return err
	}
	if !found {
		d = Device{Run: f.run, Trial: f.name, Node: node, Device: device}
	}
	if !change(&d) {
		return nil
	}
	d.Healthy = !d.RecoveredAt.Before(d.UnhealthyAt)
	return store(f.t, k, d)
}

// Devices lists the devices of a run that have been unhealthy, by trial, node and UUID.
// With an empty run it lists the devices of all runs.
func Devices(r Reader, run string) ([]Device, error) {
	if run == "" {
		return all[Device](r, key(keyDevice))
	}
	return all[Device](r, key(keyDevice, run))
}
