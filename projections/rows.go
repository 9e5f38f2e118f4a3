package projections

import (
	"time"

	"github.com/ckptstore/ckptstore/events"
)

// Store identifies the store that the log belongs to.
type Store struct {
	ID         string    `json:"id"`
	Format     int       `json:"format"`
	Data       string    `json:"data"`
	CreatedSeq uint64    `json:"created_seq"`
	CreatedAt  time.Time `json:"created_at"`
}

// Run is a training effort that a user named. In all rows, sequences are positions in
// the log and times are those of the events.
type Run struct {
	Name       string    `json:"name"`
	Job        string    `json:"job,omitempty"` // the last started job
	Jobs       int       `json:"jobs"`
	CreatedSeq uint64    `json:"created_seq"` // of the first event about the run
	CreatedAt  time.Time `json:"created_at"`
	StartedSeq uint64    `json:"started_seq,omitempty"` // of the last job's start
	StartedAt  time.Time `json:"started_at,omitzero"`
}

// Job is one launch of the trainer for a run. A killed trainer leaves a job without an
// end.
type Job struct {
	ID         string    `json:"id"`
	Run        string    `json:"run"`
	Host       string    `json:"host,omitempty"`
	PID        int       `json:"pid,omitempty"`
	Command    []string  `json:"command,omitempty"`
	NProc      int       `json:"nproc,omitempty"` // workers per node
	NNodes     int       `json:"nnodes,omitempty"`
	Resume     string    `json:"resume,omitempty"` // as requested
	Flags      []string  `json:"flags,omitempty"`  // of the trainer
	Dir        string    `json:"dir,omitempty"`    // working directory
	Logs       string    `json:"logs,omitempty"`   // directory of the workers' output, relative to the store or absolute
	StartedSeq uint64    `json:"started_seq,omitempty"`
	StartedAt  time.Time `json:"started_at,omitzero"`
	Ended      bool      `json:"ended"`
	EndedSeq   uint64    `json:"ended_seq,omitempty"`
	EndedAt    time.Time `json:"ended_at,omitzero"`
	ExitCode   int       `json:"exit_code"` // valid once it ended
	Reason     string    `json:"reason,omitempty"`
	Nodes      []JobNode `json:"nodes,omitempty"`
}

// JobNode is one stay of a node in a job.
type JobNode struct {
	Node     int       `json:"node"`
	Host     string    `json:"host,omitempty"`
	JoinedAt time.Time `json:"joined_at,omitzero"`
	LeftAt   time.Time `json:"left_at,omitzero"`
	Reason   string    `json:"reason,omitempty"` // why it left
	Lost     bool      `json:"lost,omitempty"`   // it did not leave in order
	Excluded bool      `json:"excluded,omitempty"`
	// BytesPerSecond is the rate of its network in the preflight; nil: it was not measured.
	BytesPerSecond *int64 `json:"bytes_per_second,omitempty"`
	// ClockSeconds is by how much its clock was ahead of the coordinating node's; nil: unknown.
	ClockSeconds *float64 `json:"clock_s,omitempty"`
	Boot         string   `json:"boot,omitempty"` // boot ID of its machine, if it is excluded
	// SlowAt is when it last became slower than the other nodes, in the attempt SlowAttempt, and
	// WellAt when it last was no longer. The fields below are as in [events.NodeSlow], of SlowAt.
	SlowAt      time.Time `json:"slow_at,omitzero"`
	WellAt      time.Time `json:"well_at,omitzero"`
	SlowAttempt int       `json:"slow_attempt,omitempty"`
	SlowBy      string    `json:"slow_by,omitempty"`
	SlowSeconds float64   `json:"slow_s,omitempty"`
	SlowOthers  float64   `json:"slow_others_s,omitempty"`
}

// Replica is the newest copy of a node's sealed slots in the memory of another node.
type Replica struct {
	Run        string    `json:"run"`
	Trial      string    `json:"trial"`
	Node       int       `json:"node"` // index of the node whose slots were copied
	Attempt    int       `json:"attempt"`
	Checkpoint string    `json:"checkpoint"`
	On         int       `json:"on"` // index of the node that has the copy
	At         time.Time `json:"at"`
	Bytes      int64     `json:"bytes"`
	Seconds    float64   `json:"seconds"` // from the first seal to the whole copy
}

// Trial is one configuration trained in a run. Iterations and LastMetrics follow the
// line: queries derive them, and stored rows do not have them.
type Trial struct {
	Run         string              `json:"run"`
	Name        string              `json:"name"`
	Status      Status              `json:"status"`
	Message     string              `json:"message,omitempty"` // reason for its status
	Attempt     int                 `json:"attempt"`           // the newest; 0 before the first
	WorldSize   int                 `json:"world_size"`
	Job         string              `json:"job"`              // of the newest attempt
	Resume      string              `json:"resume,omitempty"` // ID that the newest attempt continues from
	Head        string              `json:"head"`             // ID of the line's newest committed checkpoint
	HeadSeq     uint64              `json:"head_seq,omitempty"`
	Iterations  int                 `json:"iterations"` // of the line
	LastMetrics map[string]any      `json:"last_metrics,omitempty"`
	Config      map[string]any      `json:"config,omitempty"`
	Parent      *events.TrialParent `json:"parent,omitempty"` // of a forked trial
	CreatedSeq  uint64              `json:"created_seq"`
	CreatedAt   time.Time           `json:"created_at"`
	LaneSeq     uint64              `json:"lane_seq"` // of the last event in its lane of decisions
}

