package projections

import (
	"slices"
	"time"

	"github.com/ckptstore/ckptstore/events"
)

// State is the state of a checkpoint.
type State string

// States. An open checkpoint becomes staged, then committed or aborted, and in the end
// deleted. The first of committed and aborted is final.
const (
	Open      State = "open"
	Staged    State = "staged"
	Committed State = "committed"
	Aborted   State = "aborted"
	Deleted   State = "deleted"
)

// Checkpoint is one save of a trial. Sizes are in bytes. BytesWritten and BytesReused
// are sums over the completed writes.
type Checkpoint struct {
	ID           string       `json:"id"`
	Run          string       `json:"run"`
	Trial        string       `json:"trial"`
	Name         string       `json:"name"`
	Step         int64        `json:"step"`
	Attempt      int          `json:"attempt"`
	WorldSize    int          `json:"world_size"`
	Participants []int        `json:"participants,omitempty"` // as in the event: see [Checkpoint.Saving]
	State        State        `json:"state"`
	Superseded   bool         `json:"superseded"`           // committed, but not in the current line
	Withdrawn    bool         `json:"withdrawn,omitempty"`  // superseded by an explicit decision, not by a resume
	Parent       string       `json:"parent"`               // ID of the previous checkpoint of the line
	ParentSeq    uint64       `json:"parent_seq,omitempty"` // of its begun event; 0 if the parent belongs to another trial
	Manifest     string       `json:"manifest"`             // digest
	Bytes        int64        `json:"bytes"`
	BytesWritten int64        `json:"bytes_written"`
	BytesReused  int64        `json:"bytes_reused"`
	Sealed       int          `json:"sealed"`              // ranks whose bytes are staged
	Writes       int          `json:"writes"`              // ranks whose files are durable
	Iteration    int          `json:"iteration"`           // the attempt's newest at or before Step, as known at the commit
	Trained      float64      `json:"trained_s,omitempty"` // seconds of training in its line when the save began
	BegunSeq     uint64       `json:"begun_seq"`
	CommittedSeq uint64       `json:"committed_seq,omitempty"`
	DeletedSeq   uint64       `json:"deleted_seq,omitempty"`
	BegunAt      time.Time    `json:"begun_at"`
	EndedAt      time.Time    `json:"ended_at,omitzero"` // when it was committed or aborted
	Reason       string       `json:"reason,omitempty"`  // of the last decision against it
	Ranks        []int        `json:"ranks,omitempty"`   // ranks that caused an abort
	Pinned       bool         `json:"pinned"`
	PinReason    string       `json:"pin_reason,omitempty"`
	Tags         []string     `json:"tags,omitempty"` // sorted
	Attachments  []Attachment `json:"attachments,omitempty"`

	// Times at which the log stored its decisions, on the clock of the log's server: with them
	// and the durations of its phases a save is drawn. Zero: not yet, or unknown.
	BegunStored  time.Time `json:"begun_stored,omitzero"`
	StagedStored time.Time `json:"staged_stored,omitzero"`
	EndedStored  time.Time `json:"ended_stored,omitzero"` // committed or aborted
	ManifestTook *float64  `json:"manifest_s,omitempty"`  // seconds, as in checkpoint.committed
	Phases       *Phases   `json:"phases,omitempty"`      // nil: none is known
}

// Phases are the longest durations of a save over its ranks, in seconds: each may be another
// rank's. Nil is unknown. They stay when the ranks' own rows are gone.
type Phases struct {
	Waited *float64 `json:"waited_s,omitempty"`
	Copied *float64 `json:"copied_s,omitempty"`
	Queued *float64 `json:"queued_s,omitempty"`
	Digest *float64 `json:"digest_s,omitempty"`
	Write  *float64 `json:"write_s,omitempty"`
	Sync   *float64 `json:"sync_s,omitempty"`

	// Slowest is the rank whose own work took longest: its copy and its write, without the
	// time in which it waited for a slot or for others. The lowest of equals; -1: unknown.
	Slowest     int     `json:"slowest"`
	SlowestTook float64 `json:"slowest_s"`
}

// longer returns the longer of two durations.
func longer(a, b *float64) *float64 {
	if a == nil || b != nil && *b > *a {
		return b
	}
	return a
}

// phases adds what is known of a rank.
func (c *Checkpoint) phases(w Write) {
	work, known := 0.0, false
	for _, part := range [...]*float64{w.Copied, w.Digest, w.Write, w.Sync} {
		if part != nil {
			work, known = work+*part, true
		}
	}
	if !known && w.Waited == nil && w.Queued == nil {
		return
	}
	p := Phases{Slowest: -1}
	if c.Phases != nil {
		p = *c.Phases
	}
	p.Waited, p.Copied, p.Queued = longer(p.Waited, w.Waited), longer(p.Copied, w.Copied), longer(p.Queued, w.Queued)
	p.Digest, p.Write, p.Sync = longer(p.Digest, w.Digest), longer(p.Write, w.Write), longer(p.Sync, w.Sync)
	if known && (p.Slowest < 0 || work > p.SlowestTook || work == p.SlowestTook && w.Rank < p.Slowest) {
		p.Slowest, p.SlowestTook = w.Rank, work
	}
	c.Phases = &p
}

