package events

import "errors"

// Bodies of the families plan, write and checkpoint: one save, from the
// ranks' local plans to the committed checkpoint. A checkpoint is named by
// its ID, "<name>.a<attempt>" with ".2", ".3" for later saves of that name
// in the attempt. Digests are BLAKE3-256 in hexadecimal.

// Blob is a part of a body that may be too large for the log. It is either inline, or a
// claim check for the file blobs/<digest>, which is durable before the event is
// appended.
type Blob struct {
	Inline []byte `json:"inline,omitempty"`
	Digest string `json:"digest,omitempty"`
	Size   int64  `json:"size"`
}

// ErrNoBlob reports a claim check without its blob: the digest is malformed, the file
// is missing, or the file has other bytes.
var ErrNoBlob = errors.New("no such blob")

// InlineBlob returns a blob that holds data itself. The appender moves it to a file if
// it is larger than [MaxInline].
func InlineBlob(data []byte) Blob { return Blob{Inline: data, Size: int64(len(data))} }

// MaxInline is the size in bytes above which a blob goes to a file. In the JSON body it
// is base64, four bytes for three: 192 KiB become 256 KiB of an event, whose limit is 1
// MiB.
const MaxInline = 192 << 10

// LocalPlan is one rank's request to save. It begins the checkpoint unless that has
// begun. If the plan equals the rank's previous one, the plan is left out and the
// fingerprint stands for it. Without participants all ranks of the attempt take part.
type LocalPlan struct {
	Attempt      int    `json:"attempt"`
	Checkpoint   string `json:"checkpoint"`
	Name         string `json:"name"`
	Step         int64  `json:"step"`
	Rank         int    `json:"rank"`
	Participants []int  `json:"participants,omitempty"` // ranks that take part, ascending
	Fingerprint  string `json:"fingerprint"`            // planner.Fingerprint
	Plan         Blob   `json:"plan"`                   // checkpoint.EncodeLocal, or nothing and size 0
}

// GlobalPlan assigns chunks to the ranks that write them.
type GlobalPlan struct {
	Attempt    int    `json:"attempt"`
	Checkpoint string `json:"checkpoint"`
	Layout     Blob   `json:"layout"` // checkpoint.EncodeLayout
	// Disagreements are replicas of this save whose bytes differ between ranks.
	// MoreDisagreements counts those that did not fit the event.
	Disagreements     []Disagreement `json:"disagreements,omitempty"`
	MoreDisagreements int            `json:"more_disagreements,omitempty"`
}

// Disagreement is a box of a tensor, or a value, whose bytes differ between ranks.
type Disagreement struct {
	FQN     string  `json:"fqn"`
	Offsets []int64 `json:"offsets,omitempty"` // of the box; a value has none
	Sizes   []int64 `json:"sizes,omitempty"`
	Kept    int     `json:"kept"`  // the rank whose bytes are stored
	Ranks   []int   `json:"ranks"` // ranks whose bytes differ from the kept ones
}

// LoadPlan describes what one rank reads in a load.
type LoadPlan struct {
	Attempt    int    `json:"attempt"`
	Load       int    `json:"load"`
	Checkpoint string `json:"checkpoint"`
	Rank       int    `json:"rank"`
	Reads      int    `json:"reads"` // overlaps of wanted and stored boxes
	Bytes      int64  `json:"bytes"` // stored bytes that the rank gets; bytes for several ranks are read once
}

// WriteSealed records that a rank's bytes are complete in its staging slot. The rank
// may continue training, and its death no longer harms this save.
//
// Durations in this and other bodies are in seconds, measured by the monotonic clock of the
// process in which the work happens. An absent one is unknown.
type WriteSealed struct {
	Attempt    int    `json:"attempt"`
	Checkpoint string `json:"checkpoint"`
	Rank       int    `json:"rank"`
	Bytes      int64  `json:"bytes"`

	Waited *float64 `json:"waited_s,omitempty"` // seconds from the rank's request to save until it had a slot
	Copied *float64 `json:"copied_s,omitempty"` // seconds from then until its copy was complete
}

