package worker

import (
	"cmp"
	"context"
	"errors"
	"slices"

	"github.com/ckptstore/ckptstore/worker/process"
)

// failure is the bad end of one rank's process.
type failure struct {
	process.Exit
	told   told
	at     int64 // when the process had ended, in unix seconds
	victim bool  // it ended without a word after another's failure had ended the group
}

func (f failure) String() string {
	if f.told.message == "" {
		return f.Exit.String()
	}
	return f.Exit.String() + ": " + f.told.message
}

// unsaidError says that the log does not take what the trainer has to say: no
// fault of the workers.
type unsaidError struct{ error }

func (e *unsaidError) Unwrap() error { return e.error }

// handoffEnd is the end of a hand-off for which no worker is to blame. Workers
// whose reports are not taken end too, and the news of that may come first.
type handoffEnd struct{ failed *FailedError }

// from is the failure that the end of a hand-off is.
func (h *handoffEnd) from(err error) *FailedError {
	why := &FailedError{Rank: -1, Cause: err.Error()}
	if errors.As(err, new(*unsaidError)) {
		why.Kind = InfrastructureFailure
		h.failed = why
	}
	return why
}

// or is the cause of an attempt's end, when another may have been seen first.
func (h *handoffEnd) or(cause *FailedError) *FailedError {
	if h.failed != nil {
		return h.failed
	}
	return cause
}

// rootCause is the failure that came first by what the workers tell, in whole
// seconds, or else by the order of their ends; victims come last.
func rootCause(failures []failure) failure {
	when := func(f failure) int64 {
		if f.told.at > 0 {
			return f.told.at
		}
		return f.at
	}
	order := slices.SortedStableFunc(slices.Values(failures), func(a, b failure) int {
		switch {
		case a.victim != b.victim && a.victim:
			return 1
		case a.victim != b.victim:
			return -1
		}
		return cmp.Compare(when(a), when(b))
	})
	return order[0]
}

// caused puts the cause of ctx's end in front of an error that follows from
// it, such as that of a log that does not answer while the job is ending. A
// used up budget is a cause of its own.
func caused(ctx context.Context, err error) error {
	cause := context.Cause(ctx)
	if err == nil || cause == nil || errors.Is(err, cause) || errors.As(err, new(*FailedError)) {
		return err
	}
	return errors.Join(cause, err)
}
