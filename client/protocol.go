package client

import (
	"encoding/binary"

	"github.com/ckptstore/ckptstore/tensor"
)

// The socket protocol: HTTP/1.1 over a unix socket, one socket per rank and
// attempt. Bodies are JSON; bulk data goes through files in shared memory. Every
// request carries the header "Authorization: Bearer <token>".
//
//	POST /v1/hello           Hello         → Context
//	POST /v1/report          Report        → ReportReply   blocks until the trainer has all ranks' reports; Done: the last one
//	POST /v1/heartbeat       {}            → {}            this rank is alive
//	POST /v1/should_stop     {}            → StopReply     whether to end, for workers that do not report
//	POST /v1/hold_signals    HoldSignals   → {}            blocks until the trainer ends the worker by a signal
//	POST /v1/release_signals HoldSignals   → {}            the signals act again
//	POST /v1/signaled        Signaled      → SignaledReply a held signal arrived
//	POST /v1/save            SaveRequest   → SaveReply     a staging slot to copy into
//	POST /v1/seal            SealRequest   → {}            the copy is complete
//	POST /v1/slots           {}            → Slots         blocks until the memory of all slots is allocated
//	POST /v1/wait            WaitRequest   → WaitReply     blocks until the save reaches the state
//	POST /v1/load            LoadRequest   → LoadReply     a collective: every rank calls it
//	POST /v1/loaded          LoadedRequest → {}            the copy out of the arena is complete
//	POST /v1/gather          parts, header → parts         one part from each rank
//	POST /v1/broadcast       parts, header → parts         one part from the root
//	POST /v1/send            bytes, header → nothing       a message to one rank
//	POST /v1/recv            {}, header    → bytes, header blocks until a message from any rank arrives
//	POST /v1/set             StoreSet      → {}            sets a value for all ranks
//	POST /v1/get             StoreGet      → StoreValue    blocks until the key is set
//
// Collectives carry raw bytes: the request body is this rank's part, the
// reply is a sequence of parts, each a little-endian uint64 length and its
// bytes. The parts of all ranks have the same length; in a broadcast only the
// root sends one. [HeaderSeq] counts collectives of both kinds from 1, per rank. A
// broadcast also has [HeaderRoot] and [HeaderSize]. docs/reference/protocol.md is the full
// description.
//
// An error is a [Problem] with status 400 (bad request), 401 (token), 409
// (conflict with other ranks), 410 (the attempt is over), 412 (unknown plan: send
// the items), 500, 503 (no staging slot is free), 504 (deadline) or 507 (a disk or
// shared memory is full).
const (
	Protocol   = 3
	HeaderSeq  = "Ckptstore-Seq"
	HeaderRoot = "Ckptstore-Root"
	HeaderSize = "Ckptstore-Size"
)

// Environment that the trainer sets for every worker, in addition to torchrun's.
const (
	EnvSocket  = "CKPTSTORE_SOCKET"
	EnvToken   = "CKPTSTORE_TOKEN"
	EnvRun     = "CKPTSTORE_RUN"
	EnvJob     = "CKPTSTORE_JOB"
	EnvStoreID = "CKPTSTORE_STORE_ID" // identity of the store, for the trainer's own use
	EnvTrial   = "CKPTSTORE_TRIAL"
	EnvAttempt = "CKPTSTORE_ATTEMPT"
	EnvNode    = "CKPTSTORE_NODE" // index of the node, in a job of several nodes
	EnvResume  = "CKPTSTORE_RESUME"
	EnvRPC     = "CKPTSTORE_RPC"   // path of the socket where the worker may serve the trainer's calls
	EnvQuiet   = "CKPTSTORE_QUIET" // "1" under trainer --quiet: workers log no advice, but still warn of lost data
)

// Hello is a worker's first request.
type Hello struct {
	Protocols []int `json:"protocols"` // versions that the client supports
	PID       int   `json:"pid"`
}

// Context tells a worker its rank, job and trial.
type Context struct {
	Protocol  int            `json:"protocol"` // the version in use
	Run       string         `json:"run"`
	Trial     string         `json:"trial"`
	Job       string         `json:"job"`
	Attempt   int            `json:"attempt"`
	Rank      int            `json:"rank"`
	WorldSize int            `json:"world_size"`
	Resume    string         `json:"resume,omitempty"` // full ID to restore from, or empty
	Config    map[string]any `json:"config,omitempty"` // of the trial
	Store     string         `json:"store,omitempty"`  // identity of the store, as in its store.json
}

