// Package heirs finds the nodes that write what lost nodes had sealed. The nodes that keep replicas
// of the slots of a lost node are its partners. The coordinating process asks them one after the
// other, until one of them writes.
//
// A [Finder] decides and sends nothing: its caller tells it of losses, answers and the passing of time, and
// carries out the [Step] that follows.
package heirs

import (
	"time"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
)

// Part is one rank's part of a save.
type Part struct {
	Checkpoint string // ID
	Rank       int
}

// Order is the order to write the parts of a save that a lost node had sealed.
type Order struct {
	Checkpoint string        `json:"checkpoint"`
	Parts      []OrderedPart `json:"parts"`
	Why        string        `json:"why"` // the node is lost
	// Within is the time in which the order is valid: another node is asked after it, and two writers of
	// the same files would hinder each other. 0: as long as the save is open.
	Within time.Duration `json:"within,omitempty"`
}

// OrderedPart is one rank's part of a save.
type OrderedPart struct {
	Rank        int               `json:"rank"`
	Fingerprint checkpoint.Digest `json:"fingerprint"` // of the rank's plan, as the log has it
}

// Reply is the answer of a node to an [Order]. A node whose write fails later answers again.
type Reply struct {
	Checkpoint string `json:"checkpoint"`
	Writes     []int  `json:"writes,omitempty"`  // ranks whose parts it writes
	Without    []int  `json:"without,omitempty"` // ranks whose parts it does not write
	Why        string `json:"why,omitempty"`     // it does not write those
}

// Step is what follows from a loss, an answer or the passing of time.
type Step struct {
	Orders  []Addressed
	Without []Unwritten // parts that no partner can write: their saves are aborted
}

// Addressed is an order to the node at a place.
type Addressed struct {
	To   int
	Node int // its index
	Order
}

// Unwritten has the ranks of lost nodes whose parts of a save no partner can write.
type Unwritten struct {
	Checkpoint string
	Ranks      []int // ascending
	Why        string
}
