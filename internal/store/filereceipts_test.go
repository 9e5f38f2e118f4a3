package store

import (
	"errors"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/projections"
)

// TestReceiptsOfFiles: the latest checkpoint by receipts is never a single-file checkpoint; if
// there is nothing else, the reference is not found.
func TestReceiptsOfFiles(t *testing.T) {
	t.Parallel()
	file := checkpoint.Receipt{Run: "run", Trial: "main", Name: "out~~x.pt", Checkpoint: "out~~x.pt.a2", Sequence: 9}
	step := checkpoint.Receipt{Run: "run", Trial: "main", Name: "step-1", Checkpoint: "step-1.a1", Sequence: 5}
	for _, ref := range []string{"run", "run@latest"} {
		if got, err := FindReceipt([]checkpoint.Receipt{file, step}, ref); err != nil || got.Checkpoint != step.Checkpoint {
			t.Errorf("%s is %s, %v", ref, got.Checkpoint, err)
		}
		if _, err := FindReceipt([]checkpoint.Receipt{file}, ref); !errors.Is(err, projections.ErrNotFound) {
			t.Errorf("%s of files alone: %v", ref, err)
		}
	}
	if got, err := FindReceipt([]checkpoint.Receipt{file, step}, "run@out~~x.pt"); err != nil || got.Checkpoint != file.Checkpoint {
		t.Errorf("by its name: %s, %v", got.Checkpoint, err)
	}
}
