package rpc

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/internal/collective"
)

// join waits until no call is under way among the ranks of the group. Each
// round, a rank waits for its own quiet and then tells how many calls it ever
// made. When the sum is that of the round before, no rank has made one between
// the two, and at the end of the first none was under way.
func (e *engine) join(ctx context.Context, group *collective.Group) error {
	before := uint64(0)
	for round := 0; ; round++ {
		started, err := e.idle(ctx)
		if err != nil {
			return fmt.Errorf("shut rpc agent %s down: calls are still under way: %w", e.self, err)
		}
		if group == nil || group.Size() == 1 {
			return nil
		}
		all, err := collective.AllGatherObject(ctx, group, started)
		if err != nil {
			return fmt.Errorf("shut rpc agent %s down: meet the other ranks: %w", e.self, err)
		}
		sum := uint64(0)
		for _, n := range all {
			sum += n
		}
		if round > 0 && sum == before {
			return nil
		}
		before = sum
	}
}

// acceptPause is how long an agent that could not take a connection waits.
const acceptPause = 50 * time.Millisecond

// pause waits a moment; it reports false when the agent closes.
func (p *Pipe) pause() bool {
	timer := time.NewTimer(acceptPause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-p.life.Done():
		return false
	}
}

func byName(a, b Peer) int { return strings.Compare(a.Name, b.Name) }
