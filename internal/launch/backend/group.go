package backend

import (
	"cmp"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/gpu"
)

// Group is the workers of one attempt.
type Group struct {
	Run, Trial, Job string
	Attempt         int
	MasterAddr      string
	MasterPort      int
	Workers         []*Worker // by rank
}

// Worker is a worker of a group.
type Worker struct {
	Position
	Node    string   // name of its machine
	Devices []string // assigned to it, by ID
	Visible string   // its CUDA_VISIBLE_DEVICES; empty if it has no device
	// Env is added to the environment of its process. Changes after OnStart have
	// no effect.
	Env map[string]string
}

// Position is a worker's place in the group.
type Position struct {
	Rank      int // in the group
	LocalRank int // on its node
	LocalSize int // workers of its node
	NodeRank  int
	Nodes     int
}

// Positions returns the position of each worker, in the given order. Ranks count
// by node, in the order in which nodes first occur, and on a node by the lowest
// device in the order of gpu.SortIDs. Workers without devices come after the
// others, in the given order.
func Positions(workers []gpu.Worker) []Position {
	nodes := map[string]int{}
	sizes := map[string]int{}
	lowest := make([]string, len(workers))
	order := make([]int, len(workers))
	for i, w := range workers {
		if _, seen := nodes[w.Node]; !seen {
			nodes[w.Node] = len(nodes)
		}
		sizes[w.Node]++
		order[i] = i
		if ids := slices.Clone(w.Devices); len(ids) > 0 {
			gpu.SortIDs(ids)
			lowest[i] = ids[0]
		}
	}
	slices.SortStableFunc(order, func(a, b int) int {
		return cmp.Or(cmp.Compare(nodes[workers[a].Node], nodes[workers[b].Node]), byDevice(lowest[a], lowest[b]))
	})
	positions := make([]Position, len(workers))
	local := map[string]int{}
	for rank, i := range order {
		node := workers[i].Node
		positions[i] = Position{Rank: rank, LocalRank: local[node], LocalSize: sizes[node], NodeRank: nodes[node], Nodes: len(nodes)}
		local[node]++
	}
	return positions
}

func byDevice(a, b string) int {
	switch {
	case a == b:
		return 0
	case a == "":
		return 1
	case b == "":
		return -1
	}
	pair := []string{a, b}
	gpu.SortIDs(pair)
	if pair[0] == a {
		return -1
	}
	return 1
}

// Arrange creates workers in the order of their ranks.
func Arrange(workers []gpu.Worker) []*Worker {
	out := make([]*Worker, len(workers))
	for i, p := range Positions(workers) {
		out[p.Rank] = &Worker{Position: p, Node: workers[i].Node, Devices: workers[i].Devices, Env: map[string]string{}}
	}
	return out
}

// show sets what each worker sees: its own devices, or with share the devices of
// all workers of its node. It leaves the environment of a worker without devices
// unchanged. With order, CUDA counts devices by PCI bus, as NVML does.
func (g *Group) show(share, order bool) error {
	workers := make([]gpu.Worker, len(g.Workers))
	for i, w := range g.Workers {
		workers[i] = gpu.Worker{Node: w.Node, Devices: w.Devices}
	}
	var shared []string
	if share {
		var err error
		if shared, err = gpu.ShareVisible(workers); err != nil {
			return err
		}
	}
	for i, w := range g.Workers {
		if len(w.Devices) == 0 {
			continue
		}
		w.Visible = strings.Join(w.Devices, ",")
		if share {
			w.Visible = shared[i]
		}
		w.Env["CUDA_VISIBLE_DEVICES"] = w.Visible
		if order {
			w.Env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
		}
	}
	return nil
}
