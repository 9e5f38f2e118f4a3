package insight

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/ckptstore/ckptstore/projections"
)

// States of a node in a job, as far as the log shows.
const (
	NodeReady    = "ready"    // joined, while no group runs
	NodeActive   = "active"   // part of the running group
	NodeSpare    = "spare"    // joined, and not part of the running group
	NodeLeft     = "left"     // its trainer ended in order
	NodeExcluded = "excluded" // it is barred from the job
	NodeLost     = "lost"     // it was silent, its trainer started again, or the whole job is lost
)

// Node is one node of a job. It is a line of `nodes`.
type Node struct {
	Node  int       `json:"node"` // index
	Host  string    `json:"host"`
	State string    `json:"state"`
	Ranks []int     `json:"ranks"`          // in the job's newest group
	Since time.Time `json:"since,omitzero"` // start of the state; unknown for a node of a lost job
	Why   string    `json:"why,omitempty"`  // why it is lost or left
	Joins int       `json:"joins"`          // how often a node joined with this index
	// BytesPerSecond is the rate of its network in the preflight; nil: it was not measured.
	BytesPerSecond *int64 `json:"bytes_per_second,omitempty"`
	// ClockSeconds is by how much its clock was ahead of the coordinating node's in the preflight, at
	// least; nil: unknown.
	ClockSeconds *float64 `json:"clock_s,omitempty"`
	// Slow reports that the node is slower than the others of the running group; nil: it is not
	// known to be.
	Slow *NodeSlowness `json:"slow,omitempty"`
	// Replica is the copy of the node's newest sealed slots; nil: there is none.
	Replica *NodeReplica `json:"replica,omitempty"`
}

// NodeSlowness is how much slower a node is than the other nodes of its group.
type NodeSlowness struct {
	Since   time.Time `json:"since"`
	By      string    `json:"by"`       // "busy": the ranks' own work in an iteration; "copy": their copies in saves
	Seconds float64   `json:"seconds"`  // of the node's median rank: in an iteration, or for each GB of a copy
	Others  float64   `json:"others_s"` // median of the other nodes
}

// String describes it, for the list of nodes.
func (s NodeSlowness) String() string {
	what := "is busy %.3g s in an iteration"
	if s.By == "copy" {
		what = "copies a GB in %.3g s"
	}
	return fmt.Sprintf("slow: "+what+", and the other nodes %.3g s", s.Seconds, s.Others)
}

// IsSlow reports whether a node is slower than the others of its group, in an attempt.
func IsSlow(n projections.JobNode, attempt int) bool {
	return n.SlowAttempt == attempt && n.SlowAt.After(n.WellAt)
}

// NodeReplica is a copy of a node's slots in the memory of another node.
type NodeReplica struct {
	Node       int       `json:"node"` // index of the node that has it
	Checkpoint string    `json:"checkpoint"`
	At         time.Time `json:"at"`
	Bytes      int64     `json:"bytes"`
	Lag        float64   `json:"lag_seconds"` // from the first seal to the whole copy
}

// Copied adds the replicas of the job's newest group to its active nodes.
func (r RunJobs) Copied(job projections.Job, nodes []Node, replicas []projections.Replica) {
	group, started := r.NewestAttempt(job.ID)
	for i := range nodes {
		for _, of := range replicas {
			if n := &nodes[i]; started && n.State == NodeActive && of.Node == n.Node && of.Trial == group.Trial && of.Attempt == group.Attempt {
				n.Replica = &NodeReplica{of.On, of.Checkpoint, of.At, of.Bytes, of.Seconds}
			}
		}
	}
}

// NewestAttempt returns the newest attempt of a job, and whether the job has one.
func (r RunJobs) NewestAttempt(job string) (newest projections.Attempt, found bool) {
	for _, a := range r.attempts {
		if a.Job == job && a.StartedSeq > newest.StartedSeq {
			newest, found = a, true
		}
	}
	return newest, found
}

// Nodes returns the nodes of a job, by index. workers are those of its newest attempt.
// Of several nodes that had one index, it returns the last, after those that are excluded.
func (r RunJobs) Nodes(job projections.Job, workers []projections.Worker) []Node {
	group, started := r.NewestAttempt(job.ID)
	ranks, stays := map[int][]int{}, map[int][]projections.JobNode{}
	for _, w := range workers {
		ranks[w.Node] = append(ranks[w.Node], w.Rank)
	}
	for _, stay := range job.Nodes {
		stays[stay.Node] = append(stays[stay.Node], stay)
	}
	for index := range ranks { // the fact that a node joined may follow the group's start
		if stays[index] == nil {
			stays[index] = []projections.JobNode{{Node: index, JoinedAt: group.StartedAt}}
		}
	}
	state := r.state(job)
	list := []Node{}
	for _, index := range slices.Sorted(maps.Keys(stays)) {
		all := stays[index]
		last := all[len(all)-1]
		n := Node{Node: index, Ranks: append([]int{}, ranks[index]...), Since: last.JoinedAt, Why: last.Reason, BytesPerSecond: last.BytesPerSecond, ClockSeconds: last.ClockSeconds}
		for _, stay := range all {
			n.Host = cmp.Or(stay.Host, n.Host)
			if !stay.JoinedAt.IsZero() {
				n.Joins++
			}
			if started && stay != last && !stay.LeftAt.Before(group.StartedAt) {
				n.Ranks = []int{} // the group's node is gone, and last took its index
			}
		}
		switch {
		case !last.LeftAt.IsZero():
			n.State, n.Since = NodeLeft, last.LeftAt
			switch {
			case last.Excluded:
				n.State = NodeExcluded
			case last.Lost:
				n.State = NodeLost
			}
		case state == Ended:
			n.State, n.Since, n.Why = NodeLeft, job.EndedAt, "the job ended"
		case state == Lost:
			n.State, n.Since, n.Why = NodeLost, time.Time{}, "the job is lost: it recorded no end"
		case started && group.StoppedAt.IsZero() && len(n.Ranks) > 0:
			n.State, n.Since = NodeActive, group.StartedAt
			if IsSlow(last, group.Attempt) {
				n.Slow = &NodeSlowness{last.SlowAt, last.SlowBy, last.SlowSeconds, last.SlowOthers}
			}
		case started && group.StoppedAt.IsZero():
			n.State = NodeSpare
		default:
			n.State = NodeReady
			if group.StoppedAt.After(n.Since) {
				n.Since = group.StoppedAt
			}
		}
		for _, stay := range all[:len(all)-1] {
			if stay.Excluded { // another node has its index
				list = append(list, Node{Node: index, Host: stay.Host, State: NodeExcluded, Ranks: []int{}, Since: stay.LeftAt, Why: stay.Reason, Joins: 1, BytesPerSecond: stay.BytesPerSecond, ClockSeconds: stay.ClockSeconds})
			}
		}
		list = append(list, n)
	}
	return list
}
