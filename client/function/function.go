// Package function runs a training function that reports its results, as in the
// function API of Ray Tune. [Main] is the main function of such a worker.
//
//	func main() { os.Exit(function.Main(context.Background(), train)) }
//
//	func train(ctx context.Context, config function.Config, r *function.Reporter) error {
//		for … {
//			if err := r.Report(ctx, function.Result{"loss": loss}); err != nil {
//				return err
//			}
//		}
//		return nil
//	}
//
//	function   the user's code, in a goroutine of its own; it starts on the
//	           first step
//	result     the content of one report: numbers, strings and booleans by name
//	hand-off   room for one result and one error; a report blocks until the
//	           next step asks for more
//	step       fetches one result
//	marker     a result that only marks that the function returned without
//	           reporting "done"; it is no iteration and is not logged
//	stop       a request that the next report returns to the function as
//	           [ErrStop]; the function cleans up and returns it
//	trainer    takes the results, and requests the stop
//
// Reports after "done" are refused. If the function fails between "done" and its
// return, it has failed.
package function

import (
	"context"
	"errors"
	"fmt"
	"maps"
)

// Config is the configuration of the trial. The function gets its own copy.
type Config map[string]any

// Result is the content of one report.
type Result map[string]any

// Names in a [Result] with a special meaning.
const (
	Done         = "done"             // true: the function has finished
	Duplicate    = "__duplicate__"    // true: the marker; reserved
	TimeThisIter = "time_this_iter_s" // seconds of the function's own work
	Step         = "step"             // of the training; default: the iteration
	Metric       = "_metric"          // a number that was returned or yielded without a map
)

// Entry is the plain form of a function, for [NewRunner]. Its results are only
// those that it reports: the return is none.
type Entry func(context.Context, *Reporter) error

var (
	// ErrStop is the stop signal: a report returns it after a stop request. The
	// function cleans up and returns it, or nil. Returning it without a stop
	// request is an error.
	ErrStop = errors.New("a stop was requested")
	// ErrDone means that the function has already reported "done".
	ErrDone = errors.New("report after done: a result with done is the last one")
	// ErrEnded means that the function has no more results to step to.
	ErrEnded = errors.New("the function has ended: a runner runs it once; create another runner")
	// ErrSilent means that the function ended without a result and without an
	// error.
	ErrSilent = errors.New("the function ran until completion without reporting results or returning an error")
	// ErrRunning means that the function is still running after a stop request.
	ErrRunning = errors.New("the function is still running after a stop request; let it report, or watch its context")
	// ErrSignature means that a value is not a function that [Wrap] can run.
	ErrSignature = errors.New("no training function")
)

// isDone reports whether the function has finished with this result.
func (r Result) isDone() bool { return r[Done] == true }

// isMarker reports whether a result is the marker.
func (r Result) isMarker() bool { return r[Duplicate] == true }

// with returns a copy of a result with the entries of the marker added.
func (r Result) with(marker Result) Result {
	both := Result{}
	maps.Copy(both, r)
	maps.Copy(both, marker)
	return both
}

// check returns an error if a function must not report this result.
func (r Result) check() error {
	if _, has := r[Duplicate]; has {
		return fmt.Errorf("report: the name %q is reserved; choose another", Duplicate)
	}
	if v, has := r[Done]; has {
		if _, ok := v.(bool); !ok {
			return fmt.Errorf("report: %q is a %T: want true or false", Done, v)
		}
	}
	return nil
}
