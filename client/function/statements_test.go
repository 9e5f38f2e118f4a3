package function

import (
	"bytes"
	"context"
	"errors"
	"io"
	"iter"
	"log/slog"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// trial is a runner in a synctest bubble, with its log.
type trial struct {
	*Runner
	t   *testing.T
	log bytes.Buffer
}

func newTrial(t *testing.T, entry Entry) *trial {
	x := &trial{t: t}
	log := slog.New(slog.NewTextHandler(&x.log, &slog.HandlerOptions{ReplaceAttr: named}))
	x.Runner = NewRunner(t.Context(), entry, Options{Logger: log})
	return x
}

// wrapped is the trial of a function that has a signature.
func wrapped(t *testing.T, fn any) *trial {
	t.Helper()
	f, err := Wrap(fn)
	if err != nil {
		t.Fatal(err)
	}
	return newTrial(t, f.Entry(nil, Checkpoint{}))
}

// step returns the result of a step that must succeed, without its time.
func (x *trial) step() Result {
	x.t.Helper()
	r, err := x.Step(x.t.Context())
	if err != nil {
		x.t.Fatalf("step: %v", err)
	}
	delete(r, TimeThisIter)
	return r
}

func (x *trial) want(want Result) {
	x.t.Helper()
	if got := x.step(); !reflect.DeepEqual(got, want) {
		x.t.Errorf("step gave %v, want %v", got, want)
	}
}

// fails is failure without the error.
func (x *trial) fails(want error) {
	x.t.Helper()
	if err := x.failure(want); err == nil {
		x.t.Fatal("no error")
	}
}

// failure returns the error of a step that must fail.
func (x *trial) failure(want error) error {
	x.t.Helper()
	r, err := x.Step(x.t.Context())
	if err == nil || want != nil && !errors.Is(err, want) {
		x.t.Fatalf("step gave %v, %v, want the error %v", r, err, want)
	}
	return err
}

func (x *trial) logged(parts ...string) {
	x.t.Helper()
	for _, part := range parts {
		if strings.Count(x.log.String(), part) != 1 {
			x.t.Errorf("%q is not once in the log:\n%s", part, &x.log)
		}
	}
}

func Test13HandOffs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		started, went := false, false
		x := newTrial(t, func(ctx context.Context, p *Reporter) error {
			started = true
			err := p.Report(ctx, Result{"n": 1})
			went = true
			return err
		})
		if cap(x.results) != 1 || cap(x.errs) != 1 {
			t.Errorf("room for %d results and %d errors", cap(x.results), cap(x.errs))
		}
		if synctest.Wait(); started {
			t.Error("the function ran before the first step")
		}
		x.want(Result{"n": 1})
		if synctest.Wait(); !started || went {
			t.Errorf("started %v; continued without a step %v", started, went)
		}
		x.fails(ErrSilent)
		if !went {
			t.Error("a step does not resume the function")
		}
	})
}

func Test14Report(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		metrics := Result{"n": 1}
		x := newTrial(t, func(ctx context.Context, p *Reporter) error {
			for n := range 3 {
				metrics["n"] = n + 1
				if err := p.Report(ctx, metrics); err != nil {
					return err
				}
			}
			if len(metrics) != 1 {
				t.Errorf("the function's own metrics are %v now", metrics)
			}
			go func() { _ = p.Report(context.WithoutCancel(ctx), Result{"n": "late"}) }()
			synctest.Wait() // until it has handed over; then this function ends
			return nil
		})
		first := x.step()
		second := x.step()
		if first["n"] != 1 || second["n"] != 2 {
			t.Errorf("results %v and %v: a report is no copy", first, second)
		}
		first["n"] = "changed by the caller"
		x.want(Result{"n": 3})
		x.want(Result{"n": "late"})
		x.fails(ErrSilent)
		x.RequestStop("stop")
	})
}

// A result that arrives just as the function ends is still fetched.
func Test14LateResult(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := newTrial(t, func(_ context.Context, p *Reporter) error {
			p.r.results <- handed{Result{"n": "late"}, make(chan struct{})}
			return nil
		})
		x.proceed()
		<-x.ended
		for range 50 { // both channels are ready: neither choice of select may lose the result
			x.turn <- struct{}{}
			if _, err := x.fetch(t.Context()); err != nil {
				t.Fatal(err)
			}
			x.results <- handed{Result{"n": "late"}, make(chan struct{})}
			x.over = false
			<-x.turn
		}
	})
}

