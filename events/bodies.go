package events

// Bodies of the families store, log, audit, access, job, group, trial, search, report, restore and gpu.
// Attempt numbers count from 1 over all jobs of a trial. Sizes are in bytes.

// StoreCreated is the first event of a store, at sequence 1.
type StoreCreated struct {
	Store  string `json:"store"`            // identity, a UUID
	Format int    `json:"format"`           // of the store's directory and log
	Data   string `json:"data"`             // where checkpoint data lives: "data" next to the log, a directory, or the URL of a bucket
	Bucket string `json:"bucket,omitempty"` // URL of the bucket, where the log is in a directory and the data is not

	Formerly []string `json:"formerly,omitempty"` // earlier identities, from receipts whose log was lost; newest first
}

// LogVoided records that the message at a sequence is not a valid event. The owner of
// the store appends it. Readers skip the message with or without it.
type LogVoided struct {
	Sequence uint64 `json:"sequence"` // of the message
	Digest   string `json:"digest"`   // SHA-256 over the message's subject, a line feed and its body
	Why      string `json:"why"`      // why it is not an event
}

// AuditSealed puts the state of the tamper evidence into the log: of each trial, how many
// events it has and which they are. The owner of the store appends it. Who holds a head
// of the log that includes it can verify that a run has no other events.
type AuditSealed struct {
	Size uint64 `json:"size"` // the events 1 to Size are covered
	Root string `json:"root"` // of the log's tree over them, in hex
	Rows uint64 `json:"rows"` // number of trials
	Runs string `json:"runs"` // root of the tree over the rows of the trials, in hex
	Key  string `json:"key"`  // that signs the heads of the log: a verifier key of C2SP signed-note

	Previous string `json:"previous,omitempty"` // in the first one of a new origin: the newest known signed note of the log that this one follows
}

// AccessGranted records that a user got a token for the servers of the store. The file of
// users that a server reads decides who may connect; this is the record of it. The token
// itself is in no event.
//
// In the lane ckpt._.keys.s it grants a key with which the user signs decisions, or the
// requirement that decisions of runs are signed. There it counts only with the signature
// of an admin's key; the first one is signed with the key that it grants.
type AccessGranted struct {
	User    string `json:"user"`              // the events that the user appends have the principal user:NAME
	Role    string `json:"role"`              // reader, operator, admin or auditor
	Hash    string `json:"hash"`              // first 16 hexadecimal digits of the token's SHA-256; empty: it grants no token
	Token   string `json:"token,omitempty"`   // name of the token
	Expires string `json:"expires,omitempty"` // RFC 3339; without: never
	By      string `json:"by,omitempty"`      // user and host of the command that issued it, as the command names them

	Key     string   `json:"key,omitempty"`     // verifier key of C2SP signed-note, of the name User
	Runs    []string `json:"runs,omitempty"`    // patterns of the runs whose decisions the key may sign; without: all
	Require []string `json:"require,omitempty"` // patterns of runs: from here on, their decisions must be signed
}

// AccessRevoked records that tokens of a user were removed from a file of users, or, in the
// lane ckpt._.keys.s, that keys of the user sign no more.
type AccessRevoked struct {
	User   string   `json:"user"`         // as in [AccessGranted]
	Hashes []string `json:"hashes"`       // of the tokens, as in [AccessGranted]
	By     string   `json:"by,omitempty"` // as in [AccessGranted]

	Keys    []string `json:"keys,omitempty"`    // keys that sign nothing after this event, as NAME+HASH
	Require []string `json:"require,omitempty"` // patterns of runs: the requirement of [AccessGranted] ends
}

// JobStarted records that a trainer was launched for a run.
type JobStarted struct {
	Job     string   `json:"job"` // a UUID
	Host    string   `json:"host"`
	PID     int      `json:"pid"`
	Command []string `json:"command"`
	NProc   int      `json:"nproc"`
	NNodes  int      `json:"nnodes"`
	Resume  string   `json:"resume"` // as requested: auto, none, require or a reference

	Flags []string `json:"flags,omitempty"` // the trainer's flags as given; Flags and Command are enough to launch the job again
	Dir   string   `json:"dir,omitempty"`   // working directory
	Logs  string   `json:"logs,omitempty"`  // directory of the workers' output, relative to the store

	SlurmJob      string `json:"slurm_job,omitempty"`      // ID of the job of Slurm, without the step
	SlurmRestarts int    `json:"slurm_restarts,omitempty"` // how often Slurm requeued it
}

