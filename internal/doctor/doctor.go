// Package doctor examines a machine before jobs are run on it: its GPUs, its
// limits, its shared memory, the filesystem of a store, and its sockets.
//
//	check    one question, known by its ID, such as store.lock
//	status   ok; a warning, with which jobs run; a problem, with which they
//	         fail sooner or later; or not checked, with the reason
//	probe    a check that tries something out: with files of its own in a
//	         directory of its own, which is removed
//	report   all checks, in one order
//
// A probe that does not answer, as one of a network filesystem whose server is
// gone, is given up after a while and is a problem.
package doctor

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ckptstore/ckptstore/gpu"
)

// Status is what a check has come to.
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
	Do     string `json:"do"` // the next step; empty when there is none
}

// Report is what an examination has found.
type Report struct {
	Store    string  `json:"store"`    // as it was asked for
	Examined string  `json:"examined"` // the directory whose filesystem was probed; empty when none was
	Checks   []Check `json:"checks"`
	Warnings int     `json:"warnings"`
	Problems int     `json:"problems"`
}

// ErrFound says that an examination has found problems.
var ErrFound = errors.New("problems found")

// Options say what to examine, and with what.
type Options struct {
	Store     string                                       // a directory, which need not exist, or a URL
	Shared    string                                       // the directory for staging
	Inventory func(context.Context) (gpu.Inventory, error) // looks at the GPUs
	TryLock   func(ctx context.Context, file string) error // in another process: nil when it took the lock, ErrHeld when it is held
	Patience  time.Duration                                // for each check
}

// answer is what a check finds.
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

// Examine makes all checks. The error says that they could not be finished,
// because ctx has ended or because a probe's directory could not be removed.
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

// check makes one check, unless ctx has ended, and gives it up after a while.
// One that is under way when ctx ends is waited for: what it makes must be
// there to be removed.
func (e *examination) check(ctx context.Context, id string, look func(ctx context.Context) answer) {
	if ctx.Err() != nil {
		e.add(id, notChecked("", "the examination was ended"))
		return
	}
	limited, cancel := context.WithTimeout(ctx, e.Patience)
	defer cancel()
	// A little later than its own deadline: then it says itself what was late.
	late := time.NewTimer(e.Patience + e.Patience/10)
	defer late.Stop()
	answers := make(chan answer, 1)
	go func() { answers <- look(limited) }()
	select {
	case a := <-answers:
		if ctx.Err() != nil { // which may be all that is wrong
			a = notChecked("", "the examination was ended")
		}
		e.add(id, a)
	case <-late.C:
		e.add(id, problem("look for a server or a disk that hangs: dmesg, and processes in state D", "no answer after %v", e.Patience))
	}
}