func Test15TimeThisIter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := newTrial(t, func(ctx context.Context, p *Reporter) error {
			for _, m := range []Result{{}, {}, {TimeThisIter: "mine"}, {TimeThisIter: 0}} {
				<-time.After(3 * time.Second)
				if err := p.Report(ctx, m); err != nil {
					return err
				}
			}
			return nil
		})
		<-time.After(time.Hour) // before the start
		for i, want := range []any{3.0, 3.0, "mine", 0} {
			r, err := x.Step(t.Context())
			if err != nil || r[TimeThisIter] != want {
				t.Errorf("iteration %d took %v (%v), want %v", i+1, r[TimeThisIter], err, want)
			}
			<-time.After(time.Minute) // the hand-off
		}
		x.fails(ErrSilent)
	})
}

// book is a trainer that records its reports.
type book struct {
	steps []int64
	got   []Result
	last  []bool
	stop  string // requested after this many reports:
	after int
}

func (b *book) Report(_ context.Context, step int64, metrics map[string]any, last bool) error {
	delete(metrics, TimeThisIter)
	b.steps, b.got, b.last = append(b.steps, step), append(b.got, metrics), append(b.last, last)
	return nil
}

func (b *book) Stopped() string {
	if b.stop != "" && len(b.got) >= b.after {
		return b.stop
	}
	return ""
}

func Test16Duplicate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		train := func(ctx context.Context, _ Config, p *Reporter) error {
			return errors.Join(p.Report(ctx, Result{"a": 1, "b": 1}), p.Report(ctx, Result{"b": 2}))
		}
		x := wrapped(t, train)
		x.want(Result{"a": 1, "b": 1})
		x.want(Result{"b": 2})
		x.want(Result{"b": 2, Duplicate: true})
		x.fails(ErrEnded)

		b := &book{}
		n, err := Drive(t.Context(), wrapped(t, train).Runner, b)
		if err != nil || n != 2 || !reflect.DeepEqual(b.got, []Result{{"a": 1, "b": 1}, {"b": 2}}) || !slices.Equal(b.steps, []int64{1, 2}) {
			t.Errorf("%d iterations, %v; the trainer got %v of the steps %v", n, err, b.got, b.steps)
		}
		// And "done" is the last iteration itself.
		b = &book{}
		n, err = Drive(t.Context(), wrapped(t, func(ctx context.Context, _ Config, p *Reporter) error {
			err := errors.Join(p.Report(ctx, Result{"a": 1, Step: 7}), p.Report(ctx, Result{"a": 2, Step: 14.0, Done: true}))
			if late := p.Report(ctx, Result{"a": 3}); !errors.Is(late, ErrDone) {
				t.Errorf("a report after done: %v", late)
			}
			return err
		}).Runner, b)
		if err != nil || n != 2 || len(b.got) != 2 || !slices.Equal(b.steps, []int64{7, 14}) || !slices.Equal(b.last, []bool{false, true}) {
			t.Errorf("%d iterations, %v; the trainer got %v of the steps %v, last %v", n, err, b.got, b.steps, b.last)
		}
	})
}

func Test17NoReport(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := wrapped(t, func(context.Context, Config) {})
		b := &book{}
		n, err := Drive(t.Context(), x.Runner, b)
		if err != nil || n != 0 || len(b.got) != 0 {
			t.Errorf("%d iterations, %v; the trainer got %v", n, err, b.got)
		}
		x.logged("level=WARN", "function returned without a report")
		x = wrapped(t, func(context.Context, Config) {})
		x.want(Result{Duplicate: true})
	})
}

var errBug = errors.New("a bug")

func explodes() { panic(errBug) }

