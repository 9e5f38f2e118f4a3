// Package doctor examines a machine before jobs run on it: its GPUs, its limits,
// its shared memory, the filesystem of a store, and its sockets.
//
//	check    one question, known by its ID, such as store.lock
//	status   ok; a warning: jobs run; a problem: jobs fail sooner or later; or
//	         not checked, with the reason
//	probe    a check that tries an operation: with its own files in its own
//	         directory, which is removed
//	report   all checks, in one order
//
// A probe may hang, for example on a network filesystem whose server is gone. The
// doctor abandons it after a while and reports a problem.
package doctor

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ckptstore/ckptstore/gpu"
	problems "github.com/ckptstore/ckptstore/internal/problem"
)

// Status is the result of a check.
type Status string

// Statuses.
const (
	OK         Status = "ok"
	Warning    Status = "warning"
	Problem    Status = "problem"
	NotChecked Status = "not checked"
)

// Check is one question and its answer.
type Check struct {
	ID     string `json:"id"`
	Status Status `json:"status"`
	Saw    string `json:"saw"`
	Do     string `json:"do"` // the next step; may be empty
}

// Report is the result of an examination.
type Report struct {
	Store    string  `json:"store"`    // as requested
	Examined string  `json:"examined"` // the directory whose filesystem was probed; may be empty
	Checks   []Check `json:"checks"`
	Warnings int     `json:"warnings"`
	Problems int     `json:"problems"`
}

// ErrFound is returned if an examination found problems.
var ErrFound = problems.New(problems.Findings, "problems found")

// Options configure an examination.
type Options struct {
	Store     string                                       // a directory, which need not exist, or a URL
	Shared    string                                       // the directory for staging
	Inventory func(context.Context) (gpu.Inventory, error) // looks up the GPUs
	TryLock   func(ctx context.Context, file string) error // in another process: nil if it took the lock, ErrHeld if the lock is held
	Patience  time.Duration                                // for each check
}

// answer is the finding of a check.
type answer struct {
	status Status
	saw    string
	do     string
}

func ok(format string, args ...any) answer {
	return answer{status: OK, saw: fmt.Sprintf(format, args...)}
}

func warning(do, format string, args ...any) answer {
	return answer{Warning, fmt.Sprintf(format, args...), do}
}

func problem(do, format string, args ...any) answer {
	return answer{Problem, fmt.Sprintf(format, args...), do}
}

func notChecked(do, format string, args ...any) answer {
	return answer{NotChecked, fmt.Sprintf(format, args...), do}
}

// examination collects the checks of a report.
type examination struct {
	Options
	report Report
}

// Examine makes all checks. It returns an error if it could not finish them
// because ctx ended, or if it could not remove a probe's directory.
func Examine(ctx context.Context, o Options) (Report, error) {
	e := &examination{Options: o, report: Report{Store: o.Store}}
	e.gpus(ctx)
	e.limits(ctx)
	e.memory(ctx)
	err := e.store(ctx)
	e.sockets(ctx)
	if ctx.Err() != nil {
		err = errors.Join(context.Cause(ctx), err)
	}
	return e.report, err
}

func (e *examination) add(id string, a answer) {
	switch a.status {
	case Warning:
		e.report.Warnings++
	case Problem:
		e.report.Problems++
	}
	e.report.Checks = append(e.report.Checks, Check{id, a.status, a.saw, a.do})
}

// check makes one check, unless ctx has ended, and abandons it after a while. If
// ctx ends during the check, check waits for it: its files must exist before they
// can be removed.
func (e *examination) check(ctx context.Context, id string, look func(ctx context.Context) answer) {
	if ctx.Err() != nil {
		e.add(id, notChecked("", "the examination was interrupted"))
		return
	}
	limited, cancel := context.WithTimeout(ctx, e.Patience)
	defer cancel()
	// Wait a little longer than the check's own deadline: then the check itself
	// reports what was late.
	late := time.NewTimer(e.Patience + e.Patience/10)
	defer late.Stop()
	answers := make(chan answer, 1)
	go func() { answers <- look(limited) }()
	select {
	case a := <-answers:
		if ctx.Err() != nil { // perhaps the only reason for the finding
			a = notChecked("", "the examination was interrupted")
		}
		e.add(id, a)
	case <-late.C:
		e.add(id, problem("look for a hanging server or disk: dmesg, and processes in state D", "no answer after %v", e.Patience))
	}
}
