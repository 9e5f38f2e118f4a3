package restore

import (
	"context"
	"errors"
	"slices"

	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/projections"
)

// Coordinator decides the loads of a group whose ranks live on several nodes. Each
// node's [Loader] has one: [Meeting.Local] on the coordinating node, a connection to
// that [Meeting] elsewhere.
//
// The methods wait for other nodes. A decision, also a failure, is part of the
// reply. An error means that there is no reply, because ctx has ended or the request
// is invalid. An implementation that loses a connection sends the same request again,
// until ctx ends: repeated requests have no effect and get the same reply. The methods
// may be called concurrently.
type Coordinator interface {
	// Resolve adds ranks of this node to a load, and waits until every participant has
	// asked. The node calls it again, with all its ranks so far, when another one asks;
	// it may cancel the call before.
	Resolve(ctx context.Context, req ResolveRequest) (ResolveReply, error)
	// Share tells which blocks this node would read from files in a load that is resolved. If
	// there are any, it waits until the other nodes have told it too, or some time has passed.
	Share(ctx context.Context, req ShareRequest) (ShareReply, error)
	// Done reports what this node has read, or why it failed, and waits until every
	// node has reported, or one has failed.
	Done(ctx context.Context, req DoneRequest) (DoneReply, error)
}

// Key identifies a load: the n-th of its participants.
type Key struct {
	Participants []int `json:"participants,omitempty"` // ascending; empty: all ranks
	N            int   `json:"n"`                      // from 1
}

// ResolveRequest has the requests of a node's ranks for a load.
type ResolveRequest struct {
	Key
	Asks []Ask `json:"asks"`
	// FQNs are the keys that the node's participants ask for. It is complete when Asks
	// has all of them, and may be empty before.
	FQNs []string `json:"fqns,omitempty"`
}

// ResolveReply has the checkpoint of a load, the same on all nodes.
type ResolveReply struct {
	Failure    *Failure               `json:"failure,omitempty"` // the load has failed for all ranks
	Load       int                    `json:"load,omitempty"`    // its number in the attempt
	Checkpoint projections.Checkpoint `json:"checkpoint"`        // the path is its ID if it has no run
	Unread     []string               `json:"unread,omitempty"`
	Verifies   bool                   `json:"verifies,omitempty"`

	opened *resolution // on the coordinating node
}

// DoneRequest has the outcome of a load on a node.
type DoneRequest struct {
	Key
	Report
	Failure *Failure `json:"failure,omitempty"` // why the node failed; nil: it has read everything
}

// DoneReply has the outcome of a load on all nodes.
type DoneReply struct {
	Failure *Failure `json:"failure,omitempty"` // nil: every rank has its data
}

// Failure is an error that keeps its kinds on its way to another node.
type Failure struct {
	Text  string         `json:"error"`
	Kinds []problem.Kind `json:"kinds,omitempty"` // outermost first

	err error // in the process of its origin
}

// failure returns an error as a Failure.
func (c *Config) failure(err error) *Failure {
	f := &Failure{Text: err.Error(), Kinds: problem.Kinds(err), err: err}
	if len(f.Kinds) == 0 && c.Kind != nil {
		f.Kinds = []problem.Kind{c.Kind(err)}
	}
	return f
}

// Err returns the failure as an error with its kinds, or nil.
func (f *Failure) Err() error {
	switch {
	case f == nil:
		return nil
	case f.err != nil:
		return f.err
	}
	err := errors.New(f.Text)
	for _, kind := range slices.Backward(f.Kinds) {
		err = problem.Wrap(kind, err)
	}
	return err
}
