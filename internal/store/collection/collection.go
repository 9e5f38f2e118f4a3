// Package collection deletes the checkpoints of a store that a policy does not keep, and
// removes the files of those that ended before:
//
//	Collect        collect.go    the order of the steps, over all runs
//	  decide       decide.go     which checkpoints are deleted, as decisions in the log
//	  free         free.go       removes their files, or computes what that would free
//	  stays.go                   files that others name or that a bucket locks
//	MeasureFiles   footprint.go  the space of one checkpoint, shared and its own
package collection

import (
	"context"
	"log/slog"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/planner/retention"
	"github.com/ckptstore/ckptstore/projections"
)

// Store is an open store, as far as a collection needs it.
type Store struct {
	ID     string
	Data   *data.Root
	Log    *jetlog.Log
	Views  query.Source
	Logger *slog.Logger
	Memory *Memory

	// Decide appends a decision about a checkpoint if the trial's last decision has the
	// sequence after. Otherwise it returns [jetlog.ErrConflict].
	Decide func(ctx context.Context, c projections.Checkpoint, after uint64, body events.Body) (uint64, error)
	// HasFiles reports whether a checkpoint, committed or not, has files.
	HasFiles func(ctx context.Context, ref checkpoint.Ref) (bool, error)
}

// Memory is what one collection of a store learns for the next in this process. The zero
// value is ready for use.
type Memory struct {
	named  references
	locked lockedFiles
}

// Options configure [Collect].
type Options struct {
	Runs   []string // none: all
	Policy retention.Policy
	Apply  bool // false: decide and remove nothing

	// At is called before each step, in tests. An error ends the collection there, as a
	// crash would.
	At func(step string) error
}

// Action is a collection's action on a checkpoint.
type Action string

// Actions. A swept checkpoint was aborted or deleted before and has left files.
const (
	Keep   Action = "keep"
	Delete Action = "delete"
	Sweep  Action = "sweep"
)

// Collected is what a collection did, or would do, with one checkpoint. Freed counts
// each file once, and only if no remaining checkpoint has a link to it.
type Collected struct {
	Run    string            `json:"run"`
	Trial  string            `json:"trial"`
	ID     string            `json:"id"`
	Step   int64             `json:"step"`
	State  projections.State `json:"state"` // before the collection
	Action Action            `json:"action"`
	Reason string            `json:"reason"`
	Bytes  int64             `json:"bytes"` // of tensors and values
	Freed  int64             `json:"freed"` // bytes of files
	// Waits are those of the freed bytes that a bucket keeps as versions, which could not be removed:
	// they are freed once a rule of the bucket removes them.
	Waits int64 `json:"waits,omitempty"`
	// Left explains why the files of a deleted or swept checkpoint stay for now.
	Left string `json:"left,omitempty"`

	row projections.Checkpoint
}

// Collection is the outcome of [Collect].
type Collection struct {
	Store       string      `json:"store"`
	Policy      string      `json:"policy"`
	Applied     bool        `json:"applied"`
	Checkpoints []Collected `json:"checkpoints"`
	Freed       int64       `json:"freed"`           // sum
	Waits       int64       `json:"waits,omitempty"` // sum

	// Unfreed is why the bucket keeps removed files as versions.
	Unfreed string `json:"unfreed,omitempty"`
}

// Stays returns what holds the files of a deleted checkpoint, or "" if they are gone.
func (c Collected) Stays() string {
	if c.Action == Keep {
		return c.Reason
	}
	return c.Left
}