// NodeJoined records that a node joined a job.
type NodeJoined struct {
	Job  string `json:"job"`
	Node int    `json:"node"`
	Host string `json:"host"`
}

// NodeLeft records that a node left a job. An excluded one was ended by the coordinating trainer, and its
// machine cannot join the job again.
type NodeLeft struct {
	Job    string `json:"job"`
	Node   int    `json:"node"`
	Reason string `json:"reason"`
	Lost   bool   `json:"lost,omitempty"` // the node was silent, or its trainer started again; otherwise its trainer ended in order
	Term   string `json:"term,omitempty"` // of its writer, as in job.ended

	Excluded bool   `json:"excluded,omitempty"` // the node is excluded from the job
	Host     string `json:"host,omitempty"`     // of an excluded node
	Boot     string `json:"boot,omitempty"`     // boot ID of an excluded node's machine
}

// NodeMeasured records the rate of a node's network in the preflight of a job.
type NodeMeasured struct {
	Job            string `json:"job"`
	Node           int    `json:"node"`
	BytesPerSecond int64  `json:"bytes_per_second"` // with its best partner, the slower direction; 0: it reached none
	Partners       []int  `json:"partners"`         // nodes that it was measured with

	Clock *float64 `json:"clock_s,omitempty"` // seconds by which its clock is ahead of the coordinating node's, at least; 0 if they may be equal, absent if unknown
}

// NodeSlow records that a node of a group became slower than the other nodes, or is no longer. The
// times are medians of the samples that count: iterations, or saves.
type NodeSlow struct {
	Job     string  `json:"job"`
	Attempt int     `json:"attempt"`
	Node    int     `json:"node"`           // index
	Over    bool    `json:"over,omitempty"` // the node is no longer slow
	By      string  `json:"by"`             // what is slow: "busy", the ranks' own work in an iteration, or "copy", their copies in saves
	Seconds float64 `json:"seconds"`        // of the node's median rank: in an iteration, or for each GB of a copy
	Others  float64 `json:"others_s"`       // median of the same time of the other nodes
	Behind  int     `json:"behind"`         // samples in which the node took at least 1.3 times as long as the others
	Of      int     `json:"of"`             // samples that count, at most 30
}

// JobEnded records that a trainer exited in order. A killed trainer appends no such
// event.
type JobEnded struct {
	Job      string `json:"job"`
	ExitCode int    `json:"exit_code"`
	Reason   string `json:"reason,omitempty"`
	Term     string `json:"term,omitempty"` // ID of the decision by which its writer coordinates, in a job that outlives its coordinator: its group.coordinator, else a group.started
}

// RankPlacement is the node and the devices of one rank of a group.
type RankPlacement struct {
	Rank      int      `json:"rank"`
	Node      int      `json:"node"`
	LocalRank int      `json:"local_rank"`
	Devices   []string `json:"devices,omitempty"`
}

// GroupStarted opens an attempt: one life of a trial's worker group. It fences all
// older attempts of the trial. Resume is the full ID of the checkpoint that the attempt
// continues from; it is empty for a fresh start. Later checkpoints of the old line
// become superseded. Version 2 places the ranks of a group over several nodes by node.
type GroupStarted struct {
	Attempt   int             `json:"attempt"`
	Job       string          `json:"job"`
	WorldSize int             `json:"world_size"`
	Ranks     []RankPlacement `json:"ranks"`
	Backend   string          `json:"backend"`
	Resume    string          `json:"resume,omitempty"`

	Nodes []NodeRun `json:"nodes,omitempty"` // version 2: placement of all ranks, in place of ranks
	Map   *Blob     `json:"map,omitempty"`   // version 2: index, key, host and address of each node: arrays in a JSON object

	PassedOver     []PassedOver `json:"passed_over,omitempty"`      // newer checkpoints of the line whose files are incomplete or damaged, newest first, at most 100
	MorePassedOver int          `json:"more_passed_over,omitempty"` // number of such checkpoints beyond those listed
}

