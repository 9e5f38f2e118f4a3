package gpu

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Worker is a worker's node and the devices assigned to it.
type Worker struct {
	Node    string   // name of its machine
	Devices []string // IDs, in any order
}

// ShareVisible returns, for each worker, the CUDA_VISIBLE_DEVICES with which it
// sees the devices of all workers of its node: their IDs, each once, in the order
// of [SortIDs]. A worker without devices shares none and gets "".
//
// It returns an error for a node that would share more than one device if one of
// them is a MIG instance, since a CUDA process sees at most one. It also rejects
// nodes that mix indices and UUIDs, which may name one device twice, and
// malformed IDs.
func ShareVisible(workers []Worker) ([]string, error) {
	union := map[string][]string{}
	for i, w := range workers {
		for _, id := range w.Devices {
			if err := checkID(id); err != nil {
				return nil, fmt.Errorf("share devices of node %s: worker %d: %w", w.Node, i, err)
			}
			if !slices.Contains(union[w.Node], id) {
				union[w.Node] = append(union[w.Node], id)
			}
		}
	}
	visible := make([]string, len(workers))
	for i, w := range workers {
		if len(w.Devices) == 0 {
			continue
		}
		ids := union[w.Node]
		if err := checkUnion(ids); err != nil {
			return nil, fmt.Errorf("share devices of node %s: %w", w.Node, err)
		}
		SortIDs(ids)
		visible[i] = strings.Join(ids, ",")
	}
	return visible, nil
}

// SortIDs sorts in place: indices by number, then UUIDs by text.
func SortIDs(ids []string) {
	slices.SortFunc(ids, func(a, b string) int {
		m, aIsIndex := parseIndex(a)
		n, bIsIndex := parseIndex(b)
		switch {
		case aIsIndex && bIsIndex:
			return cmp.Or(cmp.Compare(m, n), strings.Compare(a, b))
		case aIsIndex:
			return -1
		case bIsIndex:
			return 1
		}
		return strings.Compare(a, b)
	})
}

func checkID(id string) error {
	if id == "" || strings.ContainsAny(id, ", \t\n") {
		return fmt.Errorf("%q is no device ID; use an index such as 0, or a UUID from nvidia-smi -L", id)
	}
	if n, ok := parseIndex(id); ok && strconv.FormatUint(n, 10) != id {
		return fmt.Errorf("device index %q: write it as %d", id, n)
	}
	return nil
}

func checkUnion(ids []string) error {
	indices := 0
	for _, id := range ids {
		if _, ok := parseIndex(id); ok {
			indices++
		}
	}
	if indices != 0 && indices != len(ids) {
		return fmt.Errorf("%s mix indices and UUIDs, so one device may be listed twice; use one form", strings.Join(ids, ","))
	}
	if len(ids) > 1 {
		for _, id := range ids {
			if strings.HasPrefix(id, "MIG-") {
				return fmt.Errorf("%s is a MIG instance and a process sees one at most, but %d devices would be shared; do not share devices here", id, len(ids))
			}
		}
	}
	return nil
}

func parseIndex(id string) (uint64, bool) {
	n, err := strconv.ParseUint(id, 10, 64)
	return n, err == nil
}
