package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// launchRecord says who recorded a job.started. Everything but Proven is its author's
// word.
type launchRecord struct {
	Proven   bool      `json:"proven"` // by a trainer of this user
	Doubt    string    `json:"doubt,omitempty"`
	Sequence uint64    `json:"sequence"`
	Event    string    `json:"event"` // ID
	Stored   time.Time `json:"stored"`
	Host     string    `json:"host"`
	PID      int       `json:"pid"`
}

// startedAt reads the job.started of a job.
func startedAt(ctx context.Context, s *store.Store, run string, of projections.Job) (events.Recorded, *events.JobStarted, error) {
	if of.StartedSeq == 0 {
		return events.Recorded{}, nil, fmt.Errorf("%w: job %s of run %q has no job.started", errNoLaunch, of.ID, run)
	}
	event, err := s.Log.At(ctx, of.StartedSeq)
	if err != nil {
		return event, nil, err
	}
	body, err := event.Body()
	if err != nil {
		return event, nil, err
	}
	job, ok := body.(*events.JobStarted)
	if !ok || event.Scope.Run != run || job.Job != of.ID {
		return event, nil, fmt.Errorf("continue run %q: event %d is not the start of job %s: the views differ from the log: `ckptstore views rebuild`", run, of.StartedSeq, of.ID)
	}
	return event, job, nil
}

// prove notes whether a trainer of this user recorded the launch. entered is why
// this process is not in the job's directory.
func (r *relaunch) prove(ctx context.Context, entered error) {
	err := entered
	var dir fs.FileInfo
	if err == nil {
		dir, err = os.Stat(".")
	}
	if err == nil {
		err = r.proof(ctx, dir)
	}
	if r.unproven, r.Recorded.Proven = err, err == nil; err != nil {
		r.Recorded.Doubt = err.Error()
	}
}

// recordedBy says who recorded the command.
func (r relaunch) recordedBy() string {
	text := fmt.Sprintf("job %s of run %s, event %d of %s: ", quoted([]string{r.Job}), quoted([]string{r.Run}), r.Recorded.Sequence, console.When(r.Recorded.Stored))
	from := fmt.Sprintf("process %d on %s", r.Recorded.PID, quoted([]string{r.Recorded.Host}))
	if r.unproven == nil {
		return text + "recorded by this user, " + from
	}
	return text + r.unproven.Error() + "; its author claims to be " + from
}

// errDeclined says that a command was not executed, because the user has not agreed to it.
var errDeclined = errors.New("not allowed")

// approve shows the command and lets it pass if it is proven to be this user's, or
// if the user agrees.
func (a *app) approve(ctx context.Context, r relaunch, yes bool) error {
	if !a.Quiet || r.unproven != nil {
		fmt.Fprintf(a.Err, "%s\n%s\n", r.recordedBy(), r.shell())
	}
	if yes || r.unproven == nil {
		return nil
	}
	agreed, err := a.Ask(ctx, "Execute it? [y/N] ")
	if err == nil && !agreed {
		err = errors.New("you did not agree")
	}
	if err != nil {
		return fmt.Errorf("continue run %q: %w: %w: read the command; `ckptstore continue %s --yes` executes it", r.Run, errDeclined, err, quoted([]string{r.Run}))
	}
	return nil
}
