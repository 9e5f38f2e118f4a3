package client

import (
	"encoding/binary"

	"github.com/ckptstore/ckptstore/tensor"
)

// The socket protocol: HTTP/1.1 over a unix socket, one socket a rank and
// attempt, JSON bodies, bulk bytes through files in shared memory. Every
// request carries the header "Authorization: Bearer <token>".
//
//	POST /v1/hello       Hello          → Context
//	POST /v1/report      Report         → ReportReply   blocks until the trainer took it; Done: the last one
//	POST /v1/heartbeat   {}             → {}            the rank is alive
//	POST /v1/should_stop {}             → StopReply     whether to end, for who does not report
//	POST /v1/hold_signals    HoldSignals → {}            blocks until the trainer ends the worker by a signal
//	POST /v1/release_signals HoldSignals → {}          its signals act again
//	POST /v1/signaled        Signaled  → SignaledReply a signal came that was held back
//	POST /v1/save        SaveRequest    → SaveReply     a staging slot to copy into
//	POST /v1/seal        CheckpointRef  → {}            the copy is complete
//	POST /v1/slots       {}             → Slots         blocks until the memory of all slots is made
//	POST /v1/wait        WaitRequest    → WaitReply     blocks until the state is reached
//	POST /v1/load        LoadRequest    → LoadReply     a collective: every rank calls it
//	POST /v1/loaded      LoadedRequest  → {}            the copy out of the arena is complete
//	POST /v1/gather      parts, header  → parts         one part from each rank
//	POST /v1/broadcast   parts, header  → parts         one part from the root
//	POST /v1/send        bytes, header  → nothing       a message to one rank
//	POST /v1/recv        {}, header     → bytes, header blocks until there is a message of any rank
//	POST /v1/set         StoreSet       → {}            leaves a value for all ranks
//	POST /v1/get         StoreGet       → StoreValue    blocks until the key is set
//
// Collectives carry raw bytes: the request body is this rank's part, the
// reply is a sequence of parts, each a little-endian uint64 length and its
// bytes. All ranks' parts are equally long; of a broadcast only the root sends
// one. Their headers are [HeaderSeq], counted from 1 by each rank over both
// kinds, and, of a broadcast, [HeaderRoot] and [HeaderSize]. docs/reference/protocol.md has
// all of it. An error is a [Problem] with a status of 400 (bad request), 401 (token), 409 (conflict with other ranks), 410 (the attempt is
// over), 412 (a plan that is not known: send the items), 500, 503 (no staging slot is
// free), 504 (deadline) or 507 (a disk or shared memory is full).
const (
	Protocol   = 3
	HeaderSeq  = "Ckptstore-Seq"
	HeaderRoot = "Ckptstore-Root"
	HeaderSize = "Ckptstore-Size"
)

// Environment that the trainer gives to every worker beside torchrun's.
const (
	EnvSocket  = "CKPTSTORE_SOCKET"
	EnvToken   = "CKPTSTORE_TOKEN"
	EnvRun     = "CKPTSTORE_RUN"
	EnvJob     = "CKPTSTORE_JOB"
	EnvStoreID = "CKPTSTORE_STORE_ID" // identity of the store, for the trainer's own use
	EnvTrial   = "CKPTSTORE_TRIAL"
	EnvAttempt = "CKPTSTORE_ATTEMPT"
	EnvResume  = "CKPTSTORE_RESUME"
	EnvRPC     = "CKPTSTORE_RPC"   // path of the socket where the worker may serve the trainer's calls
	EnvQuiet   = "CKPTSTORE_QUIET" // "1" where the trainer was told to be quiet: workers give no advice, and warn of what is lost all the same
)

// Hello opens the conversation.
type Hello struct {
	Protocols []int `json:"protocols"` // versions that the client speaks
	PID       int   `json:"pid"`
}

// Context says who the worker is.
type Context struct {
	Protocol  int            `json:"protocol"` // the version that both speak
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
	Done    bool           `json:"done,omitempty"` // the function has finished: no report of this rank comes after it
}