// GroupCoordinator records that another node coordinates a living group from now on: the
// node that did is silent, and has no ranks. The attempt continues, with the same job. The
// coordinator before it may decide nothing any more.
type GroupCoordinator struct {
	Attempt int    `json:"attempt"`
	Job     string `json:"job"`
	Node    int    `json:"node"` // index of the node that coordinates
	Host    string `json:"host"`
	Reason  string `json:"reason"`
}

// PassedOver is a checkpoint that an attempt did not resume from because its files are
// incomplete or damaged.
type PassedOver struct {
	Checkpoint string `json:"checkpoint"`
	Reason     string `json:"reason"` // what is wrong with its files
}

// TrainingStarted records that every rank of the group has connected.
type TrainingStarted struct {
	Attempt int `json:"attempt"`
}

// WorkerExited records how a rank's process ended. Signal is a name such as "SIGKILL",
// and empty when no signal ended the process.
type WorkerExited struct {
	Attempt   int    `json:"attempt"`
	Rank      int    `json:"rank"`
	Code      int    `json:"code"`
	Signal    string `json:"signal,omitempty"`
	Message   string `json:"message,omitempty"`
	Traceback string `json:"traceback,omitempty"`
	Unseen    bool   `json:"unseen,omitempty"` // the process was not a child of the event's source: its exit status is unknown, and Code is -1
}

// GroupStopped records that no process of the attempt is left. Failure is the budget
// that the end is charged to: "worker", "infrastructure" or "preemption". It is empty
// if the group did not fail.
type GroupStopped struct {
	Attempt int    `json:"attempt"`
	Reason  string `json:"reason"`
	Failure string `json:"failure,omitempty"` // worker, infrastructure or preemption
	Term    string `json:"term,omitempty"`    // ID of the decision by which its writer coordinates: the group.started, or the newest group.coordinator
}

// TrialCreated is the first decision of a trial.
type TrialCreated struct {
	Config map[string]any `json:"config,omitempty"`
	Parent *TrialParent   `json:"parent,omitempty"`
}

// TrialParent is the checkpoint that a forked trial continues from.
type TrialParent struct {
	Run        string `json:"run"`
	Trial      string `json:"trial"`
	Checkpoint string `json:"checkpoint"`
}

// TrialStopRequested asks the trial's workers to end. With Preempt they save first, on
// a step that all ranks agree on. Job names the job that must obey; a later job ignores
// the request.
type TrialStopRequested struct {
	Reason  string `json:"reason"`
	Preempt bool   `json:"preempt,omitempty"` // save, then end
	Job     string `json:"job,omitempty"`
}

// TrialPaused records that the trial ended with a checkpoint and can be resumed.
type TrialPaused struct {
	Attempt int    `json:"attempt"`
	Reason  string `json:"reason"`
}

// TrialCompleted records that all ranks of an attempt ended successfully.
type TrialCompleted struct {
	Attempt int `json:"attempt"`
}

// TrialErrored records that the trial's failure budget is used up.
type TrialErrored struct {
	Attempt int    `json:"attempt"`
	Message string `json:"message"`
}