// Report is one iteration's metrics of one rank: numbers, strings, booleans.
type Report struct {
	Step    int64          `json:"step"`
	Metrics map[string]any `json:"metrics"`
	Done    bool           `json:"done,omitempty"` // the function has finished: this is the rank's last report
}

// BusyThisIter is the metric of a report that has the seconds of the iteration in which the rank
// waited for no other rank. The trainer compares the nodes by it, and does not record it: see
// docs/howto/nodes.md.
const BusyThisIter = "busy_this_iter_s"

// Item describes one shard or one value.
type Item struct {
	FQN      string       `json:"fqn"`
	Value    bool         `json:"value,omitempty"`
	PerRank  bool         `json:"per_rank,omitempty"` // each rank has its own value
	Optional bool         `json:"optional,omitempty"` // load: omit a per-rank value that the rank did not save
	Rank     *int         `json:"rank,omitempty"`     // load: rank of a per-rank value, default own
	DType    tensor.DType `json:"dtype,omitzero"`
	Shape    []int64      `json:"shape,omitempty"` // of the whole tensor
	Offsets  []int64      `json:"offsets,omitempty"`
	Sizes    []int64      `json:"sizes,omitempty"`
	Bytes    int64        `json:"bytes"` // save: size of the data
	// Path is, in a save, the item's place in the state dict before it was
	// flattened, if that is not the FQN itself: string keys and integer list
	// indexes.
	Path []any `json:"path,omitempty"`
	// Check is, in a save, a short hexadecimal digest of the data. The trainer
	// compares the digests of ranks that hold copies of one tensor. Optional.
	Check string `json:"check,omitempty"`
}

// Shard returns the item's tensor. Its slices are never nil, so that equal
// items encode equally.
func (it Item) Shard() tensor.Shard {
	return tensor.Shard{
		FQN: it.FQN, DType: it.DType, Global: append(tensor.Shape{}, it.Shape...),
		Box: tensor.Box{Offsets: append([]int64{}, it.Offsets...), Sizes: append([]int64{}, it.Sizes...)},
	}
}

// SaveRequest asks for a staging slot. Participants are the ranks that take
// part, by default all.
type SaveRequest struct {
	Name         string `json:"name,omitempty"` // default step-<step>
	Step         int64  `json:"step"`
	Participants []int  `json:"participants,omitempty"`
	Items        []Item `json:"items,omitempty"`
	Plan         string `json:"plan,omitempty"` // instead of Items: the plan of an earlier reply to the same items
}

// SaveReply is the slot. The worker copies item i to Offsets[i] of the file
// Arena, then stores Generation in bytes 8 to 16. The offsets belong to the plan
// and are omitted if the request named one.
type SaveReply struct {
	Checkpoint string  `json:"checkpoint"`
	Skipped    string  `json:"skipped,omitempty"` // why the save was skipped; then there is no slot
	Plan       string  `json:"plan"`              // stands for the items in later saves of the attempt
	Slot       int     `json:"slot"`              // number of the slot, from 0
	Arena      string  `json:"arena"`
	Size       int64   `json:"size"` // of the file
	Generation uint64  `json:"generation"`
	Offsets    []int64 `json:"offsets,omitempty"` // from the beginning of the file
}

// Slots are a rank's slots whose memory is allocated.
type Slots struct {
	Slots []Slot `json:"slots"`
}

// Slot is the file of a staging slot, until a reply names another.
type Slot struct {
	Slot  int    `json:"slot"`
	Arena string `json:"arena"`
	Size  int64  `json:"size"`
}

// CheckpointRef names a checkpoint by its full ID.
type CheckpointRef struct {
	Checkpoint string `json:"checkpoint"`
}

// SealRequest reports that the copy of a save is complete, with the worker's own durations in
// seconds. Without them the trainer measures how long it took to grant the slot, and the time
// from then to the seal.
type SealRequest struct {
	Checkpoint string   `json:"checkpoint"`
	Waited     *float64 `json:"waited_s,omitempty"` // for the reply to save
	Copied     *float64 `json:"copied_s,omitempty"` // from then until the copy was complete
}

// AbortRequest reports that this rank cannot finish a save.
type AbortRequest struct {
	Checkpoint string `json:"checkpoint"`
	Reason     string `json:"reason"`
}

