package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"os"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/session/contract"
	"github.com/ckptstore/ckptstore/internal/session/outbox"
	"github.com/ckptstore/ckptstore/internal/session/retry"
	"github.com/ckptstore/ckptstore/projections"
)

// Log is the part of the log that a job uses. All methods may be called
// concurrently. They retry lost connections until their context ends, or until a
// deadline of their own; then the job calls them again.
type Log interface {
	// Append stores facts durably. Repeating it with the same events stores
	// nothing twice.
	Append(ctx context.Context, facts ...events.Fact) ([]uint64, error)
	// Decide stores a decision, durably, if the last decision of its aggregate
	// has the sequence after. Otherwise the error is a conflict, for which
	// Store.Conflict reports true.
	Decide(ctx context.Context, d events.Decision, after uint64) (uint64, error)
	// ReadTrial yields the events of one trial in order, from one sequence to
	// another; until 0 follows them without end. A missing decision is an error;
	// a missing fact proves nothing.
	ReadTrial(ctx context.Context, of events.Aggregate, from, until uint64) iter.Seq2[events.Recorded, error]
	// ReadLane yields the decisions of a trial in the same way.
	ReadLane(ctx context.Context, of events.Aggregate, from, until uint64) iter.Seq2[events.Recorded, error]
	// Last returns the sequence of the last event.
	Last(ctx context.Context) (uint64, error)
	// LastOf returns the sequence of a trial's last event, or 0 if it has none.
	LastOf(ctx context.Context, of events.Aggregate) (uint64, error)
}

// Views answers from the projections. An answer holds at least what was in
// the log when the call began.
type Views interface {
	Trial(ctx context.Context, run, trial string) (projections.Trial, error)
	Attempts(ctx context.Context, run, trial string) ([]projections.Attempt, error)
	OpenCheckpoints(ctx context.Context, run, trial string) ([]projections.Checkpoint, error)
	Resolve(ctx context.Context, ref string) (projections.Checkpoint, error)
	// Trials returns the trials of a run.
	Trials(ctx context.Context, run string) ([]projections.Trial, error)
}

// Blobs moves event bodies that are too large for the log to files and back.
type Blobs interface {
	// Put makes data durable and returns a claim check, or data itself if it is
	// small enough.
	Put(ctx context.Context, data []byte) (events.Blob, error)
	// Get returns the data, verified.
	Get(ctx context.Context, b events.Blob) ([]byte, error)
}

// Foreign opens a checkpoint of another program by its path and checks that it is
// complete. An error names the problem and its place.
type Foreign func(ctx context.Context, path string) (*data.Foreign, error)

// Store holds a job's log and data.
type Store struct {
	ID       string // identity
	Log      Log
	Views    Views
	Blobs    Blobs
	Data     *data.Root
	Storage  data.Storage // writes and reads in place of Data, unless nil
	Foreign  Foreign
	Conflict func(error) bool // whether Log.Decide failed because another decision came first
	// Unserved reports whether a call of Log or Views failed because it got no
	// answer, or because the log had no room. The job retries such a call until
	// it is answered; nil: never.
	Unserved func(error) bool
	Runtime  string // private directory for sockets, with a short path
	Shared   string // directory in memory for staging, such as /dev/shm

	// Room returns the free space in bytes where a file of Shared is; nil asks
	// the system.
	Room func(*os.File) (int64, error)

	calls *retry.Calls  // how calls of Log and Views are repeated; nil: they are not
	limit time.Duration // of a step of Storage that all saves of the job wait for
}

// writer returns own or, if the job has a storage, the storage's writer.
func (s *Store) writer(own *data.FileWriter) data.Writer {
	if s.Storage == nil {
		return own
	}
	at := own.Location()
	return contract.Writer{Writer: s.Storage.Writer(at), At: at, Data: s.Data, Calls: s.calls, Limit: s.limit}
}

// Reader returns own or, if the job has a storage, the storage's reader.
func (s *Store) Reader(own *data.FileReader) data.Reader {
	if s.Storage == nil {
		return own
	}
	if r := s.Storage.Reader(own.Location()); r != data.Reader(own) {
		return contract.Reader{Reader: r, Ref: own.Location().Ref}
	}
	return own
}

// resolveBlobs returns r with the plan in its body inline, so that a pure fold
// can read it. A claim check without a blob is left in place: its save fails, and
// the training does not.
func resolveBlobs(ctx context.Context, blobs Blobs, r events.Recorded) (events.Recorded, error) {
	if r.Kind.Family() != "plan" {
		return r, nil
	}
	body, err := r.Body()
	if err != nil {
		return r, err
	}
	var blob *events.Blob
	switch b := body.(type) {
	case *events.LocalPlan:
		blob = &b.Plan
	case *events.GlobalPlan:
		blob = &b.Layout
	}
	if blob == nil || blob.Digest == "" {
		return r, nil
	}
	data, err := blobs.Get(ctx, *blob)
	if errors.Is(err, events.ErrNoBlob) {
		return r, nil
	}
	if err != nil {
		return r, fmt.Errorf("event %d (%s): %w", r.Sequence, r.Kind, err)
	}
	*blob = events.InlineBlob(data)
	if r.Data, err = json.Marshal(body); err != nil {
		return r, fmt.Errorf("event %d (%s): %w", r.Sequence, r.Kind, err)
	}
	return r, nil
}

// lastBlobs remembers the last blobs that were read: the layout of most saves is that of an
// earlier one. It is not for concurrent use.
type lastBlobs struct {
	Blobs
	last []lastBlob
}

type lastBlob struct {
	of   events.Blob
	data []byte
}

// Get implements [Blobs].
func (b *lastBlobs) Get(ctx context.Context, of events.Blob) ([]byte, error) {
	for _, l := range b.last {
		if l.of.Digest == of.Digest && l.of.Size == of.Size {
			return l.data, nil
		}
	}
	data, err := b.Blobs.Get(ctx, of)
	if err == nil {
		b.last = append(b.last[max(0, len(b.last)-outbox.PlanSets+1):], lastBlob{of, data})
	}
	return data, err
}