func Test18ErrorAfterResults(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		// The first step gives up, so the result waits when the error comes.
		x := newTrial(t, func(ctx context.Context, p *Reporter) error {
			<-time.After(time.Minute)
			impatient, cancel := context.WithTimeout(ctx, time.Second)
			defer cancel()
			_ = p.Report(impatient, Result{"n": 1})
			return errBug
		})
		impatient, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if r, err := x.Step(impatient); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("a step of one second gave %v, %v", r, err)
		}
		<-time.After(2 * time.Minute)
		x.want(Result{"n": 1})
		x.logged("returning its earlier results first")
		var e *Error
		if err := x.failure(errBug); !errors.As(err, &e) || !strings.Contains(e.Traceback, "errors.errorString: a bug") {
			t.Errorf("error %#v", err)
		}
		x.fails(ErrEnded)

		x = newTrial(t, func(ctx context.Context, p *Reporter) error {
			if err := p.Report(ctx, Result{"n": 1}); err != nil {
				return err
			}
			explodes()
			return nil
		})
		x.want(Result{"n": 1})
		if err := x.failure(errBug); !errors.As(err, &e) || !strings.Contains(e.Traceback, "function.explodes") || err.Error() != "the function failed: panic: a bug" {
			t.Errorf("a panic is %v with the stack:\n%s", err, e.Traceback)
		}
	})
}

func Test19EndWithoutResultOrError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := newTrial(t, func(context.Context, *Reporter) error { return nil })
		if err := x.failure(ErrSilent); !strings.Contains(err.Error(), "ran until completion without reporting") {
			t.Error(err)
		}
		// A goroutine can also end without returning.
		newTrial(t, func(context.Context, *Reporter) error {
			runtime.Goexit()
			return nil
		}).fails(ErrSilent)
	})
}

func Test20StopSignal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for name, raise := range map[string]Entry{
			"returned": func(context.Context, *Reporter) error { return ErrStop },
			"wrapped":  func(context.Context, *Reporter) error { return errors.Join(io.EOF, ErrStop) },
			"panic":    func(context.Context, *Reporter) error { panic(ErrStop) },
		} {
			var e *Error
			if err := newTrial(t, raise).failure(nil); !errors.As(err, &e) || errors.Is(err, ErrStop) || !strings.Contains(err.Error(), "no stop was requested") {
				t.Errorf("%s: an unrequested stop is %v", name, err)
			}
			x := newTrial(t, func(ctx context.Context, p *Reporter) error {
				if err := p.Report(ctx, Result{}); !errors.Is(err, ErrStop) || p.Stopping() != "stop" {
					t.Errorf("%s: report gave %v, stopping %q", name, err, p.Stopping())
				}
				return raise(ctx, p)
			})
			x.step()
			if err := x.Stop(t.Context()); err != nil {
				t.Errorf("%s: a requested stop is %v", name, err)
			}
		}
	})
}

func Test21Stop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		// Stop does not wait for a function that never ends.
		var ended context.Context
		x := newTrial(t, func(ctx context.Context, p *Reporter) error {
			ended = ctx
			_ = p.Report(ctx, Result{})
			<-time.After(time.Hour)
			return nil
		})
		x.step()
		began := time.Now()
		if err := x.Stop(t.Context()); !errors.Is(err, ErrRunning) || time.Since(began) != defaultStopTimeout {
			t.Errorf("stop gave %v after %v", err, time.Since(began))
		}
		if !errors.Is(context.Cause(ended), ErrStop) {
			t.Errorf("the function's context ended with %v", context.Cause(ended))
		}
		<-time.After(2 * time.Hour)

		// Stop logs a result that was not fetched, and returns the error.
		x = newTrial(t, func(ctx context.Context, p *Reporter) error {
			<-time.After(time.Second)
			if err := p.Report(ctx, Result{"n": "left"}); !errors.Is(err, ErrStop) {
				t.Errorf("report gave %v", err)
			}
			return errBug
		})
		impatient, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		if _, err := x.Step(impatient); err == nil {
			t.Fatal("a step of a millisecond gave a result")
		}
		if err := x.Stop(t.Context()); !errors.Is(err, errBug) {
			t.Errorf("stop gave %v", err)
		}
		x.logged("result after stop lost", "n:left")
		x.fails(ErrEnded)
		if err := x.Stop(t.Context()); err != nil {
			t.Errorf("the second stop gave %v", err)
		}

		// Before the first step, the function has not started.
		x = newTrial(t, func(context.Context, *Reporter) error { t.Error("it ran"); return nil })
		if err := x.Stop(t.Context()); err != nil {
			t.Error(err)
		}
		x.fails(ErrEnded)
	})
}