// Attachment is a file next to the tensors.
type Attachment struct {
	Name   string `json:"name"`
	Digest string `json:"digest"`
	Size   int64  `json:"size"`
}

// Saving returns the ranks that take part in the save, listed. The row of a save by all ranks
// does not list them: each of their writes stores it again.
func (c Checkpoint) Saving() []int { return events.Participants(c.Participants, c.WorldSize) }

// Visible reports whether the checkpoint is committed and in the line.
func (c Checkpoint) Visible() bool { return c.State == Committed && !c.Superseded }

// inProgress reports whether the checkpoint is neither committed nor aborted.
func (c Checkpoint) inProgress() bool { return c.State == Open || c.State == Staged }

// attach adds a file, or replaces the file of that name.
func (c *Checkpoint) attach(b *events.CheckpointAttached) {
	a := Attachment{Name: b.Name, Digest: b.Digest, Size: b.Size}
	i := slices.IndexFunc(c.Attachments, func(old Attachment) bool { return old.Name == a.Name })
	if i < 0 {
		c.Attachments = append(c.Attachments, a)
		return
	}
	c.Attachments[i] = a
}

// count adds the difference between two states of a rank's write.
func (c *Checkpoint) count(before, now Write) {
	if before.SealedSeq == 0 && now.SealedSeq != 0 {
		c.Sealed++
	}
	if before.CompletedSeq == 0 && now.CompletedSeq != 0 {
		c.Writes++
		c.BytesWritten += now.BytesWritten
		c.BytesReused += now.BytesReused
	}
	c.phases(now)
}

// Write is one rank's part in a checkpoint. A sequence of 0 means that the step has not
// happened.
type Write struct {
	Rank         int           `json:"rank"`
	SealedSeq    uint64        `json:"sealed_seq,omitempty"`
	SealedBytes  int64         `json:"sealed_bytes,omitempty"`
	CompletedSeq uint64        `json:"completed_seq,omitempty"`
	Files        []events.File `json:"files,omitempty"`
	IndexDigest  string        `json:"index_digest,omitempty"`
	BytesWritten int64         `json:"bytes_written,omitempty"`
	BytesReused  int64         `json:"bytes_reused,omitempty"`
	FailedSeq    uint64        `json:"failed_seq,omitempty"`
	Error        string        `json:"error,omitempty"`

	// Times at which the log stored the events, on the clock of the log's server.
	SealedStored    time.Time `json:"sealed_stored,omitzero"`
	CompletedStored time.Time `json:"completed_stored,omitzero"`
	FailedStored    time.Time `json:"failed_stored,omitzero"`

	// Seconds, as in write.sealed and write.completed; nil: unknown.
	Waited *float64 `json:"waited_s,omitempty"`
	Copied *float64 `json:"copied_s,omitempty"`
	Queued *float64 `json:"queued_s,omitempty"`
	Digest *float64 `json:"digest_s,omitempty"`
	Write  *float64 `json:"write_s,omitempty"`
	Sync   *float64 `json:"sync_s,omitempty"`
}

// seal, complete and fail report whether the fact is the first of its kind.

func (w *Write) seal(b *events.WriteSealed, r events.Recorded) bool {
	if w.SealedSeq != 0 {
		return false
	}
	w.SealedSeq, w.SealedStored, w.SealedBytes = r.Sequence, r.Stored.UTC(), b.Bytes
	w.Waited, w.Copied = b.Waited, b.Copied
	return true
}

func (w *Write) complete(b *events.WriteCompleted, r events.Recorded) bool {
	if w.CompletedSeq != 0 {
		return false
	}
	w.CompletedSeq, w.CompletedStored, w.Files, w.IndexDigest = r.Sequence, r.Stored.UTC(), b.Files, b.IndexDigest
	w.Queued, w.Digest, w.Write, w.Sync = b.Queued, b.Digest, b.Write, b.Sync
	w.BytesWritten, w.BytesReused = b.BytesWritten, b.BytesReused
	return true
}

func (w *Write) fail(b *events.WriteFailed, r events.Recorded) bool {
	if w.FailedSeq != 0 {
		return false
	}
	w.FailedSeq, w.FailedStored, w.Error = r.Sequence, r.Stored.UTC(), b.Error
	return true
}
