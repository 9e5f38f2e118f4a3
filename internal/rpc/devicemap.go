package rpc

import (
	"fmt"
	"maps"
	"slices"
)

// DevicePair maps a device of this agent to a device of a peer, for tensors.
type DevicePair struct {
	Local  int `json:"local"`
	Remote int `json:"remote"`
}

// DeviceMap is one-to-one: no device appears twice on either side.
type DeviceMap []DevicePair

// devices is the announcement of an agent's own devices.
type devices struct {
	Name  string               `json:"name"`
	Count int                  `json:"count"`
	Maps  map[string]DeviceMap `json:"maps,omitempty"`
	// Meeting distinguishes this opening of the agents from others; rank 0's
	// counts.
	Meeting string `json:"meeting,omitempty"`
}

// checkDevices checks the device maps of all agents against each other. Every
// rank gets the same result, so either all start or none does.
func checkDevices(all []devices) error {
	count := map[string]int{}
	for _, d := range all {
		if _, twice := count[d.Name]; twice {
			return fmt.Errorf("two agents are named %q: every agent needs its own name", d.Name)
		}
		count[d.Name] = d.Count
	}
	for _, d := range all {
		for _, peer := range slices.Sorted(maps.Keys(d.Maps)) {
			if err := d.Maps[peer].check(d, peer, count); err != nil {
				return fmt.Errorf("device map of %s to %s: %w", d.Name, peer, err)
			}
		}
	}
	return nil
}

func (m DeviceMap) check(d devices, peer string, count map[string]int) error {
	there, known := count[peer]
	if !known {
		return fmt.Errorf("%w: the agents are %q", ErrUnknownPeer, slices.Sorted(maps.Keys(count)))
	}
	from, to := map[int]bool{}, map[int]int{}
	for _, p := range m {
		if p.Local < 0 || p.Local >= d.Count {
			return fmt.Errorf("device %d is out of range: %s has %d", p.Local, d.Name, d.Count)
		}
		if p.Remote < 0 || p.Remote >= there {
			return fmt.Errorf("device %d is out of range: %s has %d", p.Remote, peer, there)
		}
		if from[p.Local] {
			return fmt.Errorf("device %d stands twice", p.Local)
		}
		if other, taken := to[p.Remote]; taken {
			return fmt.Errorf("devices %d and %d both go to device %d: a map is one-to-one", other, p.Local, p.Remote)
		}
		from[p.Local], to[p.Remote] = true, p.Local
	}
	return nil
}
