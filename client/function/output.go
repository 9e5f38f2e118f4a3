package function

import (
	"context"
	"errors"
	"fmt"
	"reflect"
)

// output holds the indexes of a function's results; −1 for absent ones.
type output struct {
	value, err int
	kind       outputKind
}

type outputKind int

const (
	nothing outputKind = iota
	single             // a map or a number
	sequence
	sequenceOfErrors // pairs of a value and an error
)

func outputOf(t reflect.Type) (output, error) {
	o := output{value: -1, err: -1}
	n := t.NumOut()
	if n > 0 && t.Out(n-1) == errorType {
		n--
		o.err = n
	}
	switch {
	case n > 1:
		return o, fmt.Errorf("it returns %d values: want a result and an error, one of them, or nothing", t.NumOut())
	case n == 0:
		return o, nil
	}
	o.value = 0
	switch v := t.Out(0); {
	case isResult(v):
		o.kind = single
	case v.Kind() == reflect.Func && v.CanSeq() && isResult(v.In(0).In(0)):
		o.kind = sequence
	case v.Kind() == reflect.Func && v.CanSeq2() && isResult(v.In(0).In(0)) && v.In(0).In(1) == errorType:
		o.kind = sequenceOfErrors
	default:
		return o, fmt.Errorf("it returns a %s: want a map, a number, or an iterator of them", v)
	}
	return o, nil
}

// isResult reports whether values of a type can be reported. For an interface,
// resultOf checks the value.
func isResult(t reflect.Type) bool {
	switch t.Kind() {
	case reflect.Map:
		return t.ConvertibleTo(anyMap)
	case reflect.Interface:
		return t.NumMethod() == 0
	}
	return t.ConvertibleTo(reflect.TypeFor[float64]())
}

// report reports the values that a function returned.
func (o output) report(ctx context.Context, p *Reporter, out []reflect.Value) error {
	if o.err >= 0 && !out[o.err].IsNil() {
		return out[o.err].Interface().(error)
	}
	switch o.kind {
	case single:
		result, err := resultOf(out[o.value])
		if err != nil || result == nil {
			return err
		}
		return p.Report(ctx, result)
	case sequence:
		if out[o.value].IsNil() {
			return nil
		}
		var err error
		for v := range out[o.value].Seq() {
			if err = p.yielded(ctx, v); err != nil {
				break
			}
		}
		return afterDone(err)
	case sequenceOfErrors:
		if out[o.value].IsNil() {
			return nil
		}
		var err error
		for v, failed := range out[o.value].Seq2() {
			if !failed.IsNil() {
				err = failed.Interface().(error)
			} else {
				err = p.yielded(ctx, v)
			}
			if err != nil {
				break
			}
		}
		return afterDone(err)
	}
	return nil
}

// errFinished stops a generator that yielded "done".
var errFinished = errors.New("the generator has yielded done")

func afterDone(err error) error {
	if errors.Is(err, errFinished) {
		return nil
	}
	return err
}

func (p *Reporter) yielded(ctx context.Context, v reflect.Value) error {
	result, err := resultOf(v)
	if err == nil && result == nil {
		err = errors.New("the function yielded nil: yield a map or a number")
	}
	if err == nil {
		err = p.Report(ctx, result)
	}
	if err == nil && result.isDone() {
		err = errFinished
	}
	return err
}

// resultOf converts a value to a result. It returns nil for a nil map or interface.
func resultOf(v reflect.Value) (Result, error) {
	if v.Kind() == reflect.Interface {
		if v.IsNil() {
			return nil, nil
		}
		v = v.Elem()
	}
	switch {
	case v.Kind() == reflect.Map && v.Type().ConvertibleTo(anyMap):
		return Result(v.Convert(anyMap).Interface().(map[string]any)), nil
	case v.CanInt():
		return Result{Metric: v.Int()}, nil
	case v.CanUint():
		return Result{Metric: v.Uint()}, nil
	case v.CanFloat():
		return Result{Metric: v.Float()}, nil
	}
	return nil, fmt.Errorf("the function returned or yielded a %s: want a map or a number", v.Type())
}
