package launch

import (
	"time"

	"github.com/ckptstore/ckptstore/internal/launch/blame"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/session/heirs"
)

// Commands to the process of another node, and its messages. Each names an attempt.
const (
	cmdStart = "start" // to start its part of the group: a startOrder
	cmdStop  = "stop"  // to end its processes: a stopCommand
	cmdClose = "close" // to end its part: the saves of the attempt have ended
	cmdSpare = "spare" // to wait: the next group has no place for it
	cmdEvent = "event" // to fold an event of the log: a session.Forwarded
	cmdAdopt = "adopt" // to write what a lost node had sealed, from its replica: an adoptOrder
	cmdAsk   = "ask"   // to append the plan of a rank in full: an askedPlan

	cmdMortal = "mortal" // to end the processes when this coordinating process is silent: its node has ranks

	cmdMeasure  = "measure"  // to measure the network to another node: a measureOrder
	cmdExamine  = "examine"  // to examine itself: an examineOrder
	msgServes   = "serves"   // it serves the requests of other nodes
	msgMeasured = "measured" // the result of either: a measured

	msgHello   = "hello"   // all its ranks have connected
	msgExited  = "exited"  // a rank has ended: a rankEnd
	msgFailed  = "failed"  // its part fails, and its processes are being ended: a partEnd
	msgStopped = "stopped" // none of its processes is left, and the log has all their facts: a partEnd
	msgClosed  = "closed"  // its part has ended
	msgSettled = "settled" // it writes no more files of an aborted save: a saveRef
	msgAbort   = "abort"   // it cannot finish a save: a saveRef
	msgAdopted = "adopted" // its answer to an adoptOrder: an adoptReply
	msgAsked   = "asked"   // the job was asked to end there: a StopRequest

	msgInventory = "inventory" // what its part of a living group has, for a coordinator that takes over: an inventory
)

// startOrder places a node's part of a group.
type startOrder struct {
	Attempt    int           `json:"attempt"`
	Restart    int           `json:"restart"`
	Resume     string        `json:"resume,omitempty"`
	Started    uint64        `json:"started"` // sequence of group.started
	Nodes      session.Nodes `json:"nodes"`
	Node       int           `json:"node"` // the receiver's place in the group
	MasterAddr string        `json:"master_addr"`
	MasterPort int           `json:"master_port"`
	Replicas   *replicaOrder `json:"replicas,omitempty"` // nil: none
	Survives   bool          `json:"survives,omitempty"` // the group outlives its coordinator, which has no ranks
}

// replicaOrder is a node's part in the replication of slots.
type replicaOrder struct {
	To   []replicaAt `json:"to,omitempty"` // the nodes that keep the receiver's slots
	From []int       `json:"from"`         // ranks whose slots the receiver keeps
	// Ahead is whether the receiver fetches the slots of the checkpoint to resume from before its ranks ask.
	Ahead bool `json:"ahead,omitempty"`
}

// replicaAt is a node that keeps slots of another one.
type replicaAt struct {
	Node int    `json:"node"` // index
	URL  string `json:"url"`  // where it takes them
	Pin  string `json:"pin"`  // digest of the certificate there
}

// adoptOrder is the order to write a lost node's part of a save.
type adoptOrder struct {
	Attempt int `json:"attempt"`
	heirs.Order
}

// adoptReply is the answer to an adoptOrder.
type adoptReply struct {
	Attempt int `json:"attempt"`
	heirs.Reply
}

// measureOrder names a node whose rate the receiver measures.
type measureOrder struct {
	ID  int    `json:"id"`
	URL string `json:"url"`
	Pin string `json:"pin"` // digest of the certificate there
}

// examineOrder has the receiver examine itself.
type examineOrder struct {
	ID int `json:"id"`
}

// measured is the result of a measureOrder, or of an examineOrder.
type measured struct {
	ID    int     `json:"id"`
	Rate  float64 `json:"rate"` // bytes per second
	Error string  `json:"error,omitempty"`

	Clock time.Time     `json:"clock,omitzero"` // of the node, when it got the order to examine itself
	Took  time.Duration `json:"took,omitempty"` // from then to the answer
	Bad   []string      `json:"bad,omitempty"`  // what it found
}

type stopCommand struct {
	Attempt int    `json:"attempt"`
	Why     string `json:"why"`
}

type rankEnd struct {
	Attempt int    `json:"attempt"`
	Rank    int    `json:"rank"`
	How     string `json:"how"`
}

// partEnd is the end of a node's part of a group; without a cause, all its ranks ended
// well.
type partEnd struct {
	Attempt int        `json:"attempt"`
	Failed  bool       `json:"failed"`
	Unsaved bool       `json:"unsaved,omitempty"` // it writes no sealed bytes any more
	Rank    int        `json:"rank"`
	Kind    blame.Kind `json:"kind,omitempty"`
	Cause   string     `json:"cause,omitempty"`
	Tail    []string   `json:"tail,omitempty"`
	Itself  bool       `json:"itself,omitempty"` // a rank failed by itself
	Device  string     `json:"device,omitempty"` // how a device failed; empty: none did
}

type saveRef struct {
	Attempt    int    `json:"attempt"`
	Checkpoint string `json:"checkpoint"`
	Reason     string `json:"reason,omitempty"`
	Ranks      []int  `json:"ranks,omitempty"`
}

// askedPlan names a plan whose fingerprint is unknown.
type askedPlan struct {
	Attempt    int    `json:"attempt"`
	Checkpoint string `json:"checkpoint"`
	Rank       int    `json:"rank"`
}

// attemptOnly is the part that all commands and messages have.
type attemptOnly struct {
	Attempt int `json:"attempt"`
}