// Item describes one shard or one value.
type Item struct {
	FQN      string       `json:"fqn"`
	Value    bool         `json:"value,omitempty"`
	PerRank  bool         `json:"per_rank,omitempty"` // each rank has its own value
	Optional bool         `json:"optional,omitempty"` // load: a per-rank value of a rank that saved none is left out
	Rank     *int         `json:"rank,omitempty"`     // load: whose per-rank value, default own
	DType    tensor.DType `json:"dtype,omitzero"`
	Shape    []int64      `json:"shape,omitempty"` // of the whole tensor
	Offsets  []int64      `json:"offsets,omitempty"`
	Sizes    []int64      `json:"sizes,omitempty"`
	Bytes    int64        `json:"bytes"` // save: size of the data
	// Path is, in a save, where the item was in the state dict before that was
	// flattened, when that is not the FQN itself: keys, which are strings, and
	// indexes of lists, which are integers.
	Path []any `json:"path,omitempty"`
	// Check is, in a save, a short digest of the data in hexadecimal: ranks
	// whose copies of a tensor differ have different ones. It may be left out.
	Check string `json:"check,omitempty"`
}

// Shard is the tensor of an item. Its slices are never nil, so that equal items
// encode equally.
func (it Item) Shard() tensor.Shard {
	return tensor.Shard{
		FQN: it.FQN, DType: it.DType, Global: append(tensor.Shape{}, it.Shape...),
		Box: tensor.Box{Offsets: append([]int64{}, it.Offsets...), Sizes: append([]int64{}, it.Sizes...)},
	}
}

// SaveRequest asks for a slot. Participants are the ranks that take part, by
// default all.
type SaveRequest struct {
	Name         string `json:"name,omitempty"` // default step-<step>
	Step         int64  `json:"step"`
	Participants []int  `json:"participants,omitempty"`
	Items        []Item `json:"items,omitempty"`
	Plan         string `json:"plan,omitempty"` // instead of the items: that of a reply to the same ones
}

// SaveReply is the slot: item i's bytes go to Offsets[i] of the file Arena, and
// then Generation to bytes 8 to 16 of it. The offsets are those of the plan, and
// are left out when the request had its token.
type SaveReply struct {
	Checkpoint string  `json:"checkpoint"`
	Skipped    string  `json:"skipped,omitempty"` // why there is no such save, and no slot
	Plan       string  `json:"plan"`              // stands for the items in later saves of the attempt
	Slot       int     `json:"slot"`              // number of the slot, from 0
	Arena      string  `json:"arena"`
	Size       int64   `json:"size"` // of the file
	Generation uint64  `json:"generation"`
	Offsets    []int64 `json:"offsets,omitempty"` // from the beginning of the file
}

// Slots are a rank's slots whose memory is made.
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

// AbortRequest says that this rank cannot finish a save, and why.
type AbortRequest struct {
	Checkpoint string `json:"checkpoint"`
	Reason     string `json:"reason"`
}

// States of a save, in order; an aborted one ends there.
const (
	Begun     = "begun"
	Staged    = "staged"
	Committed = "committed"
	Aborted   = "aborted"
)

// WaitRequest asks to be told when a checkpoint has reached a state.
type WaitRequest struct {
	Checkpoint string `json:"checkpoint"`
	State      string `json:"state"`
}

// WaitReply is the state that was reached, at least the one asked for, or
// aborted with its reason. NoRoom says that it was aborted because the disk has
// no room for it.
type WaitReply struct {
	State  string `json:"state"`
	Reason string `json:"reason,omitempty"`
	NoRoom bool   `json:"no_room,omitempty"`
}

