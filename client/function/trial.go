package function

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
)

// Trainer takes the results of a function. It is asked by one goroutine.
type Trainer interface {
	// Report hands over one iteration and returns when it is taken. last says
	// that the function has finished: nothing comes after it.
	Report(ctx context.Context, step int64, metrics map[string]any, last bool) error
	// Stopped is why the training is to end, such as "stop" or "preempt", or
	// empty. It is asked after each report.
	Stopped() string
}

// Drive steps a function to its end and hands each of its results to the
// trainer, once: the marker is none. It returns how many iterations the trainer
// has taken. When the trainer asks for a stop, the function is stopped and a
// clean end is no error. When ctx ends, it is stopped too, and why ctx ended is
// the error, with the function's.
func Drive(ctx context.Context, r *Runner, t Trainer) (iterations int, err error) {
	clean := context.WithoutCancel(ctx) // stopping has a limit of its own
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

// ownError is err if it is the function's.
func ownError(err error) error {
	if e := (*Error)(nil); errors.As(err, &e) {
		return err
	}
	return nil
}

// metrics are a result without what the trainer is told beside them.
func (r Result) metrics() Result {
	rest := maps.Clone(r)
	delete(rest, Step)
	delete(rest, Done)
	return rest
}

// step is the step that a result belongs to.
func (r Result) step(iteration int64) (int64, error) {
	said, has := r[Step]
	if !has {
		return iteration, nil
	}
	v := reflect.ValueOf(said)
	switch {
	case v.IsValid() && v.CanInt():
		return v.Int(), nil
	case v.IsValid() && v.CanFloat() && float64(int64(v.Float())) == v.Float():
		return int64(v.Float()), nil
	}
	return 0, fmt.Errorf("%q is %v (%T): want a whole number", Step, said, said)
}
