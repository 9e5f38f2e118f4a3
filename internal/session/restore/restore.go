// Package restore serves collective loads: all ranks of a group ask, one of the
// checkpoints is read for all of them, and each is told where its bytes lie.
//
//	Loader   the loads of one attempt, each resolved and read once for all ranks
//	restore  the reading of one load: what it was resolved to, the part of each rank
//	spot     where a rank finds what it wants: in a staging slot, in a file of the
//	         checkpoint, or in an arena that was made for the load
//	proof    what shared memory holds of a checkpoint, verified before it is asked for
//
// What still lies in shared memory is taken from there, what lies in a file just as
// it is wanted is lent, and all else is read into an arena.
package restore

import (
	"context"
	"log/slog"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/projections"
)

// Config says for whom a loader reads, and from where.
type Config struct {
	Run, Trial string
	Attempt    int
	World      int    // number of ranks
	Resume     string // what a load without a reference reads: a reference or a path; empty: nothing

	Store  Store
	Log    Log
	Arenas *staging.Arenas
	Spare  func() bool // frees the memory of slots that are free, and reports whether there were any

	// Limit bounds how long ranks wait for each other; nil: by the clock alone.
	Limit func(context.Context, time.Duration) (context.Context, context.CancelFunc)

	Work   context.Context // ends with the attempt
	Logger *slog.Logger
}

// Store is where checkpoints are.
type Store struct {
	// Resolve finds the checkpoint that a reference names.
	Resolve func(ctx context.Context, ref string) (projections.Checkpoint, error)
	// Foreign opens a checkpoint of another program by its path.
	Foreign func(ctx context.Context, path string) (*data.Foreign, error)
	Data    *data.Root
	// Reader is own, or reads in its place.
	Reader func(own *data.FileReader) data.Reader
}

// Log is told what becomes of a load. What it is told is durable when it returns.
type Log interface {
	// Begun decides that a checkpoint is loaded.
	Begun(ctx context.Context, b *events.RestoreBegun) error
	// Failed says that a load that has begun was not served.
	Failed(ctx context.Context, b *events.RestoreFailed) error
	// Completed says what each rank that took part has read, and that all have.
	Completed(ctx context.Context, plans []*events.LoadPlan, b *events.RestoreCompleted) error
}

// MisuseError says that the request of a rank is wrong.
type MisuseError struct{ err error }

func (e *MisuseError) Error() string { return e.err.Error() }
func (e *MisuseError) Unwrap() error { return e.err }

// ProblemKind returns [problem.Invalid].
func (*MisuseError) ProblemKind() problem.Kind { return problem.Invalid }

// ConflictError says that a load cannot be served to the group, whatever one of
// its ranks does.
type ConflictError struct{ err error }

func (e *ConflictError) Error() string { return e.err.Error() }
func (e *ConflictError) Unwrap() error { return e.err }

// ProblemKind returns [problem.Conflict].
func (*ConflictError) ProblemKind() problem.Kind { return problem.Conflict }

// IsPath reports whether a reference is the path of a checkpoint of another
// program: no name of a run begins so by accident.
func IsPath(ref string) bool {
	return strings.HasPrefix(ref, "/") || strings.HasPrefix(ref, "./") || strings.HasPrefix(ref, "../")
}

// Qualify makes a reference of a run out of what a worker names: a full
// reference, or an ID or name in its own run.
func Qualify(run, ref string) string {
	if strings.Contains(ref, "@") {
		return ref
	}
	return run + "@" + ref
}
