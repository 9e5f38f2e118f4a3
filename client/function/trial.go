package function

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
)

// Trainer takes the results of a function. [Drive] calls it from one goroutine.
type Trainer interface {
	// Report hands over one iteration and returns once the trainer has it. If
	// last is set, the function has finished and no report follows.
	Report(ctx context.Context, step int64, metrics map[string]any, last bool) error
	// Stopped returns why the training should end, such as "stop" or "preempt",
	// or "". Drive calls it after each report.
	Stopped() string
}

// Drive steps a function to its end and hands each of its results to the
// trainer once, except the marker. It returns how many iterations the trainer
// has taken. When the trainer requests a stop, Drive stops the function; a clean
// end is then no error. When ctx ends, Drive stops the function too, and returns
// the cause of ctx joined with the function's error.
func Drive(ctx context.Context, r *Runner, t Trainer) (iterations int, err error) {
	clean := context.WithoutCancel(ctx) // Stop has a timeout of its own
	defer context.AfterFunc(ctx, func() { r.RequestStop("stop") })()
	for {
		result, err := r.Step(ctx)
		switch {
		case ctx.Err() != nil:
			return iterations, errors.Join(context.Cause(ctx), ownError(err), r.Stop(clean))
		case err != nil:
			return iterations, err
		case result.isMarker():
			return iterations, r.Stop(clean)
		}
		step, err := result.step(int64(iterations) + 1)
		if err == nil {
			err = t.Report(ctx, step, result.metrics(), result.isDone())
		}
		if ctx.Err() != nil {
			return iterations, errors.Join(context.Cause(ctx), r.Stop(clean))
		}
		if err != nil {
			return iterations, errors.Join(fmt.Errorf("iteration %d: %w", iterations+1, err), r.Stop(clean))
		}
		iterations++
		if result.isDone() {
			return iterations, r.Stop(clean)
		}
		if why := t.Stopped(); why != "" {
			r.RequestStop(why)
			return iterations, r.Stop(clean)
		}
	}
}

// ownError returns err if the function caused it, else nil.
func ownError(err error) error {
	if e := (*Error)(nil); errors.As(err, &e) {
		return err
	}
	return nil
}

// metrics returns a result without the entries that Report takes as arguments.
func (r Result) metrics() Result {
	rest := maps.Clone(r)
	delete(rest, Step)
	delete(rest, Done)
	return rest
}

// step returns the training step of a result, by default the iteration.
func (r Result) step(iteration int64) (int64, error) {
	given, has := r[Step]
	if !has {
		return iteration, nil
	}
	v := reflect.ValueOf(given)
	switch {
	case v.IsValid() && v.CanInt():
		return v.Int(), nil
	case v.IsValid() && v.CanFloat() && float64(int64(v.Float())) == v.Float():
		return int64(v.Float()), nil
	}
	return 0, fmt.Errorf("%q is %v (%T): want a whole number", Step, given, given)
}
