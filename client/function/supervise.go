package function

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"time"
)

// errorTimeout is how long supervise waits to hand over an error.
const errorTimeout = 10 * time.Second

// LevelCritical is the log level of conditions that should never occur.
const LevelCritical = slog.LevelError + 4

// Error is the failure of a function.
type Error struct {
	Err       error  // the returned error or the value of the panic
	Traceback string // the stack of a panic, or the chain of the error
}

func (e *Error) Error() string { return "the function failed: " + e.Err.Error() }
func (e *Error) Unwrap() error { return e.Err }

// supervise runs the function, hands over its error and then closes r.ended. A
// function that ends by runtime.Goexit has no error.
func (r *Runner) supervise() {
	defer close(r.ended)
	defer r.cancel(ErrEnded)
	err := r.judge(r.call())
	if err == nil {
		return
	}
	limit := time.NewTimer(errorTimeout)
	defer limit.Stop()
	select {
	case r.errs <- err:
	case <-limit.C:
		var e *Error
		errors.As(err, &e)
		r.log.Log(context.WithoutCancel(r.ctx), LevelCritical,
			"function error dropped: an earlier one was not fetched",
			"error", err, "traceback", e.Traceback)
	}
}

// call runs the function. It returns a panic as an error with its stack.
func (r *Runner) call() (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = panicked(p, debug.Stack())
		}
	}()
	return r.entry(r.ctx, r.reporter)
}

func panicked(p any, stack []byte) error {
	err, ok := p.(error)
	if !ok {
		err = fmt.Errorf("%v", p)
	}
	return &Error{fmt.Errorf("panic: %w", err), string(stack)}
}

// judge returns the failure of a function that ended with err, or nil.
func (r *Runner) judge(err error) error {
	if err == nil || errors.Is(err, ErrStop) && r.reporter.Stopping() != "" {
		return nil
	}
	e := &Error{err, chain(err)}
	if p := (*Error)(nil); errors.As(err, &p) {
		e = p // a panic, with its stack
	}
	if errors.Is(err, ErrStop) {
		e.Err = fmt.Errorf("it returned ErrStop, but no stop was requested; return nil to end: %w", unprompted{e.Err})
	}
	return e
}

// unprompted hides an ErrStop that was not requested from errors.Is.
type unprompted struct{ err error }

func (u unprompted) Error() string { return u.err.Error() }

// chain formats an error and the errors that it wraps, the cause last, each with
// its type. %+v prints the stack of errors that carry one.
func chain(err error) string {
	var text strings.Builder
	for ; err != nil; err = errors.Unwrap(err) {
		fmt.Fprintf(&text, "%T: %+v\n", err, err)
	}
	return text.String()
}

// envErrorFile is torchelastic's variable for the file in which a worker records its failure.
const envErrorFile = "TORCHELASTIC_ERROR_FILE"

// writeErrorFile records why the function failed, in the format of torchelastic's
// record decorator.
func writeErrorFile(err error) error {
	path := os.Getenv(envErrorFile)
	if path == "" {
		return nil
	}
	traceback := chain(err)
	if e := (*Error)(nil); errors.As(err, &e) {
		traceback = e.Traceback
	}
	text, jerr := json.Marshal(map[string]any{"message": map[string]any{
		"message": err.Error(),
		"extraInfo": map[string]string{
			"py_callstack": traceback, "timestamp": strconv.FormatInt(time.Now().Unix(), 10),
		},
	}})
	if jerr != nil {
		return fmt.Errorf("write the error file: %w", jerr)
	}
	if werr := os.WriteFile(path, text, 0o600); werr != nil {
		return fmt.Errorf("write the error file: %w", werr)
	}
	return nil
}