// File is one file of a checkpoint.
type File struct {
	Name string        `json:"name"` // within the checkpoint's directory
	Size int64         `json:"size"`
	From CheckpointRef `json:"from,omitzero"` // the checkpoint that wrote it and in whose directory it lies, if another
}

// CheckpointRef names a checkpoint of any run.
type CheckpointRef struct {
	Run        string `json:"run"`
	Trial      string `json:"trial"`
	Checkpoint string `json:"checkpoint"`
}

// String returns the reference as users write it.
func (r CheckpointRef) String() string { return r.Run + "/" + r.Trial + "@" + r.Checkpoint }

// WriteStarted records that a rank's file is sent in parts to an object store, before the
// first part is sent. The store keeps the parts if the sender dies: the process that finishes
// the save continues the upload, and the process that aborts the save removes it.
type WriteStarted struct {
	Attempt    int    `json:"attempt"`
	Checkpoint string `json:"checkpoint"`
	Rank       int    `json:"rank"`
	File       string `json:"file"`      // within the checkpoint's directory
	Upload     string `json:"upload"`    // the object store's ID of it
	Token      string `json:"token"`     // in the metadata of the object that the upload becomes
	PartSize   int64  `json:"part_size"` // in bytes, of every part but the last
}

// WriteCompleted records that a rank's files are durable.
type WriteCompleted struct {
	Attempt      int    `json:"attempt"`
	Checkpoint   string `json:"checkpoint"`
	Rank         int    `json:"rank"`
	Files        []File `json:"files"`
	IndexDigest  string `json:"index_digest"`
	BytesWritten int64  `json:"bytes_written"`
	BytesReused  int64  `json:"bytes_reused"`

	Queued *float64 `json:"queued_s,omitempty"` // seconds from the rank's seal to the start of its write
	Digest *float64 `json:"digest_s,omitempty"` // seconds of the write in which digests were computed
	Write  *float64 `json:"write_s,omitempty"`  // seconds of the write in which it waited for the disk or the bucket; all of them if digest_s is absent
	Sync   *float64 `json:"sync_s,omitempty"`   // seconds from then until its files and their names were durable
}

// WriteFailed records that a rank could not write its files.
type WriteFailed struct {
	Attempt    int    `json:"attempt"`
	Checkpoint string `json:"checkpoint"`
	Rank       int    `json:"rank"`
	Error      string `json:"error"`
}

// CheckpointBegun opens a save. No file is created before this event is acknowledged.
// Without participants all ranks from 0 to world_size - 1 take part. Where files have no
// links, bases lists the checkpoints whose files the save may name: a collection keeps them
// while the save is open, except those that were deleted before this event.
type CheckpointBegun struct {
	Attempt      int             `json:"attempt"`
	Checkpoint   string          `json:"checkpoint"`
	Name         string          `json:"name"`
	Step         int64           `json:"step"`
	WorldSize    int             `json:"world_size"`
	Participants []int           `json:"participants,omitempty"`
	Bases        []CheckpointRef `json:"bases,omitempty"` // checkpoints whose files the save may name
}

// All returns the ranks that take part, listed.
func (b CheckpointBegun) All() []int { return Participants(b.Participants, b.WorldSize) }

// Participants returns the ranks that an event about a save lists, or all ranks of the world
// if it lists none.
func Participants(listed []int, world int) []int {
	if len(listed) > 0 || world <= 0 {
		return listed
	}
	all := make([]int, world)
	for rank := range all {
		all[rank] = rank
	}
	return all
}

// Listed is the inverse of [Participants]: it returns no ranks for all ranks of the world, so
// that an event about all of them does not grow with their number.
func Listed(participants []int, world int) []int {
	if len(participants) != world {
		return participants
	}
	for i, rank := range participants {
		if rank != i {
			return participants
		}
	}
	return nil
}

