// Package restore serves collective loads: all ranks of a group ask, one
// checkpoint is read for all of them, and each gets the place of its bytes.
//
//	Loader   the loads of one attempt, each resolved and read once for all ranks
//	restore  the reading of one load: its checkpoint, and the part of each rank
//	spot     the place of a want: in a staging slot, in a file of the checkpoint,
//	         or in an arena that was made for the load
//	proof    a checkpoint in shared memory, verified before a rank asks for it
//	ahead    slots of another node, copied before a rank asks for them
//	Meeting  the loads of a group on several nodes, each resolved once for all nodes
//	shared   blocks that several nodes read, which one reads and passes on
//
// The ranks of one node meet in its Loader, and the Loaders in the Meeting of the
// coordinating node. It alone writes the events of loads:
//
//	rank 0 ─┐
//	rank 1 ─┴▶ Loader of node 0 ─┐ Resolve     which checkpoint   restore.begun
//	rank 2 ─┐                    ├─Share───▶ Meeting ─────────▶ log
//	rank 3 ─┴▶ Loader of node 1 ─┘ Done        what was read      restore.completed
//
// Bytes that are still in shared memory are taken from there. Bytes that lie in a
// file exactly as wanted are lent. The rest is read into an arena.
package restore

import (
	"context"
	"log/slog"
	"net/http"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/session/broadcast"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/projections"
)

// Config configures a Loader: its group of ranks and its sources.
type Config struct {
	Run, Trial string
	Attempt    int
	World      int    // number of ranks, on all nodes
	Resume     string // reference or path that a load without a reference reads; empty: none

	Store  Store
	Log    Log
	Arenas *staging.Arenas
	// Fetch copies slots of ranks from another node into Arenas, as far as that node has them
	// for a checkpoint. It is bounded, and best effort; nil: there is none. Until hurry is closed, it yields
	// to all other computation; a nil hurry counts as closed.
	Fetch func(ctx context.Context, checkpoint string, ranks []int, hurry <-chan struct{})
	Spare func() bool // frees the memory of free slots, and reports whether there were any

	// Coordinator decides the loads of a group on several nodes; nil: this loader
	// does, for all ranks. Local are the ranks on this node, ascending.
	Coordinator Coordinator
	Local       []int
	Node        int // place of this node among those of [NewMeeting]

	// Shares passes blocks on that several nodes want, and PeerClient returns a client for
	// requests to the node whose certificate has a digest. Without them this node reads alone.
	// Peer is where a node serves requests; only a [Meeting] needs it.
	Shares     *broadcast.Shares
	PeerClient func(pin string) *http.Client
	Peer       func(node int) Peer

	// Limit bounds how long ranks wait for each other; nil: by the clock.
	Limit func(context.Context, time.Duration) (context.Context, context.CancelFunc)

	// Kind returns the kind of an error of the system, which declares none, for the
	// other nodes; nil: none is known.
	Kind func(error) problem.Kind

	Work   context.Context // ends with the attempt
	Logger *slog.Logger
}

// bounded returns a context for a wait of ranks for each other.
func (c *Config) bounded(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	if c.Limit != nil {
		return c.Limit(ctx, limit)
	}
	return context.WithTimeout(ctx, limit)
}

// Store gives access to checkpoints.
type Store struct {
	// Resolve returns the checkpoint that a reference names. A node that does not
	// coordinate needs it only for [Loader.Prove], and may have nil.
	Resolve func(ctx context.Context, ref string) (projections.Checkpoint, error)
	// Foreign opens a checkpoint of another program by its path.
	Foreign func(ctx context.Context, path string) (*data.Foreign, error)
	Data    *data.Root
	// Reader returns own, or a reader in its place.
	Reader func(own *data.FileReader) data.Reader
}

// Log records the events of loads, durably.
type Log interface {
	// Begun decides that a checkpoint is loaded.
	Begun(ctx context.Context, b *events.RestoreBegun) error
	// Failed records that a load that had begun failed.
	Failed(ctx context.Context, b *events.RestoreFailed) error
	// Completed records the reads of each rank of the load, and the load's
	// completion.
	Completed(ctx context.Context, plans []*events.LoadPlan, b *events.RestoreCompleted) error
}

// MisuseError reports that the request of a rank is wrong.
type MisuseError struct{ err error }

func (e *MisuseError) Error() string { return e.err.Error() }
func (e *MisuseError) Unwrap() error { return e.err }

// ProblemKind returns [problem.Invalid].
func (*MisuseError) ProblemKind() problem.Kind { return problem.Invalid }

// ConflictError reports that a load cannot be served to the group, regardless of
// the rank.
type ConflictError struct{ err error }

func (e *ConflictError) Error() string { return e.err.Error() }
func (e *ConflictError) Unwrap() error { return e.err }

// ProblemKind returns [problem.Conflict].
func (*ConflictError) ProblemKind() problem.Kind { return problem.Conflict }

// IsPath reports whether a reference is the path of another program's checkpoint.
// No run has a name with such a prefix by accident.
func IsPath(ref string) bool {
	return strings.HasPrefix(ref, "/") || strings.HasPrefix(ref, "./") || strings.HasPrefix(ref, "../")
}

// Qualify turns a worker's reference into a full one: it is either full already,
// or an ID or name in the worker's own trial.
func Qualify(run, trial, ref string) string {
	switch {
	case strings.Contains(ref, "@"):
		return ref
	case trial == projections.DefaultTrial:
		return run + "@" + ref
	}
	return run + "/" + trial + "@" + ref
}
