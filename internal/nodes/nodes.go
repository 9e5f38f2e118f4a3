// Package nodes is the control plane of a job over several nodes.
//
// One trainer process per node is an agent. One agent is the coordinator: it listens at
// the rendezvous endpoint, and the others join it there. The package knows membership
// and transport only. It does not know checkpoints, ranks or processes.
//
//	Endpoint   the coordinator's side: members, commands to them, events from them
//	Peers      requests from one node to another, next to the control plane
//	Link       an agent's side: beats, commands from the coordinator, messages to it
//	roster     the state machine of membership; pure, its caller passes the time
//
// # Requests
//
// Agents connect by HTTP/2 over TLS 1.3. The certificate is made for the job, and agents
// pin it by its digest.
//
//	GET  /v1/job     job, protocol and version; the only request without a token
//	POST /v1/join    a node declares itself and gets its index; idempotent by session
//	POST /v1/beat    each T/10 on a connection of its own
//	POST /v1/next    waits for commands; acknowledges the earlier ones
//	POST /v1/tell    messages; the answer acknowledges them
//	POST /v1/leave   the agent ends
//	     /relay/…    requests of the caller, see [Endpoint.Handle]
//
// All but the first bear the job's token. After joining they also bear the session, a
// random name of one joining of one agent process.
//
// # Silence
//
// T is the timeout of the job. Each side uses its own monotonic clock, and no timestamp
// is on the wire. The agent measures from the moment it sent its last answered beat; after
// T/2 [Link.Silent] is closed, and the caller kills its group. The coordinator measures from the last
// request it received; after T it reports [Lost]. So the old group has ended before
// a new one begins, whatever the clocks show.
package nodes

import (
	"encoding/json"
	"math"
	"time"
)

// Protocol is the version of the requests between agents and the coordinator.
const Protocol = 1

// Node describes a node to the others. Its agent declares it when it joins.
type Node struct {
	// Key identifies the node over restarts of its agent: the index of the scheduler, or
	// a random text.
	Key string `json:"key"`
	// Index is the node's number in the run. An agent without an index from its launcher
	// declares -1, and the coordinator assigns one.
	Index   int    `json:"index"`
	Host    string `json:"host"`
	Boot    string `json:"boot,omitempty"` // boot ID of the machine
	Net     string `json:"net,omitempty"`  // network namespace: pods of one machine have their own, containers of a pod have one
	PID     int    `json:"pid"`
	Address string `json:"address,omitempty"` // numeric; other nodes reach this node there
	Procs   int    `json:"procs"`             // workers
	Port    int    `json:"port,omitempty"`    // TCP port that the agent holds for rank 0, see [Link.SetPort]
	Version string `json:"version"`           // of the program
	// PeerPort and PeerPin are the port where the node serves the requests of other nodes, and
	// the digest of the certificate there: see [Peers]. Domain is the failure domain of the
	// node, such as a rack; empty: unknown.
	PeerPort int    `json:"peer_port,omitempty"`
	PeerPin  string `json:"peer_pin,omitempty"`
	Domain   string `json:"domain,omitempty"`
	// Keeps is set for a node that keeps copies of other nodes' slots. A node may serve other requests and keep none.
	Keeps bool `json:"keeps,omitempty"`
	// Standby is set for a node that takes no ranks: it only coordinates, or waits until it must.
	Standby bool `json:"standby,omitempty"`
	// Command is a digest of the command and its entry point. The coordinator warns of a
	// difference.
	Command string `json:"command,omitempty"`
	Nodes   string `json:"nodes,omitempty"` // how many the job has by the node's command line; the coordinator warns of a difference
	Store   string `json:"store,omitempty"` // ID of the store that the node opens
}

// Limits of what an agent may declare about its node: the coordinator keeps it for each node, and makes
// as many ranks as it has workers.
const (
	maxNode  = 8 << 10 // bytes, with all names
	maxProcs = 1 << 12
)

// size returns how many bytes the description of a node has.
func (n Node) size() int {
	text, err := json.Marshal(n)
	if err != nil {
		return maxNode + 1
	}
	return len(text)
}

func isPort(number int) bool { return number >= 0 && number <= math.MaxUint16 }

// State is the state of a member.
type State string

// The states of members.
const (
	StateOpening State = "opening" // cannot become part of a group yet: see [Endpoint.Admit]
	StateReady   State = "ready"   // can become part of the next group
	StateActive  State = "active"  // part of a group
	StateSpare   State = "spare"   // not needed now; beats and waits
	StateSuspect State = "suspect" // its connections are closed, or it misses beats
	StateLost    State = "lost"    // nothing was received for T
)

// Member is a node as the coordinator sees it. Index is the assigned one.
type Member struct {
	Node
	State   State         `json:"state"`
	Silence time.Duration `json:"silence"` // since the last request of its agent
	// Joining counts all joinings of the job: it tells one joining of a node from the next.
	Joining uint64 `json:"joining"`
	// Place is the position in full groups: the index, or that of the node that this one
	// replaced. It is -1 before the node's first group.
	Place int    `json:"place"`
	Why   string `json:"why,omitempty"` // why it is suspect or lost
}

// Event is a change of membership, or a message of a node: [Joined], [Rejoined], [Left],
// [Suspect], [Recovered], [Lost], [Excluded], [Paused] or [Message].
type Event interface{ event() }

// Joined reports a node with a key that is new in this run.
type Joined struct{ Member Member }

// Rejoined reports a new agent process of a known key. Everything of the old process is
// gone: its group, its commands and its messages.
type Rejoined struct{ Member Member }

// Left reports that an agent has ended in order.
type Left struct {
	Node    int
	Joining uint64 // see [Member]
	Reason  string
}

// Suspect reports that a node's connections are closed, or that it misses beats. The
// node may still run.
type Suspect struct {
	Node int
	Why  string
}

// Recovered reports a request from a suspect node.
type Recovered struct{ Node int }

// Lost reports that nothing was received from a node for T. Its agent must join again.
type Lost struct {
	Node    int
	Joining uint64 // see [Member]
	Why     string
}

// Paused reports that the coordinator itself did not run. It judges no node until it has
// ticked in time for T.
type Paused struct{ For time.Duration }

// Message is a message from a node. The messages of one node arrive in order and exactly
// once.
type Message struct {
	Node    int
	Joining uint64 // see [Member]
	Kind    string
	Body    json.RawMessage
}

func (Joined) event()    {}
func (Rejoined) event()  {}
func (Left) event()      {}
func (Suspect) event()   {}
func (Recovered) event() {}
func (Lost) event()      {}
func (Paused) event()    {}
func (Message) event()   {}

// Command is an order of the coordinator to one node.
type Command struct {
	Kind string          `json:"kind"`
	Body json.RawMessage `json:"body,omitempty"`
}
