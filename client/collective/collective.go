// Package collective gives the ranks of a worker group collectives on objects of any
// size. Every rank calls the same ones in the same order, from one goroutine.
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
// AllGatherBytes(ctx, own). After an error of the connection all later collectives
// return that error.
type Group = collective.Group

// Options are the settings of a group, the same on every rank: MaxBytes of an object
// (1 GiB), Timeout of a collective (10 minutes), Codec (JSON).
type Options = collective.Options

// Codec turns objects into bytes: Marshal(v) and Unmarshal(data, &v). A []byte needs none.
type Codec = collective.Codec

// Of returns the group of a worker. Without a client (nil) it has the one rank 0, and
// collectives return what they were given.
func Of(c *client.Client, o Options) *Group {
	if c == nil {
		return collective.New(nil, o)
	}
	return collective.New(c.Collectives(), o)
}

// AllGather returns the objects of all ranks in rank order, on every rank. An object that
// cannot be encoded is an error on every rank that names the rank it came from; the group
// stays usable.
func AllGather[T any](ctx context.Context, g *Group, v T) ([]T, error) {
	return collective.AllGatherObject(ctx, g, v)
}

// Broadcast returns root's object on every rank; v of the others does not matter. Errors
// are as with [AllGather].
func Broadcast[T any](ctx context.Context, g *Group, root int, v T) (T, error) {
	return collective.BroadcastObject(ctx, g, root, v)
}
