package process

import (
	"maps"
	"slices"
)

// PID is the number of a process, which after its end may be another's.
func (p Entry) PID() int { return p.pid }

// Replaced reports whether another process has its PID by now.
func (p Entry) Replaced() bool {
	now, err := readEntry(p.pid)
	return err == nil && now.start != p.start
}

// Known are the processes that were found or added and not forgotten since,
// dead or alive, by PID.
func (h *Hunt) Known() []Entry {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.SortedFunc(maps.Values(h.known), func(a, b Entry) int { return a.pid - b.pid })
}
