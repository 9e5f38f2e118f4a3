package session

import (
	"context"
	"net/http"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/collective"
	"github.com/ckptstore/ckptstore/internal/session/restore"
)

// Attempt identifies an attempt of a group of ranks and provides what a session
// gets from its caller. With a nil interface, ranks get the answer that changes
// nothing.
type Attempt struct {
	Number  int
	Resume  string // what the ranks resume from: a reference, a path or empty
	Started uint64 // sequence of its group.started

	Orders  Orders
	Signals Signals
	Hooks   Hooks
	// Hub connects the collectives of the ranks; the default is one in this process.
	Hub Hub
	// Leave is called once for each rank that leaves, before the rank gets its
	// reply. It must not block. Without it, leaving has no effect beyond the
	// record.
	Leave func(rank int)

	// Nodes and Node replace those of [Config], in a job whose groups differ.
	Nodes Nodes
	Node  int
	// Closed is closed when the coordinating process has ended the saves of a part.
	Closed <-chan struct{}
	// Index returns the index of the node at a place, for facts about it; nil: the place.
	Index func(place int) int
	// Forward is how the processes of the other nodes learn of the group's saves; nil if
	// there are none, or this process does not coordinate.
	Forward Forwarder
	// Peer is the coordinating process; nil if this process is it.
	Peer Peer
	// Replicas is where this node's sealed slots are copied to, and whose it keeps; nil:
	// nowhere.
	Replicas *Replicas
	// PeerClient returns a client for requests to the node whose certificate has a digest, and
	// PeerAt where the node at a place serves them. Only the coordinating process has the latter.
	// Nil: nodes pass nothing on to each other in loads.
	PeerClient func(pin string) *http.Client
	PeerAt     func(place int) restore.Peer
	// Resumed is set if this process coordinates a group that lives already: see [Job.Resume].
	Resumed *Resumed
	// Loads passes the loads of this node's ranks to [Group.Meeting] of the
	// coordinating process. It is set if Peer is.
	Loads restore.Coordinator
}

// index returns the index of the node at a place.
func (a *Attempt) index(place int) int {
	if a.Index == nil {
		return place
	}
	return a.Index(place)
}

// Orders are requests to the ranks to end. Both methods may be called
// concurrently and must not block.
type Orders interface {
	// Listens records that a rank reports, or polls for stop requests.
	Listens()
	// Tell returns the current request to the ranks: [client.Stop],
	// [client.Preempt], [Grow] or none. The caller passes it on.
	Tell() string
}

// Grow is a request to the ranks to end so that the next group has more nodes. The ranks are asked to
// save and end as by [client.Preempt]. A coordinator that takes over must tell the two apart: a
// preemption pauses the trial.
const Grow = "grow"

// asked returns a request to the ranks in the words of their protocol.
func asked(request string) string {
	if request == Grow {
		return client.Preempt
	}
	return request
}

// Signals tracks the signals that processes of the ranks hold back. It exists so
// that the launcher can end the processes at once. The methods may be called
// concurrently.
type Signals interface {
	// Hold blocks until the calling process must release its signals. If ctx ends
	// first, the process is gone.
	Hold(ctx context.Context, rank int, names []string) error
	// Confirm records that one process of a rank no longer holds any signal back.
	Confirm(rank int)
	// Replaced records that a rank no longer holds some signals back.
	Replaced(rank int, names []string)
	// Signaled returns what a rank must do after it received a signal, SIGTERM or
	// SIGUSR1, which it holds back.
	Signaled(rank int, name string) client.SignaledReply
}

// Hooks are the part of a communication backend in the requests of ranks.
type Hooks interface {
	// Begun returns a channel that is closed when training has started. Until
	// then, the first reply to each rank is held back. A nil channel holds back
	// none.
	Begun() <-chan struct{}
	// Fetch returns the metrics of a report as the backend decodes them.
	Fetch(metrics map[string]any) (map[string]any, error)
}

// Hub connects the collectives of a group's ranks. [collective.Hub] serves ranks
// on one node; its methods document what any other Hub must do.
type Hub interface {
	Exchange(ctx context.Context, rank int, seq uint64, op string, own []byte) ([][]byte, error)
	Close(err error)
}

var _ Hub = (*collective.Hub)(nil)
