package gpu

import (
	"fmt"
	"slices"
	"strings"
)

// Severity is how serious a problem is.
type Severity string

// Severities.
const (
	Unhealthy Severity = "unhealthy" // do not start anything on the device
	Warning   Severity = "warning"   // usable, with a defect
)

// Problem is a defect of a device, with the next step.
type Problem struct {
	Device   string   `json:"device"` // UUID, or the index if unknown
	Severity Severity `json:"severity"`
	What     string   `json:"what"`
	Next     string   `json:"next"`
}

// hotCelsius is the limit for a device that does not report its slowdown
// temperature.
const hotCelsius = 90

// Health lists the problems of all devices, by index. Processes in own do not
// count as foreign.
func (i Inventory) Health(own ...int) []Problem {
	var all []Problem
	for _, s := range i.Devices {
		all = append(all, s.Health(own...)...)
	}
	return all
}

// Health lists the problems of a device, unhealthy ones first. Processes in own
// do not count as foreign.
func (s Status) Health(own ...int) (all []Problem) {
	add := func(severity Severity, next, what string, args ...any) {
		all = append(all, Problem{s.id(), severity, fmt.Sprintf(what, args...), next})
	}
	if s.Lost != "" {
		add(Unhealthy, "look for Xid in the kernel's log (dmesg), reset it with nvidia-smi -r or restart the machine, and replace it if it is lost again",
			"it does not answer: %s", s.Lost)
		return all
	}
	if s.ECC != nil && *s.ECC > 0 {
		add(Unhealthy, s.reset()+"; replace the device if errors come back",
			"%d memory errors that ECC could not correct since the driver was loaded", *s.ECC)
	}
	if s.Rows != nil && s.Rows.Failed {
		add(Unhealthy, "replace the device", "a faulty row of its memory could not be replaced: no spare row is left")
	}
	if s.Rows != nil && s.Rows.Pending {
		add(Unhealthy, s.reset(), "a faulty row of its memory is replaced only by the next reset")
	}
	s.warn(func(next, what string, args ...any) { add(Warning, next, what, args...) }, own)
	return all
}

func (s Status) warn(add func(next, what string, args ...any), own []int) {
	limit, of := uint32(hotCelsius), "its slowdown temperature is unknown"
	if s.SlowAtCelsius != nil {
		limit, of = *s.SlowAtCelsius, "it slows down"
	}
	if s.Celsius != nil && *s.Celsius >= limit {
		add("check fans, air flow and what else runs in the rack", "%d °C, from %d °C on %s", *s.Celsius, limit, of)
	}
	var foreign []string
	for _, p := range s.Processes {
		if slices.Contains(own, p.PID) {
			continue
		}
		text := fmt.Sprint("pid ", p.PID)
		if p.Bytes != nil {
			text += fmt.Sprintf(" with %d MiB", *p.Bytes>>20)
		}
		foreign = append(foreign, text)
	}
	if len(foreign) > 0 {
		add("end them, or give the job other devices", "used by other processes: %s", strings.Join(foreign, ", "))
	}
	if len(s.Unread) > 0 {
		add("check whether nvidia-smi -q reads it; it may need other permissions or a newer driver", "not read: %s", strings.Join(s.Unread, ", "))
	}
}

func (s Status) id() string {
	if s.UUID != "" {
		return s.UUID
	}
	return fmt.Sprint(s.Index)
}

func (s Status) reset() string {
	return "end what uses it and reset it: nvidia-smi -r -i " + s.id()
}
