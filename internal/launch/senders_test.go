package launch

import (
	"encoding/json"
	"log/slog"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/session"
)

// A node that names a rank of another node as the cause of its failure does not blame that node: its own
// end counts, and the rank does not.
func TestNodeBlamesOnlyItself(t *testing.T) {
	t.Parallel()
	for rank, want := range map[int]int{1: 1, 2: -1, -1: -1, 7: -1} {
		var log strings.Builder
		f := &fleet{job: &job{log: slog.New(slog.NewTextHandler(&log, nil))}}
		o := &others{
			fleet: f, order: startOrder{Attempt: 3, Nodes: session.Nodes{{0}, {1}, {2}}}, place: map[int]int{1: 1, 2: 2},
			in: make(chan nodeEvent, 1), over: make(chan struct{}),
		}
		f.now = o
		body, err := json.Marshal(partEnd{Attempt: 3, Failed: true, Rank: rank, Cause: "it ended"})
		if err != nil {
			t.Fatal(err)
		}
		f.message(t.Context(), nodes.Message{Node: 1, Kind: msgFailed, Body: body})
		got := <-o.in
		if got.index != 1 || got.end == nil || got.end.Rank != want || !strings.HasPrefix(got.end.Cause, "node 1: ") {
			t.Errorf("rank %d: %+v, %+v; want rank %d", rank, got, got.end, want)
		}
		if refused := strings.Contains(log.String(), "not its own"); refused != (rank != want) {
			t.Errorf("rank %d: log %s", rank, &log)
		}
	}
}

// Only the node that was asked answers a measurement.
func TestMeasurementOfAnother(t *testing.T) {
	t.Parallel()
	var log strings.Builder
	f := &fleet{job: &job{log: slog.New(slog.NewTextHandler(&log, nil))}}
	answer := make(chan measured, 1)
	f.measures = map[int]measurement{7: {2, answer}}
	f.measured(1, measured{ID: 7, Rate: 1})
	f.measured(2, measured{ID: 8, Rate: 1})
	if len(answer) > 0 || !strings.Contains(log.String(), "another node was asked") {
		t.Errorf("%d answers; log %s", len(answer), &log)
	}
	f.measured(2, measured{ID: 7, Rate: 2})
	if len(answer) != 1 || (<-answer).Rate != 2 {
		t.Error("the node's own answer is not taken")
	}
}