// States of a save, in order. Aborted is final.
const (
	Begun     = "begun"
	Staged    = "staged"
	Committed = "committed"
	Aborted   = "aborted"
)

// WaitRequest blocks until a checkpoint reaches a state.
type WaitRequest struct {
	Checkpoint string `json:"checkpoint"`
	State      string `json:"state"`
}

// WaitReply is the state that the save reached: the requested state or a later
// one, or aborted with its reason. NoRoom is set if the disk had no room for it.
type WaitReply struct {
	State  string `json:"state"`
	Reason string `json:"reason,omitempty"`
	NoRoom bool   `json:"no_room,omitempty"`
}

// LoadRequest asks for boxes and values of a checkpoint. With Strict, keys of
// the checkpoint that no rank requests are an error.
type LoadRequest struct {
	Ref    string `json:"ref,omitempty"` // default: the checkpoint to resume from
	Strict bool   `json:"strict,omitempty"`
	// Partial omits items whose key the checkpoint lacks.
	Partial bool `json:"partial,omitempty"`
	// StrictDType makes a dtype other than the saved one an error; without it,
	// elements are converted.
	StrictDType bool `json:"strict_dtype,omitempty"`
	// SameKind makes the conversion of floats to integers an error.
	SameKind bool `json:"same_kind,omitempty"`
	// Participants are the ranks that load, the same on each of them; default all.
	Participants []int `json:"participants,omitempty"`
	// Refused is why this rank, a participant, cannot load. The load then fails on all ranks.
	Refused string `json:"refused,omitempty"`
	// Verifies means that this rank verifies the bytes that it copies, using the checks of
	// the reply, and reports the result in [LoadedRequest]. The reply has checks only if
	// all ranks set it.
	Verifies bool   `json:"verifies,omitempty"`
	Items    []Item `json:"items"`
}

// LoadReply locates the bytes: item i is the Sizes[i] bytes at Offsets[i] of the
// file Arenas[In[i]], tensors row-major in the requested box. An omitted item has
// size -1. The bytes do not change until the rank releases the load.
type LoadReply struct {
	Checkpoint string      `json:"checkpoint"`
	Step       int64       `json:"step"`
	Load       int         `json:"load"` // its number, from 1; LoadedRequest releases it
	Arenas     []LoadArena `json:"arenas"`
	In         []int       `json:"in"`
	Offsets    []int64     `json:"offsets"`
	Sizes      []int64     `json:"sizes"`
	Checks     *Checks     `json:"checks,omitempty"`
	Unread     []string    `json:"unread,omitempty"` // keys that no rank requested
}

// Checks are the checksums of items that the trainer has not read: the rank that copies
// them verifies them. Each item lies in consecutive blocks of 64 KiB. The first block
// begins Before bytes in front of the item, and the last ends After bytes behind it; only
// the last may be shorter. The trainer has verified the items that are not in Items.
type Checks struct {
	Items  []int   `json:"items"` // ascending
	Before []int64 `json:"before"`
	After  []int64 `json:"after"`
	CRC32C []byte  `json:"crc32c"` // of each block, item by item, u32 LE
}

// SmallestChecked is the size in bytes of the smallest item that ranks verify. The
// trainer verifies smaller ones itself: they are adjacent, and it verifies many at a time.
const SmallestChecked = 64 << 10

// Add appends the check of an item. Items must be added in ascending order.
func (c *Checks) Add(item int, before, after int64, crc32c []uint32) {
	c.Items, c.Before, c.After = append(c.Items, item), append(c.Before, before), append(c.After, after)
	for _, sum := range crc32c {
		c.CRC32C = binary.LittleEndian.AppendUint32(c.CRC32C, sum)
	}
}

// LoadArena is a file to read from: a staging slot that holds the checkpoint, one of the
// checkpoint's files, or a file made for items that no other file holds in the requested form.
type LoadArena struct {
	Path string `json:"path"`
	Size int64  `json:"size"` // readable bytes
}

// LoadedRequest releases the files of a load, named by its number.
type LoadedRequest struct {
	Load int `json:"load,omitempty"`
	// Damaged describes the checks that failed, Failed why the rank could not run all of
	// them. Both are empty if all checks passed.
	Damaged string `json:"damaged,omitempty"`
	Failed  string `json:"failed,omitempty"`
}

// Problem is the body of an error reply.
type Problem struct {
	Message string `json:"error"`
}
