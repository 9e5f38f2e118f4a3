package restore

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ckptstore/ckptstore/client"
)

// Load takes part in the next load of a rank with the ranks that load, which are
// distinct and ascending, and returns the reply to it. It waits for the others for
// as long as limit. lends says that the rank can read several files.
func (l *Loader) Load(ctx context.Context, rank int, ranks []int, req client.LoadRequest, lends bool, limit time.Duration) (any, error) {
	for _, it := range req.Items {
		if it.FQN == "" {
			return nil, &MisuseError{errors.New("an item has no name")}
		}
	}
	ld, err := l.join(rank, ranks, req, lends)
	if err != nil {
		return nil, err
	}
	wait, cancel := l.bounded(ctx, limit)
	defer cancel()
	select {
	case <-ld.complete:
	case <-wait.Done():
		absent := l.absent(ld)
		l.leave(ld, rank)
		return nil, fmt.Errorf("load %d is a collective, and ranks %v have not called it: %w", ld.n, absent, wait.Err())
	}
	if ld.over != nil {
		return nil, &ConflictError{ld.over}
	}
	select {
	case <-ld.done:
		return l.take(ld, rank)
	case <-ctx.Done():
		l.leave(ld, rank)
		return nil, ctx.Err()
	}
}