// SearchBegun opens the search of a run for the best of several trials, by asynchronous
// successive halving or population-based training. It is the first decision about the run
// itself, of no trial. Later jobs of the run continue the search as it is defined here.
type SearchBegun struct {
	Job       string         `json:"job"`
	Metric    string         `json:"metric"`           // that trials are compared by
	Mode      string         `json:"mode"`             // min or max: which values of the metric are better
	Trials    int            `json:"trials"`           // number of trials
	Seed      int64          `json:"seed"`             // of the random draws of configurations
	Grace     int64          `json:"grace"`            // steps that each trial is trained
	Reduction int            `json:"reduction"`        // of this many trials on a rung, one is trained further; at least 2
	MaxSteps  int64          `json:"max_steps"`        // a trial is asked to end at its first report of this step or a later one
	Finite    bool           `json:"finite,omitempty"` // infinite values of the metric count as NaN
	Space     map[string]any `json:"space"`            // values or domains of the configuration, by name

	// Of population-based training, which has no grace and no reduction.
	Scheduler string    `json:"scheduler,omitempty"`     // pbt: population-based training; absent: asynchronous successive halving
	Every     int64     `json:"perturb_every,omitempty"` // steps of an interval
	Quantile  float64   `json:"quantile,omitempty"`      // share of the trials that are replaced after an interval, at most 0.5
	Resample  float64   `json:"resample,omitempty"`      // probability that a value is drawn again from its domain
	Factors   []float64 `json:"factors,omitempty"`       // a number that is not drawn again is multiplied by one of these, chosen at random
	Perturb   []string  `json:"perturb,omitempty"`       // names of the configuration that change
}

// SearchAssigned is a decision of a search: a trial is trained until it reports a step. It
// follows from the events up to a sequence alone.
type SearchAssigned struct {
	Job    string `json:"job"`
	Trial  string `json:"trial"`
	Rung   int    `json:"rung"`             // from 0
	Steps  int64  `json:"steps"`            // that the rung has
	After  uint64 `json:"after"`            // sequence of the last event that the decision follows from
	Reason string `json:"reason,omitempty"` // why it is this trial

	// Of a trial of population-based training that is forked from another one.
	Parent   *TrialParent   `json:"parent,omitempty"`   // the checkpoint that it begins with
	Replaces string         `json:"replaces,omitempty"` // the trial whose place it takes
	Config   map[string]any `json:"config,omitempty"`   // that of the parent's trial, perturbed: the values of the search space
}

// Metrics is one iteration's report of all ranks. Values are numbers,
// strings or booleans; non-finite numbers are the strings "NaN", "Infinity"
// and "-Infinity". Its natural key is (attempt, iteration). In a large group, a summary
// stands for the metrics of the ranks other than 0.
type Metrics struct {
	Attempt   int             `json:"attempt"`
	Iteration int             `json:"iteration"` // from 1 within the attempt
	Step      int64           `json:"step"`
	Metrics   map[string]any  `json:"metrics"`           // of rank 0; they stand for the trial
	Others    []RankMetrics   `json:"others,omitempty"`  // ranks whose metrics differ from rank 0's; with a summary, only the furthest from the mean
	Summary   []MetricSummary `json:"summary,omitempty"` // of each metric that is a number, over all ranks
	Seconds   float64         `json:"time_this_iter_s"`  // rank 0's wall time since its last report
	Slowest   *SlowestRank    `json:"slowest,omitempty"` // the last rank to report, in a group of several
}

// SlowestRank is the rank that the others of its group waited for in one iteration.
type SlowestRank struct {
	Rank int     `json:"rank"`
	Late float64 `json:"late_s"` // seconds between the first rank's report and this one's, as they arrived
}

// MetricSummary is one metric over all ranks of a group. Ranks that report NaN count in
// nans only.
type MetricSummary struct {
	Name  string `json:"name"`           // of the metric
	Ranks int    `json:"ranks"`          // number of ranks that report a number
	NaNs  int    `json:"nans,omitempty"` // number of ranks that report NaN
	Min   any    `json:"min,omitempty"`  // least value
	MinOf int    `json:"min_of"`         // lowest rank with the least value
	Max   any    `json:"max,omitempty"`  // largest value
	MaxOf int    `json:"max_of"`         // lowest rank with the largest value
	Mean  any    `json:"mean,omitempty"` // over the ranks that report a number
}

// RankMetrics is the report of one rank.
type RankMetrics struct {
	Rank    int            `json:"rank"`
	Metrics map[string]any `json:"metrics"`
}

// RestoreBegun resolves the n-th load of an attempt once, for all ranks.
type RestoreBegun struct {
	Attempt    int    `json:"attempt"`
	Load       int    `json:"load"` // from 1 within the attempt
	Checkpoint string `json:"checkpoint"`
	From       string `json:"from,omitempty"` // RUN/TRIAL of the checkpoint, if it belongs to another trial
	WorldSize  int    `json:"world_size"`
}

