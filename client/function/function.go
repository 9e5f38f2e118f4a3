// Package function runs a training function that reports its results, as the
// function API of Ray Tune does, and is the main of a worker that consists of
// one.
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
//	result     what one report says: numbers, strings and booleans by name
//	hand-off   one place for a result and one for an error; whoever reports
//	           waits until the next step asks for more
//	step       asks for one result
//	marker     a result that only says that the function has returned without
//	           saying that it is done; it is no iteration, and nobody logs it
//	stop       a request that the next report gives to the function, as
//	           [ErrStop]; the function cleans up and returns it
//	trainer    who takes the results, and asks for the stop
//
// A function that reports "done" has said its last word: no report after it is
// taken. What it does until it returns still counts if it fails.
package function

import (
	"context"
	"errors"
	"fmt"
	"maps"
)

// Config is the configuration of the trial. The function has its own copy.
type Config map[string]any

// Result is what one report says.
type Result map[string]any

// Names in a [Result] that have a meaning.
const (
	Done         = "done"             // true: the function has finished
	Duplicate    = "__duplicate__"    // true: the marker; reserved
	TimeThisIter = "time_this_iter_s" // seconds of the function's own work
	Step         = "step"             // of the training; default: the iteration
	Metric       = "_metric"          // a number that was returned or yielded bare
)

// Entry is a function in its plain form, as [NewRunner] takes it. It reports
// what it likes; that it returns is no result.
type Entry func(context.Context, *Reporter) error

var (
	// ErrStop is the stop signal: a report returns it when a stop was
	// requested. The function returns it, or nil, when it has cleaned up. To
	// return it without having been asked is an error.
	ErrStop = errors.New("a stop was requested")
	// ErrDone says that the function had reported "done" before.
	ErrDone = errors.New("already done: nothing is reported after a result that says done")
	// ErrEnded says that there is nothing to step any more.
	ErrEnded = errors.New("the function has ended: a runner runs it once; make another one")
	// ErrSilent says that the function ended without a result and without an
	// error.
	ErrSilent = errors.New("the function ran until completion without reporting results or returning an error")
	// ErrRunning says that a stop was requested and the function goes on.
	ErrRunning = errors.New("the function does not end although a stop was requested: let it report, or watch its context")
	// ErrSignature says that a function cannot be run.
	ErrSignature = errors.New("no training function")
)

// isDone reports whether a result says that the function has finished.
func (r Result) isDone() bool { return r[Done] == true }

// isMarker reports whether a result is the wrapper's.
func (r Result) isMarker() bool { return r[Duplicate] == true }

// with is a result and what a marker adds to it.
func (r Result) with(marker Result) Result {
	both := Result{}
	maps.Copy(both, r)
	maps.Copy(both, marker)
	return both
}

// check reports what a function must not say.
func (r Result) check() error {
	if _, has := r[Duplicate]; has {
		return fmt.Errorf("report: the name %q is reserved for the end of a function: choose another", Duplicate)
	}
	if v, has := r[Done]; has {
		if _, ok := v.(bool); !ok {
			return fmt.Errorf("report: %q is a %T: say true or false", Done, v)
		}
	}
	return nil
}