// The trainer's stop reaches the function with its reason, and is a clean end.
func Test21TrainerStops(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		why := ""
		x := wrapped(t, func(ctx context.Context, _ Config, p *Reporter) (err error) {
			for err == nil {
				err = p.Report(ctx, Result{})
			}
			why = p.Stopping()
			return err
		})
		b := &book{stop: "preempt", after: 3}
		if n, err := Drive(t.Context(), x.Runner, b); err != nil || n != 3 || why != "preempt" {
			t.Errorf("%d iterations, %v, for the reason %q", n, err, why)
		}
		// The end of the context stops it too, and is the error.
		ctx, cancel := context.WithCancelCause(t.Context())
		x = wrapped(t, func(fctx context.Context, _ Config, p *Reporter) error {
			<-time.After(time.Second)
			cancel(io.ErrClosedPipe)
			<-time.After(time.Second)
			return p.Report(fctx, Result{})
		})
		b = &book{}
		if n, err := Drive(ctx, x.Runner, b); !errors.Is(err, io.ErrClosedPipe) || ownError(err) != nil || n != 0 {
			t.Errorf("%d iterations, %v", n, err)
		}
	})
}

func Test22StepAfterTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		runs := 0
		x := wrapped(t, func(ctx context.Context, _ Config, p *Reporter) error {
			runs++
			return p.Report(ctx, Result{Done: true})
		})
		x.want(Result{Done: true})
		synctest.Wait()
		x.fails(ErrEnded)
		x.fails(ErrEnded)
		if runs != 1 {
			t.Errorf("the function ran %d times", runs)
		}
	})
}

func Test23ErrorThatCannotBeHandedOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := newTrial(t, func(context.Context, *Reporter) error { return errBug })
		first := errors.New("not fetched yet")
		x.errs <- first
		began := time.Now()
		x.fails(first)
		if took := time.Since(began); took != 10*time.Second {
			t.Errorf("the error waited %v", took)
		}
		x.logged("level=CRITICAL", "the function failed: a bug")
	})
}