// CheckpointStaged records that every participant has sealed.
type CheckpointStaged struct {
	Attempt    int    `json:"attempt"`
	Checkpoint string `json:"checkpoint"`
}

// CheckpointCommitted makes the checkpoint exist.
type CheckpointCommitted struct {
	Attempt    int    `json:"attempt"`
	Checkpoint string `json:"checkpoint"`
	Manifest   string `json:"manifest"` // digest; the file is manifest-<digest>
	Bytes      int64  `json:"bytes"`    // of tensor data and values

	ManifestTook *float64 `json:"manifest_s,omitempty"` // seconds in which the files of all ranks were checked and the manifest became durable
}

// CheckpointAborted ends a save whose checkpoint will never exist.
type CheckpointAborted struct {
	Attempt    int    `json:"attempt"`
	Checkpoint string `json:"checkpoint"`
	Reason     string `json:"reason"`
	Ranks      []int  `json:"ranks,omitempty"` // ranks that caused it
}

// CheckpointSuperseded removes a checkpoint from the current line.
type CheckpointSuperseded struct {
	Checkpoint string `json:"checkpoint"`
	Reason     string `json:"reason"`
}

// CheckpointPinned exempts a checkpoint from retention.
type CheckpointPinned struct {
	Checkpoint string `json:"checkpoint"`
	Reason     string `json:"reason,omitempty"`
}

// CheckpointUnpinned removes a pin.
type CheckpointUnpinned struct {
	Checkpoint string `json:"checkpoint"`
}

// CheckpointTagged gives a checkpoint an additional name.
type CheckpointTagged struct {
	Checkpoint string `json:"checkpoint"`
	Tag        string `json:"tag"`
}

// CheckpointUntagged removes a tag.
type CheckpointUntagged struct {
	Checkpoint string `json:"checkpoint"`
	Tag        string `json:"tag"`
}

// CheckpointAttached adds a file to a checkpoint, next to its tensors.
type CheckpointAttached struct {
	Checkpoint string `json:"checkpoint"`
	Name       string `json:"name"` // of the file
	Digest     string `json:"digest"`
	Size       int64  `json:"size"`
}

// CheckpointDeleted deletes a checkpoint. Its files are removed after this event.
type CheckpointDeleted struct {
	Checkpoint string `json:"checkpoint"`
	Reason     string `json:"reason"`
}

// Kind implements [Body] for each type.
func (LocalPlan) Kind() Kind            { return "plan.local" }
func (GlobalPlan) Kind() Kind           { return "plan.global" }
func (LoadPlan) Kind() Kind             { return "plan.load" }
func (WriteSealed) Kind() Kind          { return "write.sealed" }
func (WriteStarted) Kind() Kind         { return "write.started" }
func (WriteCompleted) Kind() Kind       { return "write.completed" }
func (WriteFailed) Kind() Kind          { return "write.failed" }
func (CheckpointBegun) Kind() Kind      { return "checkpoint.begun" }
func (CheckpointStaged) Kind() Kind     { return "checkpoint.staged" }
func (CheckpointCommitted) Kind() Kind  { return "checkpoint.committed" }
func (CheckpointAborted) Kind() Kind    { return "checkpoint.aborted" }
func (CheckpointSuperseded) Kind() Kind { return "checkpoint.superseded" }
func (CheckpointPinned) Kind() Kind     { return "checkpoint.pinned" }
func (CheckpointUnpinned) Kind() Kind   { return "checkpoint.unpinned" }
func (CheckpointTagged) Kind() Kind     { return "checkpoint.tagged" }
func (CheckpointUntagged) Kind() Kind   { return "checkpoint.untagged" }
func (CheckpointAttached) Kind() Kind   { return "checkpoint.attached" }
func (CheckpointDeleted) Kind() Kind    { return "checkpoint.deleted" }
