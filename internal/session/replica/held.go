package replica

import (
	"errors"
	"fmt"
	"sync"

	"github.com/ckptstore/ckptstore/internal/session/staging"
)

// Held are the replicas that this node writes in the place of lost nodes, in one attempt. A nil one has none.
type Held struct {
	from Holder

	mu    sync.Mutex
	parts map[heldPart]*holding // that this process writes
}

// Holder is a [Keeper].
type Holder interface {
	// Hold is [Keeper.Hold].
	Hold(checkpoint string, rank int) (r *staging.Replica, release func(), err error)
}

// heldPart is one rank's part of a save.
type heldPart struct {
	checkpoint string
	rank       int
}

// holding is a replica that stays until release.
type holding struct {
	*staging.Replica
	release func() // nil once the writer has it
}

// NewHeld returns the replicas that are written out of a keeper.
func NewHeld(from Holder) *Held { return &Held{from: from, parts: map[heldPart]*holding{}} }

// Writes reports whether this process writes a part of a save from a replica.
func (h *Held) Writes(checkpoint string, rank int) bool {
	if h == nil {
		return false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.parts[heldPart{checkpoint, rank}] != nil
}

// Hold keeps the replica of a lost rank's part of a save until it is written or the save ends. It reports
// false for a part that this process writes already: a coordinator that took over gives the order again.
func (h *Held) Hold(of staging.Part) (begin bool, err error) {
	if h == nil {
		return false, errors.New("this node keeps no replicas")
	}
	part := heldPart{of.Checkpoint, of.Rank}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.parts[part] != nil {
		return false, nil
	}
	found, release, err := h.from.Hold(of.Checkpoint, of.Rank)
	if err != nil {
		return false, err
	}
	if found.Attempt != of.Attempt || found.Fingerprint != of.Fingerprint {
		release()
		return false, fmt.Errorf("the replica of rank %d for %s has another plan", of.Rank, of.Checkpoint)
	}
	h.parts[part] = &holding{found, release}
	return true, nil
}

// Take returns a replica that is held, once. The caller releases it.
func (h *Held) Take(checkpoint string, rank int) (r *staging.Replica, release func(), err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	of := h.parts[heldPart{checkpoint, rank}]
	if of == nil || of.release == nil {
		return nil, nil, fmt.Errorf("the replica of rank %d for %s is gone", rank, checkpoint)
	}
	release, of.release = of.release, nil
	return of.Replica, release, nil
}

// Forgo ends the write of a part that failed.
func (h *Held) Forgo(checkpoint string, rank int) {
	h.drop(true, func(of heldPart) bool { return of == heldPart{checkpoint, rank} })
}

// End releases the replicas that are held for a save and not taken. Parts that were taken stay this process's: a
// write that fails of the save's end is none of its rank.
func (h *Held) End(checkpoint string) {
	h.drop(false, func(of heldPart) bool { return of.checkpoint == checkpoint })
}

// Close releases all replicas that are held.
func (h *Held) Close() { h.drop(true, func(heldPart) bool { return true }) }

func (h *Held) drop(taken bool, which func(heldPart) bool) {
	if h == nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for of, held := range h.parts {
		if !which(of) || held.release == nil && !taken {
			continue
		}
		if held.release != nil {
			held.release()
		}
		delete(h.parts, of)
	}
}
