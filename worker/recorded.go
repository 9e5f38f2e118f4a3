package worker

import (
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/redact"
)

// recorded returns what the log gets of a body: command lines, configurations
// and the texts of errors without secrets. The body itself stays as it is, so
// that workers are started with what was given.
func recorded(names redact.Names, body events.Body) events.Body {
	switch b := body.(type) {
	case *events.JobStarted:
		c := *b
		c.Command, c.Flags = names.Args(b.Command), names.Args(b.Flags)
		return &c
	case *events.JobEnded:
		c := *b
		c.Reason = redact.Text(b.Reason)
		return &c
	case *events.TrialCreated:
		c := *b
		c.Config = names.Config(b.Config)
		return &c
	case *events.TrialPaused:
		c := *b
		c.Reason = redact.Text(b.Reason)
		return &c
	case *events.TrialErrored:
		c := *b
		c.Message = redact.Text(b.Message)
		return &c
	case *events.WorkerExited:
		c := *b
		c.Message, c.Traceback = redact.Text(b.Message), redact.Text(b.Traceback)
		return &c
	case *events.GroupStopped:
		c := *b
		c.Reason = redact.Text(b.Reason)
		return &c
	case *events.WriteFailed:
		c := *b
		c.Error = redact.Text(b.Error)
		return &c
	case *events.CheckpointAborted:
		c := *b
		c.Reason = redact.Text(b.Reason)
		return &c
	case *events.RestoreFailed:
		c := *b
		c.Error = redact.Text(b.Error)
		return &c
	}
	return body
}