// RestoreCompleted records that all ranks have the data they asked for.
type RestoreCompleted struct {
	Attempt    int      `json:"attempt"`
	Load       int      `json:"load"`
	Checkpoint string   `json:"checkpoint"`
	Tier       string   `json:"tier"`             // sources of the bytes, with "+" between: "slots" of shared memory, "peers", "files"
	Bytes      int64    `json:"bytes"`            // bytes read, in whole blocks; each is counted once for all ranks
	Slots      int64    `json:"slots,omitempty"`  // part of bytes that came from slots of shared memory
	Peers      int64    `json:"peers,omitempty"`  // part of bytes that came from replicas of other nodes' slots
	Passed     int64    `json:"passed,omitempty"` // part of bytes that another node has read from files and passed on
	Wanted     int64    `json:"wanted,omitempty"` // stored bytes that the ranks asked for, each counted once: the least that must be read
	Unread     []string `json:"unread,omitempty"` // saved keys that no rank asked for

	Resolve *float64 `json:"resolve_s,omitempty"` // seconds in which the checkpoint was found and opened
	Read    *float64 `json:"read_s,omitempty"`    // seconds from then until the slowest node had read its part
	Check   *float64 `json:"check_s,omitempty"`   // seconds from then until the slowest node's ranks had verified what they copied; absent if no rank verifies
}

// RestoreFailed records why a load failed.
type RestoreFailed struct {
	Attempt    int    `json:"attempt"`
	Load       int    `json:"load"`
	Checkpoint string `json:"checkpoint"`
	Error      string `json:"error"`
}

// GPUUnhealthy records that a device must not be used.
type GPUUnhealthy struct {
	Node   int    `json:"node"`
	Device string `json:"device"` // UUID
	Reason string `json:"reason"`
}

// GPURecovered revokes a [GPUUnhealthy].
type GPURecovered struct {
	Node   int    `json:"node"`
	Device string `json:"device"`
}

// Kind implements [Body] for each type.
func (StoreCreated) Kind() Kind       { return "store.created" }
func (LogVoided) Kind() Kind          { return "log.voided" }
func (AuditSealed) Kind() Kind        { return "audit.sealed" }
func (AccessGranted) Kind() Kind      { return "access.granted" }
func (AccessRevoked) Kind() Kind      { return "access.revoked" }
func (JobStarted) Kind() Kind         { return "job.started" }
func (NodeJoined) Kind() Kind         { return "job.node_joined" }
func (NodeMeasured) Kind() Kind       { return "job.node_measured" }
func (NodeLeft) Kind() Kind           { return "job.node_left" }
func (NodeSlow) Kind() Kind           { return "node.slow" }
func (JobEnded) Kind() Kind           { return "job.ended" }
func (GroupStarted) Kind() Kind       { return "group.started" }
func (GroupCoordinator) Kind() Kind   { return "group.coordinator" }
func (TrainingStarted) Kind() Kind    { return "group.training_started" }
func (WorkerExited) Kind() Kind       { return "group.worker_exited" }
func (GroupStopped) Kind() Kind       { return "group.stopped" }
func (TrialCreated) Kind() Kind       { return "trial.created" }
func (TrialStopRequested) Kind() Kind { return "trial.stop_requested" }
func (TrialPaused) Kind() Kind        { return "trial.paused" }
func (TrialCompleted) Kind() Kind     { return "trial.completed" }
func (TrialErrored) Kind() Kind       { return "trial.errored" }
func (SearchBegun) Kind() Kind        { return "search.begun" }
func (SearchAssigned) Kind() Kind     { return "search.assigned" }
func (Metrics) Kind() Kind            { return "report.metrics" }
func (RestoreBegun) Kind() Kind       { return "restore.begun" }
func (RestoreCompleted) Kind() Kind   { return "restore.completed" }
func (RestoreFailed) Kind() Kind      { return "restore.failed" }
func (GPUUnhealthy) Kind() Kind       { return "gpu.unhealthy" }
func (GPURecovered) Kind() Kind       { return "gpu.recovered" }
