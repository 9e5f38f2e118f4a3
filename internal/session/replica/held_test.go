package replica

import (
	"maps"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/session/staging"
)

// copies hold any rank's part of attempt 1, and count how often each is released.
type copies map[staging.Part]int

func (c copies) Hold(checkpoint string, rank int) (*staging.Replica, func(), error) {
	of := staging.Part{Attempt: 1, Rank: rank, Checkpoint: checkpoint}
	c[of] += 0
	return &staging.Replica{Header: staging.Header{Part: of}}, func() { c[of]++ }, nil
}

// Replicas that are held for a save are released when it ends without their write, and once.
func TestHeldIsReleased(t *testing.T) {
	t.Parallel()
	part := func(checkpoint string, rank int) staging.Part {
		return staging.Part{Attempt: 1, Rank: rank, Checkpoint: checkpoint}
	}
	released := copies{}
	h := NewHeld(released)
	for _, of := range []staging.Part{part("x.a1", 0), part("x.a1", 1), part("y.a1", 0), part("z.a1", 0)} {
		if begin, err := h.Hold(of); !begin || err != nil {
			t.Error(begin, err)
		}
	}
	if begin, err := h.Hold(part("y.a1", 0)); begin || err != nil { // the order again
		t.Error(begin, err)
	}
	_, release, err := h.Take("x.a1", 0)
	if _, _, again := h.Take("x.a1", 0); err != nil || again == nil {
		t.Error("a replica is written", err, again)
	}
	if begin, err := h.Hold(part("x.a1", 0)); begin || err != nil || !h.Writes("x.a1", 0) {
		t.Error("a part that is written begins again", begin, err)
	}
	h.End("x.a1")
	if !h.Writes("x.a1", 0) || h.Writes("x.a1", 1) {
		t.Error("of the save that has ended, this process still writes only what was taken")
	}
	release()
	h.Forgo("y.a1", 0)
	wants := copies{part("x.a1", 0): 1, part("x.a1", 1): 1, part("y.a1", 0): 1, part("z.a1", 0): 0}
	if !maps.Equal(released, wants) {
		t.Errorf("released %v, want %v", released, wants)
	}
	h.Close()
	if wants[part("z.a1", 0)] = 1; !maps.Equal(released, wants) || h.Writes("z.a1", 0) {
		t.Errorf("at the end released %v, want %v", released, wants)
	}
}

// A replica of another plan, or of another attempt, is not held.
func TestHeldOfAnotherPlan(t *testing.T) {
	t.Parallel()
	for name, of := range map[string]staging.Part{
		"another attempt": {Attempt: 2, Checkpoint: "x.a1"},
		"another plan":    {Attempt: 1, Checkpoint: "x.a1", Fingerprint: checkpoint.Digest{1}},
	} {
		released := copies{}
		h := NewHeld(released)
		if begin, err := h.Hold(of); begin || err == nil || h.Writes("x.a1", 0) {
			t.Errorf("%s: held %v, %v", name, begin, err)
		}
		if got := released[staging.Part{Attempt: 1, Checkpoint: "x.a1"}]; got != 1 {
			t.Errorf("%s: released %d times", name, got)
		}
	}
}