// LoadRequest asks for boxes and values of a checkpoint. Strict makes it an
// error when the checkpoint has keys that no rank asks for.
type LoadRequest struct {
	Ref    string `json:"ref,omitempty"` // default: the checkpoint to resume from
	Strict bool   `json:"strict,omitempty"`
	// Partial leaves out the items whose key the checkpoint lacks.
	Partial bool `json:"partial,omitempty"`
	// StrictDType makes it an error when an item has another dtype than was
	// saved, instead of converting it.
	StrictDType bool `json:"strict_dtype,omitempty"`
	// SameKind makes it an error when floats are to become integers.
	SameKind bool `json:"same_kind,omitempty"`
	// Participants are the ranks that load, the same on each of them; default all.
	Participants []int `json:"participants,omitempty"`
	// Refused is why this rank cannot load, though it takes part: nobody does then.
	Refused string `json:"refused,omitempty"`
	// Verifies says that this rank verifies what it copies, by the checks of the reply,
	// and says in [LoadedRequest] what it has found. There are none unless all say so.
	Verifies bool   `json:"verifies,omitempty"`
	Items    []Item `json:"items"`
}

// LoadReply says where the bytes are: item i's are Sizes[i] bytes at
// Offsets[i] of the file Arenas[In[i]], tensors row-major in the wanted box. The
// size of what was left out is -1. Nothing changes the bytes until the load is
// given back.
type LoadReply struct {
	Checkpoint string      `json:"checkpoint"`
	Step       int64       `json:"step"`
	Load       int         `json:"load"` // its number, from 1: what gives it back
	Arenas     []LoadArena `json:"arenas"`
	In         []int       `json:"in"`
	Offsets    []int64     `json:"offsets"`
	Sizes      []int64     `json:"sizes"`
	Checks     *Checks     `json:"checks,omitempty"`
	Unread     []string    `json:"unread,omitempty"` // keys that no rank asked for
}

// Checks are the checksums of what was not read yet, and is verified by who copies it:
// the blocks of 64 KiB that hold each of these items, of which the first begins Before
// bytes in front of the item and the last ends After bytes behind it. Only that last one
// may be shorter. What is in no Items was verified.
type Checks struct {
	Items  []int   `json:"items"` // ascending
	Before []int64 `json:"before"`
	After  []int64 `json:"after"`
	CRC32C []byte  `json:"crc32c"` // of each block, item by item, u32 LE
}

// SmallestChecked is the bytes of the smallest item that is left to be verified by who
// copies it: smaller ones lie beside each other, and are verified many at a time.
const SmallestChecked = 64 << 10

// Add adds the check of an item, which comes after those before.
func (c *Checks) Add(item int, before, after int64, crc32c []uint32) {
	c.Items, c.Before, c.After = append(c.Items, item), append(c.Before, before), append(c.After, after)
	for _, sum := range crc32c {
		c.CRC32C = binary.LittleEndian.AppendUint32(c.CRC32C, sum)
	}
}

// LoadArena is a file of which some bytes are read: staging slots that hold the
// checkpoint, its own files, and one for all that none of them holds as it is wanted.
type LoadArena struct {
	Path string `json:"path"`
	Size int64  `json:"size"` // of what may be read
}

// OneArenaReply is a LoadReply in versions 1 and 2 of the protocol: all items are
// in one file.
type OneArenaReply struct {
	Checkpoint string   `json:"checkpoint"`
	Step       int64    `json:"step"`
	Arena      string   `json:"arena"`
	Size       int64    `json:"size"`
	Offsets    []int64  `json:"offsets"`
	Sizes      []int64  `json:"sizes"`
	Unread     []string `json:"unread,omitempty"` // keys that no rank asked for
}

// LoadedRequest gives the files of a load back: by its number, or, in versions 1
// and 2, by the path of its one file.
type LoadedRequest struct {
	Load  int    `json:"load,omitempty"`
	Arena string `json:"arena,omitempty"`
	// Damaged says what of the checks of the load was not so, and Failed why the rank has
	// not verified all that it was to; empty: it was all in order.
	Damaged string `json:"damaged,omitempty"`
	Failed  string `json:"failed,omitempty"`
}

// Problem is the body of an error reply.
type Problem struct {
	Message string `json:"error"`
}
