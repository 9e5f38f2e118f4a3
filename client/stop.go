package client

import (
	"context"
	"errors"

	"github.com/ckptstore/ckptstore/internal/collective"
)

// Stop requests of a trainer, in the reply to a report and to should_stop.
// Empty means to continue.
const (
	Stop    = "stop"    // end soon; unsaved progress is lost
	Preempt = "preempt" // save now, then end with exit code 0
)

// ReportReply is the reply to a report, the same for all ranks of an iteration.
type ReportReply struct {
	Stop string `json:"stop,omitempty"` // [Stop] or [Preempt]
}

// StopReply is the reply to should_stop.
type StopReply struct {
	Stop string `json:"stop,omitempty"` // [Stop] or [Preempt]
}

// StopRequested returns the trainer's newest stop request: [Stop], [Preempt], or
// empty. After a Report it is the same on all ranks, so ranks that check it once
// after each report all save on the same step.
func (c *Client) StopRequested() string {
	s, _ := c.stop.Load().(string)
	return s
}

// heard records the newest stop request.
func (c *Client) heard(stop string) { c.stop.Store(stop) }

// ShouldStop asks the trainer whether the workers should end, for programs that
// do not report each step. It is a collective: rank 0 asks and broadcasts the
// answer, so all ranks agree on the step. If g is nil, it uses the trainer's
// collectives.
func (c *Client) ShouldStop(ctx context.Context, g *collective.Group) (string, error) {
	if g == nil {
		g = collective.New(c.Collectives(), collective.Options{})
	}
	var answer struct{ Stop, Error string }
	if g.Rank() == 0 {
		var reply StopReply
		// The other ranks are waiting for rank 0: broadcast the error too.
		if err := c.call(ctx, "should_stop", struct{}{}, &reply); err != nil {
			answer.Error = err.Error()
		}
		answer.Stop = reply.Stop
	}
	answer, err := collective.BroadcastObject(ctx, g, 0, answer)
	if err != nil {
		return "", err
	}
	if answer.Error != "" {
		return "", errors.New("should_stop: rank 0: " + answer.Error)
	}
	c.heard(answer.Stop)
	return answer.Stop, nil
}
