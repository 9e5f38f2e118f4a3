package gpu

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Result is the outcome of a readiness check.
type Result string

// Results.
const (
	Passed Result = "passed"
	Failed Result = "failed"
	NotRun Result = "not run"
)

// Check is one readiness check of this machine's devices, with its result.
type Check struct {
	Name    string             `json:"check"`
	Result  Result             `json:"result"`
	Text    string             `json:"text"` // what was observed, or why the check was not run
	Figures map[string]float64 `json:"figures,omitempty"`
}

// Names of the checks that use NVML.
const (
	CheckInventory  = "inventory"
	CheckHealth     = "health"
	CheckAssignment = "assignment"
)

// Readiness checks the devices of this machine by NVML: that they answer, that
// they are healthy, and that each visible device can be assigned to a worker of
// its own. visible is the value of CUDA_VISIBLE_DEVICES; nil selects all devices.
// It returns the IDs that those workers get, in order.
func Readiness(ctx context.Context, visible *string) (checks []Check, ids []string) {
	i, err := Inspect(ctx)
	return readiness(i, err, visible)
}

func readiness(i Inventory, err error, visible *string) (checks []Check, ids []string) {
	none := ""
	switch {
	case errors.Is(err, ErrNoDriver):
		none = "no NVIDIA driver found"
	case errors.Is(err, ErrNotBuilt):
		none = "this binary was built without cgo or not for Linux, so it cannot ask NVML; build it with CGO_ENABLED=1"
	case err == nil && len(i.Devices) == 0:
		none = fmt.Sprintf("driver %s, and no device", i.Driver)
	case err != nil:
		const why = "the inventory failed"
		return []Check{{CheckInventory, Failed, err.Error(), nil}, {CheckHealth, NotRun, why, nil}, {CheckAssignment, NotRun, why, nil}}, nil
	}
	if none != "" {
		return []Check{{CheckInventory, NotRun, none, nil}, {CheckHealth, NotRun, none, nil}, {CheckAssignment, NotRun, none, nil}}, nil
	}
	assigned, ids := assignment(i, visible)
	return []Check{inventory(i), health(i), assigned}, ids
}

// inventory passes if every device answers and returns all required values.
func inventory(i Inventory) Check {
	var lost, unread, names []string
	for _, s := range i.Devices {
		if s.Lost != "" {
			lost = append(lost, fmt.Sprintf("device %s does not answer: %s", s.id(), s.Lost))
			continue
		}
		names = append(names, fmt.Sprintf("%d: %s (%s)", s.Index, s.Name, s.UUID))
		unread = append(unread, s.Unread...)
	}
	says := fmt.Sprintf("driver %s, CUDA up to %s, %s", i.Driver, i.CUDA, strings.Join(names, ", "))
	if len(lost) > 0 {
		return Check{CheckInventory, Failed, strings.Join(append(lost, says), "; "), nil}
	}
	if unread = append(unread, i.Unread...); len(unread) > 0 {
		says += "; not read: " + strings.Join(slices.Compact(unread), ", ")
	}
	return Check{CheckInventory, Passed, says, map[string]float64{"devices": float64(len(i.Devices))}}
}

// health fails if a job would refuse to start on one of the devices.
func health(i Inventory) Check {
	result, says := Passed, []string{}
	for _, p := range i.Health() {
		says = append(says, fmt.Sprintf("%s: %s: %s (%s)", p.Device, p.Severity, p.What, p.Next))
		if p.Severity == Unhealthy {
			result = Failed
		}
	}
	if len(says) == 0 {
		says = append(says, "no device reports a problem")
	}
	return Check{CheckHealth, result, strings.Join(says, "; "), nil}
}

// assignment assigns each visible device to a worker of its own, as a job does.
func assignment(i Inventory, visible *string) (Check, []string) {
	var devices []Device
	for _, s := range i.Devices {
		if s.Lost == "" {
			devices = append(devices, s.Device)
		}
	}
	if visible != nil {
		var err error
		if devices, err = Visible(devices, *visible); err != nil {
			return Check{CheckAssignment, Failed, err.Error(), nil}, nil
		}
	}
	workers := Units(devices)
	if workers == 0 {
		return Check{CheckAssignment, Failed, "no device can be assigned to a worker; check CUDA_VISIBLE_DEVICES, and whether devices in MIG mode have instances", nil}, nil
	}
	given, err := Assign(devices, workers, 1)
	if err != nil {
		return Check{CheckAssignment, Failed, err.Error(), nil}, nil
	}
	var ids []string
	for _, mine := range given {
		ids = append(ids, mine...)
	}
	return Check{CheckAssignment, Passed, fmt.Sprintf("%d workers, one device each: %s", workers, strings.Join(ids, ", ")), map[string]float64{"workers": float64(workers)}}, ids
}