func Test24Signatures(t *testing.T) {
	type own map[string]any
	for _, c := range []struct {
		fn   any
		want Signature
	}{
		{func(context.Context, Config) {}, TakesConfig},
		{func(context.Context, map[string]any) error { return nil }, TakesConfig},
		{func(context.Context, own) (int, error) { return 0, nil }, TakesConfig},
		{func(context.Context, Config, *Reporter) {}, TakesReporter},
		{func(context.Context, Config, Checkpoint) {}, TakesCheckpoint},
		{func(context.Context, Config, *Reporter, Checkpoint) {}, TakesCheckpoint},
		{func(context.Context, Config, Checkpoint, *Reporter) {}, TakesCheckpoint},
	} {
		f, err := Wrap(c.fn)
		if err != nil || f.Signature() != c.want {
			t.Errorf("%T takes %v (%v), want %s", c.fn, f, err, c.want)
			continue
		}
		synctest.Test(t, func(t *testing.T) {
			x := newTrial(t, f.Entry(Config{"lr": 1}, Checkpoint{Resume: "step-1.a1"}))
			if r := x.step(); !r.isMarker() && r[Metric] != int64(0) {
				t.Errorf("%T gave %v", c.fn, r)
			}
			if err := x.Stop(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	for _, fn := range []any{
		nil, 7, (func(context.Context, Config))(nil),
		func() {}, func(Config) {}, func(context.Context) {}, func(Config, context.Context) {},
		func(context.Context, Config, int) {}, func(context.Context, Config, Reporter) {},
		func(context.Context, Config, *Reporter, *Reporter) {}, func(context.Context, ...Config) {},
		func(context.Context, map[string]int) {}, func(context.Context, Config, ...Checkpoint) {},
		func(context.Context, Config) string { return "" }, func(context.Context, Config) bool { return true },
		func(context.Context, Config) (int, int) { return 1, 2 },
		func(context.Context, Config) iter.Seq[string] { return nil },
		func(context.Context, Config) iter.Seq2[int, int] { return nil },
	} {
		if f, err := Wrap(fn); !errors.Is(err, ErrSignature) {
			t.Errorf("%T is wrapped as %v, %v", fn, f, err)
		}
	}
}

func Test24ReturnedAndYielded(t *testing.T) {
	marker := func(r Result) Result { return r.with(Result{Duplicate: true}) }
	for name, c := range map[string]struct {
		fn   any
		want []Result
	}{
		"map":     {func(context.Context, Config) map[string]any { return map[string]any{"a": 1} }, []Result{{"a": 1}}},
		"empty":   {func(context.Context, Config) Result { return Result{} }, []Result{{}}},
		"nil":     {func(context.Context, Config) Result { return nil }, nil},
		"zero":    {func(context.Context, Config) int { return 0 }, []Result{{Metric: int64(0)}}},
		"float":   {func(context.Context, Config) (float32, error) { return 0.5, nil }, []Result{{Metric: 0.5}}},
		"any":     {func(context.Context, Config) any { return uint8(0) }, []Result{{Metric: uint64(0)}}},
		"numbers": {func(context.Context, Config) iter.Seq[int] { return slices.Values([]int{0, 1}) }, []Result{{Metric: int64(0)}, {Metric: int64(1)}}},
		"maps":    {func(context.Context, Config) iter.Seq[Result] { return slices.Values([]Result{{"a": 1}, {}}) }, []Result{{"a": 1}, {}}},
		"pairs": {func(context.Context, Config) iter.Seq2[any, error] {
			return func(yield func(any, error) bool) { _ = yield(0, nil) && yield(Result{"a": 1}, nil) }
		}, []Result{{Metric: int64(0)}, {"a": 1}}},
		"session": {func(ctx context.Context, _ Config) (int, error) { return 2, Report(ctx, Result{"a": 1}) }, []Result{{"a": 1}, {Metric: int64(2)}}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				x := wrapped(t, c.fn)
				last := Result{}
				for _, want := range c.want {
					x.want(want)
					last = want
				}
				r := x.step()
				if !reflect.DeepEqual(r, marker(last)) {
					t.Errorf("the last step gave %v", r)
				}
				x.fails(ErrEnded)
			})
		})
	}
}

// A generator ends with "done", an error or a stop, and cleans up.
func Test24Generators(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cleaned := 0
		generator := func(give ...any) func(context.Context, Config) iter.Seq2[any, error] {
			return func(context.Context, Config) iter.Seq2[any, error] {
				return func(yield func(any, error) bool) {
					defer func() { cleaned++ }()
					for _, v := range give {
						err, _ := v.(error)
						if !yield(v, err) {
							return
						}
					}
				}
			}
		}
		x := wrapped(t, generator(Result{Done: true}, Result{"n": 2}))
		x.want(Result{Done: true})
		if err := x.Stop(t.Context()); err != nil {
			t.Errorf("after done: %v", err)
		}
		x = wrapped(t, generator(0, errBug))
		x.want(Result{Metric: int64(0)})
		x.fails(errBug)
		x = wrapped(t, generator(1, 2, 3))
		x.want(Result{Metric: int64(1)})
		if err := x.Stop(t.Context()); err != nil {
			t.Errorf("stopped: %v", err)
		}
		wrapped(t, generator(nil)).fails(nil)
		wrapped(t, generator("text")).fails(nil)
		if synctest.Wait(); cleaned != 5 {
			t.Errorf("%d generators have cleaned up", cleaned)
		}
	})
}

// Report refuses results that a function must not report.
func TestRefusedReports(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := newTrial(t, func(ctx context.Context, p *Reporter) error {
			for _, r := range []Result{{Done: "yes"}, {Duplicate: true}} {
				if err := p.Report(ctx, r); err == nil {
					t.Errorf("%v is reported", r)
				}
			}
			return nil
		})
		x.fails(ErrSilent)
	})
	if err := Report(t.Context(), Result{}); err == nil {
		t.Error("Report works without a training function")
	}
}
