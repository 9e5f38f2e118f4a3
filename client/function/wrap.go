package function

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"

	"github.com/ckptstore/ckptstore/client"
)

// Checkpoint gives a function with the signature (context, config, checkpoint)
// access to the store. Such a function can report with [Report].
type Checkpoint struct {
	Resume string // full ID of the checkpoint to resume from, or empty
	c      *client.Client
}

var errNoStore = errors.New("this trial has no trainer to keep checkpoints; start it with `trainer run -- COMMAND`")

// Load is [client.Client.Load]. By default it loads the checkpoint to resume from.
func (c Checkpoint) Load(ctx context.Context, state *client.State, o client.LoadOptions) (client.Loaded, error) {
	if c.c == nil {
		return client.Loaded{}, fmt.Errorf("load: %w", errNoStore)
	}
	return c.c.Load(ctx, state, o)
}

// Save is [client.Client.Save].
func (c Checkpoint) Save(ctx context.Context, step int64, state client.State, o client.SaveOptions) (*client.Save, error) {
	if c.c == nil {
		return nil, fmt.Errorf("save: %w", errNoStore)
	}
	return c.c.Save(ctx, step, state, o)
}

// Client returns the worker's connection, for RPC and collectives, or nil without a trainer.
func (c Checkpoint) Client() *client.Client { return c.c }

// Function is a training function whose signature is known.
type Function struct {
	fn        reflect.Value
	signature Signature
	output    output
}

// Signature lists the arguments of a function after its context.
type Signature string

// Signatures. A function that takes both a checkpoint and a reporter has TakesCheckpoint.
const (
	TakesConfig     Signature = "config"
	TakesReporter   Signature = "config, reporter"
	TakesCheckpoint Signature = "config, checkpoint"
)

var (
	contextType    = reflect.TypeFor[context.Context]()
	reporterType   = reflect.TypeFor[*Reporter]()
	checkpointType = reflect.TypeFor[Checkpoint]()
	errorType      = reflect.TypeFor[error]()
	anyMap         = reflect.TypeFor[map[string]any]()
)

// Wrap makes a training function of one of
//
//	func(context.Context, Config)
//	func(context.Context, Config, *Reporter)
//	func(context.Context, Config, Checkpoint)
//
// It may return an error, and before it a result: a map, a number, or a generator
// of them. A generator is an iter.Seq, or an iter.Seq2 whose second values are
// errors. Every returned or yielded value is reported, a number, including 0, as
// [Metric]. Other parameters or results are an [ErrSignature].
func Wrap(fn any) (*Function, error) {
	f := &Function{fn: reflect.ValueOf(fn), signature: TakesConfig}
	wrong := func(format string, args ...any) (*Function, error) {
		return nil, fmt.Errorf("wrap %T: %w: %s", fn, ErrSignature, fmt.Sprintf(format, args...))
	}
	if f.fn.Kind() != reflect.Func || f.fn.IsNil() {
		return wrong("want func(context.Context, function.Config, …)")
	}
	t := f.fn.Type()
	seen := map[reflect.Type]bool{}
	for i := range t.NumIn() {
		in := t.In(i)
		switch {
		case i == 0 && in == contextType, i == 1 && isConfig(in) && !t.IsVariadic():
			continue
		case i < 2:
		case in == checkpointType && !seen[in]:
			f.signature = TakesCheckpoint
		case in == reporterType && !seen[in]:
			if f.signature == TakesConfig {
				f.signature = TakesReporter
			}
		default:
			return wrong("parameter %d is unknown: only a *function.Reporter and a function.Checkpoint, each at most once, may follow the context and the config", i+1)
		}
		if i < 2 {
			return wrong("parameter %d is a %s: the first are a context.Context and a function.Config", i+1, in)
		}
		seen[in] = true
	}
	if t.NumIn() < 2 {
		return wrong("it has %d parameters: the first are a context.Context and a function.Config", t.NumIn())
	}
	var err error
	if f.output, err = outputOf(t); err != nil {
		return wrong("%v", err)
	}
	return f, nil
}

func isConfig(t reflect.Type) bool { return t.Kind() == reflect.Map && anyMap.ConvertibleTo(t) }

// Signature returns the arguments that the function takes.
func (f *Function) Signature() Signature { return f.signature }

// Entry binds the function to its arguments. If the function returns without
// having reported "done", the marker is its last result.
func (f *Function) Entry(config Config, c Checkpoint) Entry {
	config = maps.Clone(config)
	if config == nil {
		config = Config{}
	}
	return func(ctx context.Context, p *Reporter) error {
		ctx = context.WithValue(ctx, reporterKey{}, p)
		t := f.fn.Type()
		in := []reflect.Value{reflect.ValueOf(ctx), reflect.ValueOf(map[string]any(config)).Convert(t.In(1))}
		for i := 2; i < t.NumIn(); i++ {
			if t.In(i) == checkpointType {
				in = append(in, reflect.ValueOf(c))
			} else {
				in = append(in, reflect.ValueOf(p))
			}
		}
		if err := f.output.report(ctx, p, f.fn.Call(in)); err != nil {
			return err
		}
		return p.finish(ctx)
	}
}
