package launch_test

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/ckptstore/ckptstore/events"
)

// A client in another language, written only from the protocol's page, saves,
// loads and reports.
func TestClientFromThePage(t *testing.T) {
	t.Parallel()
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Fatalf("the example of docs/reference/protocol.md needs python3: %v", err)
	}
	j := newJob(t, 2, python, filepath.Join("..", "..", "docs", "reference", "protocol_client.py")).must()
	wantCommitted(t, "step-0.a1", "step-1.a1", "step-2.a1")
	for rank := range 2 {
		wantText(t, j.out, fmt.Sprintf("[rank%d] 3 checkpoints are what was saved", rank))
	}
	// Of the log: its loads move the line, to which not all reports belong then.
	if reports := bodiesOf[events.Metrics](t, runOf(t)); len(reports) != 3 {
		t.Errorf("%d iterations: %+v", len(reports), reports)
	}
}
