package store

import (
	"errors"
	"testing"

	"github.com/ckptstore/ckptstore/internal/store/living"
)

// A node's part of an attempt lives until it is silenced, for good. A newer attempt is not concerned, and
// neither is another node.
func TestLiving(t *testing.T) {
	t.Parallel()
	s := open(t, made(t))
	node, coordinator := s.Living(strange), s.Living(strange)
	lives := func(index, attempt int, want error) {
		t.Helper()
		if err := node.Live(t.Context(), index, attempt); !errors.Is(err, want) {
			t.Errorf("node %d, attempt %d: %v, want %v", index, attempt, err, want)
		}
	}
	silences := func(index, attempt int) {
		t.Helper()
		if err := coordinator.Silence(t.Context(), index, attempt); err != nil {
			t.Errorf("silence node %d, attempt %d: %v", index, attempt, err)
		}
	}
	lives(1, 3, nil)
	lives(1, 3, nil)
	silences(1, 3)
	lives(1, 3, living.ErrSilenced)
	silences(1, 3)
	lives(1, 3, living.ErrSilenced)
	lives(1, 4, nil)
	silences(1, 3) // late
	lives(1, 4, nil)
	lives(2, 3, nil)

	silences(3, 3) // it never asked
	lives(3, 3, living.ErrSilenced)
	lives(3, 2, living.ErrSilenced)
	again := s.Living(strange) // another trainer of the node
	if err := again.Live(t.Context(), 2, 3); err != nil {
		t.Errorf("the node's next trainer: %v", err)
	}
}
