package doctor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/gpu"
	"github.com/ckptstore/ckptstore/internal/bytesize"
)

func (e *examination) gpus(ctx context.Context) {
	looked := make(chan gpu.Inventory, 1)
	e.check(ctx, "gpu.driver", func(ctx context.Context) answer {
		inventory, a := driver(e.Inventory(ctx))
		looked <- inventory
		return a
	})
	var inventory gpu.Inventory
	select {
	case inventory = <-looked:
	default: // abandoned
	}
	if len(inventory.Devices) == 0 {
		return
	}
	for _, s := range inventory.Devices {
		e.add(fmt.Sprint("gpu.", s.Index), device(s))
	}
	e.add("gpu.links", links(inventory))
	e.add("gpu.mig", partitions(inventory))
}

func driver(i gpu.Inventory, err error) (gpu.Inventory, answer) {
	none := gpu.Inventory{}
	switch {
	case errors.Is(err, gpu.ErrNoDriver):
		return none, notChecked("no action is needed on a machine without GPUs; with GPUs, check that nvidia-smi works here, and in a container that the NVIDIA runtime is on", "no NVIDIA driver found")
	case errors.Is(err, gpu.ErrNotBuilt):
		return none, notChecked("run a trainer built on Linux with CGO_ENABLED=1", "this binary was built without cgo or not for Linux, so it cannot ask NVML")
	case err != nil:
		return none, problem("check whether nvidia-smi works, and the kernel's log (dmesg) for Xid", "%v", err)
	case len(i.Devices) == 0:
		return i, warning("see nvidia-smi -L; in a container, give it devices", "driver %s, and no device", i.Driver)
	case len(i.Unread) > 0:
		return i, warning("check whether nvidia-smi reads it", "driver %s, CUDA up to %s, %d devices; not read: %s", i.Driver, i.CUDA, len(i.Devices), strings.Join(i.Unread, ", "))
	}
	return i, ok("driver %s, CUDA up to %s, %d devices", i.Driver, i.CUDA, len(i.Devices))
}

func device(s gpu.Status) answer {
	a := answer{OK, measures(s), ""}
	var do []string
	for _, p := range s.Health() {
		a.saw += "; " + p.What
		if !slices.Contains(do, p.Next) {
			do = append(do, p.Next)
		}
		if p.Severity == gpu.Unhealthy {
			a.status = Problem
		} else if a.status == OK {
			a.status = Warning
		}
	}
	a.do = strings.Join(do, "; ")
	return a
}

// measures formats the values that a device reported.
func measures(s gpu.Status) string {
	parts := []string{strings.TrimSpace(s.Name + " " + s.UUID)}
	say := func(format string, args ...any) { parts = append(parts, fmt.Sprintf(format, args...)) }
	switch {
	case s.UsedBytes != nil && s.MemoryBytes > 0:
		say("%s of %s used", bytesize.Text(*s.UsedBytes), bytesize.Text(s.MemoryBytes))
	case s.MemoryBytes > 0:
		say("%s", bytesize.Text(s.MemoryBytes))
	}
	if s.Celsius != nil {
		say("%d °C", *s.Celsius)
	}
	if s.Milliwatts != nil {
		say("%d W", *s.Milliwatts/1000)
	}
	if s.Utilization != nil {
		say("%d %% busy", *s.Utilization)
	}
	if s.NVLinks != nil {
		say("%d NVLinks", *s.NVLinks)
	}
	return strings.Join(parts, ", ")
}

// links counts the pairs of devices at each distance.
func links(i gpu.Inventory) answer {
	switch {
	case len(i.Devices) == 1:
		return ok("one device")
	case len(i.Links) == 0:
		return notChecked("", "the driver does not report how the devices are linked")
	}
	var order []gpu.Level
	pairs := map[gpu.Level]int{}
	for _, l := range i.Links {
		if pairs[l.Level]++; pairs[l.Level] == 1 {
			order = append(order, l.Level)
		}
	}
	var parts []string
	for _, level := range order {
		parts = append(parts, fmt.Sprintf("%d pairs %s", pairs[level], level))
	}
	return ok("%s (see nvidia-smi topo -m)", strings.Join(parts, ", "))
}

func partitions(i gpu.Inventory) answer {
	devices, parts, empty := 0, 0, []string{}
	for _, s := range i.Devices {
		if !s.MIG {
			continue
		}
		devices++
		if parts += len(s.Instances); len(s.Instances) == 0 {
			empty = append(empty, s.UUID)
		}
	}
	if len(empty) > 0 {
		return warning("make instances with nvidia-smi mig, or turn MIG mode off", "MIG mode is on, but %s has no instance: nothing can run there", strings.Join(empty, ", "))
	}
	if devices == 0 {
		return ok("off")
	}
	return ok("on %d devices, %d instances: a process sees one of them, and workers cannot share them", devices, parts)
}