// Attempt is one life of a trial's worker group.
type Attempt struct {
	Run        string    `json:"run"`
	Trial      string    `json:"trial"`
	Attempt    int       `json:"attempt"`
	Job        string    `json:"job,omitempty"`
	WorldSize  int       `json:"world_size"`
	Backend    string    `json:"backend,omitempty"`
	Resume     string    `json:"resume,omitempty"`
	StartedSeq uint64    `json:"started_seq"`
	StartedAt  time.Time `json:"started_at"`
	TrainingAt time.Time `json:"training_at,omitzero"` // when all ranks had connected
	StoppedAt  time.Time `json:"stopped_at,omitzero"`
	Reason     string    `json:"reason,omitempty"`
	Segments   []Segment `json:"segments"` // at least one

	Committed    string `json:"committed,omitempty"` // ID of the newest checkpoint that it committed, whatever its state now
	CommittedSeq uint64 `json:"committed_seq,omitempty"`
}

// Segment is the part of an attempt from one resume to the next.
type Segment struct {
	Seq       uint64 `json:"seq"`                  // of the decision that opened it
	Resume    string `json:"resume,omitempty"`     // ID of the checkpoint it continues
	ResumeSeq uint64 `json:"resume_seq,omitempty"` // of its begun event; 0 if it belongs to another trial
	From      int    `json:"from"`                 // the attempt's newest iteration before it
}

// WorkerState is the state of a worker.
type WorkerState string

// States of a worker.
const (
	Starting WorkerState = "starting"
	Working  WorkerState = "running"
	Exited   WorkerState = "exited"
)

// Worker is one rank of an attempt.
type Worker struct {
	Attempt   int         `json:"attempt"`
	Rank      int         `json:"rank"`
	Node      int         `json:"node"`
	LocalRank int         `json:"local_rank"`
	Devices   []string    `json:"devices,omitempty"`
	State     WorkerState `json:"state"`
	Code      int         `json:"code"`             // valid once it exited, unless by a signal
	Unseen    bool        `json:"unseen,omitempty"` // stopped with its group: its exit was not observed, and Code is -1
	Signal    string      `json:"signal,omitempty"` // name, such as "SIGKILL"
	Message   string      `json:"message,omitempty"`
	Traceback string      `json:"traceback,omitempty"`
	ExitedSeq uint64      `json:"exited_seq,omitempty"` // in the order in which exits were observed
	ExitedAt  time.Time   `json:"exited_at,omitzero"`
}

// Restore is one load of an attempt.
type Restore struct {
	Attempt    int       `json:"attempt"`
	Load       int       `json:"load"` // from 1 within the attempt
	Checkpoint string    `json:"checkpoint"`
	From       string    `json:"from,omitempty"` // RUN/TRIAL of the checkpoint, if it belongs to another trial
	WorldSize  int       `json:"world_size"`
	BegunSeq   uint64    `json:"begun_seq,omitempty"`
	BegunAt    time.Time `json:"begun_at,omitzero"`
	EndedSeq   uint64    `json:"ended_seq,omitempty"`
	EndedAt    time.Time `json:"ended_at,omitzero"`
	Tier       string    `json:"tier,omitempty"`
	Bytes      int64     `json:"bytes,omitempty"`
	Unread     []string  `json:"unread,omitempty"`
	Error      string    `json:"error,omitempty"`

	// Seconds, as in the event; nil: unknown.
	ResolveTook *float64 `json:"resolve_s,omitempty"`
	ReadTook    *float64 `json:"read_s,omitempty"`
	CheckTook   *float64 `json:"check_s,omitempty"`
}

// Report is one iteration's metrics, as queries return it.
type Report struct {
	Sequence      uint64                 `json:"sequence"`
	Time          time.Time              `json:"time"`
	Attempt       int                    `json:"attempt"`
	Iteration     int                    `json:"iteration"`                // from 1 within the attempt
	LineIteration int                    `json:"line_iteration,omitempty"` // from 1 along the line; set only by [Reports]
	Step          int64                  `json:"step"`
	Metrics       map[string]any         `json:"metrics"` // rank 0's
	Others        []events.RankMetrics   `json:"others,omitempty"`
	Summary       []events.MetricSummary `json:"summary,omitempty"` // over all ranks of a large group
	Seconds       float64                `json:"time_this_iter_s"`
	Slowest       *events.SlowestRank    `json:"slowest,omitempty"` // of several ranks; nil: unknown
}
