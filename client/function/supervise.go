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

// errorTimeout is how long an error of the function waits for its place.
const errorTimeout = 10 * time.Second

// LevelCritical is the level of what should never happen.
const LevelCritical = slog.LevelError + 4

// Error is how a function has failed.
type Error struct {
	Err       error  // what it returned, or what it panicked with
	Traceback string // of a panic the stack; else the chain of the error
}

func (e *Error) Error() string { return "the function failed: " + e.Err.Error() }
func (e *Error) Unwrap() error { return e.Err }

// supervise runs the function and hands over its error before it says that the
// function has ended. runtime.Goexit ends it without one.
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
			"an error of the function cannot be handed over, because nobody has taken an earlier one",
			"error", err, "traceback", e.Traceback)
	}
}

// call runs the function; a panic is an error with its stack.
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

// judge says what the end of a function means.
func (r *Runner) judge(err error) error {
	if err == nil || errors.Is(err, ErrStop) && r.reporter.Stopping() != "" {
		return nil
	}
	e := &Error{err, chain(err)}
	if p := (*Error)(nil); errors.As(err, &p) {
		e = p // a panic, with its stack
	}
	if errors.Is(err, ErrStop) {
		e.Err = fmt.Errorf("it gave the stop signal, and nobody has requested a stop: return nil to end: %w", unprompted{e.Err})
	}
	return e
}

// unprompted is a stop signal that nobody may take for one.
type unprompted struct{ err error }

func (u unprompted) Error() string { return u.err.Error() }

// chain is an error and what it wraps, the cause last, each with its type. %+v
// shows the stack of errors that carry one.
func chain(err error) string {
	var text strings.Builder
	for ; err != nil; err = errors.Unwrap(err) {
		fmt.Fprintf(&text, "%T: %+v\n", err, err)
	}
	return text.String()
}

// envErrorFile is torchelastic's: where a worker says why it failed.
const envErrorFile = "TORCHELASTIC_ERROR_FILE"

// writeErrorFile says why the function failed, in the form of torchelastic's
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
