package launch_test

import (
	"context"
	"encoding/json"
	"testing"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/projections"
)

var savesFour = workerRole("saves four times on nodes", func(ctx context.Context, c *client.Client) error {
	for step := int64(1); step < 5; step++ {
		if err := save(ctx, c, step); err != nil {
			return err
		}
	}
	return nil
})

// A steady save over several nodes takes one event for each node and phase. The first save
// has the plans of the ranks in full. The views have the same rows of ranks.
func TestEventsOfNodes(t *testing.T) {
	t.Parallel()
	j := newJob(t, 6, savesFour...)
	j.spread(4, 2)
	j.must()
	run := runOf(t)
	wantEnded(t, []string{"step-1.a1", "step-2.a1", "step-3.a1", "step-4.a1"}, nil)
	count := map[string]map[string]int{}
	listed := 0
	for _, r := range logOf(t, run) {
		body, err := r.Body()
		if err != nil {
			t.Fatal(err)
		}
		id := ""
		switch b := body.(type) {
		case *events.LocalPlan:
			id = b.Checkpoint
		case *events.WriteSealed:
			id = b.Checkpoint
		case *events.WriteCompleted:
			id = b.Checkpoint
		case *events.NodeSeal:
			id = b.Checkpoint
		case *events.NodeWrite:
			id = b.Checkpoint
		case *events.NodePlan:
			if id = b.Checkpoint; b.Digest == "" {
				listed++
			}
		case *events.GroupStarted:
			if r.Version != 2 || len(b.Ranks) > 0 || len(b.Nodes) != 2 {
				t.Errorf("version %d: %+v", r.Version, b)
			}
			var nodes events.NodeMap
			if err := json.Unmarshal(b.Map.Inline, &nodes); err != nil || len(nodes.Address) != 2 || nodes.Key[1] != "1" {
				t.Errorf("nodes %+v, %v", nodes, err)
			}
		}
		if id != "" {
			if count[id] == nil {
				count[id] = map[string]int{}
			}
			count[id][string(r.Kind)]++
		}
	}
	if n := count["step-1.a1"]["plan.local"]; n != 6 {
		t.Errorf("%d full plans in the first save, want 6", n)
	}
	facts := 0
	for _, id := range []string{"step-2.a1", "step-3.a1", "step-4.a1"} {
		for _, n := range count[id] {
			facts += n
		}
	}
	t.Logf("%v", count)
	// On a busy machine a rank may miss a window; that it does each time is an error.
	if facts > 30 || listed == 0 || listed > 4 {
		t.Errorf("%d events of ranks and nodes in three steady saves, want about 18; fingerprints listed %d times", facts, listed)
	}
	rows := projections.NewMemory()
	for _, r := range logOf(t, run) {
		if err := projections.Apply(rows, r); err != nil {
			t.Fatal(err)
		}
	}
	workers, err := projections.Workers(rows, run, projections.DefaultTrial, 1)
	if err != nil || len(workers) != 6 || workers[5].Node != 1 || workers[5].LocalRank != 1 {
		t.Errorf("workers %+v, %v", workers, err)
	}
	writes, err := projections.Writes(rows, run, projections.DefaultTrial, "step-4.a1")
	if err != nil || len(writes) != 6 || writes[4].SealedBytes == 0 || writes[4].Files[0].Name != "r00004.safetensors" || writes[4].IndexDigest == writes[3].IndexDigest {
		t.Errorf("writes %+v, %v", writes, err)
	}
}
