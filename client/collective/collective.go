// Package collective provides collectives on objects of any size for the ranks of a
// worker group. Every rank calls the same ones in the same order, from one goroutine.
//
//	g := collective.Of(c, collective.Options{})
//	losses, err := collective.AllGather(ctx, g, loss)   // of all ranks, in rank order
//	best, err := collective.Broadcast(ctx, g, 0, best)  // rank 0's, on every rank
package collective

import (
	"context"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/collective"
)

// Group is a rank's view of its group: Rank(), Size(), Initialized(), and
// AllGatherBytes(ctx, own). After a connection error, all later collectives return
// that error.
type Group = collective.Group

// Options are the settings of a group, the same on every rank: MaxBytes of an object
// (1 GiB), Timeout of a collective (10 minutes), Codec (JSON).
type Options = collective.Options

// Codec encodes objects: Marshal(v) and Unmarshal(data, &v). A []byte is sent as it is.
type Codec = collective.Codec

// Of returns the group of a worker. If c is nil, the group has only rank 0, and
// collectives return their argument.
func Of(c *client.Client, o Options) *Group {
	if c == nil {
		return collective.New(nil, o)
	}
	return collective.New(c.Collectives(), o)
}

// AllGather returns the objects of all ranks in rank order, on every rank. If a rank's
// object cannot be encoded, every rank gets an error that names that rank, and the group
// stays usable.
func AllGather[T any](ctx context.Context, g *Group, v T) ([]T, error) {
	return collective.AllGatherObject(ctx, g, v)
}

// Broadcast returns root's object on every rank; v of the other ranks is ignored. Errors
// are as with [AllGather].
func Broadcast[T any](ctx context.Context, g *Group, root int, v T) (T, error) {
	return collective.BroadcastObject(ctx, g, root, v)
}
