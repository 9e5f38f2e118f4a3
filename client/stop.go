package client

import (
	"context"
	"errors"

	"github.com/ckptstore/ckptstore/internal/collective"
)

// What a trainer asks of its workers, in the reply to a report and to
// should_stop. Empty means to go on.
const (
	Stop    = "stop"    // end soon; what is not saved is lost
	Preempt = "preempt" // save now, then end with exit code 0
)

// ReportReply is the answer to a report: the same for all ranks of an
// iteration.
type ReportReply struct {
	Stop string `json:"stop,omitempty"` // [Stop] or [Preempt]
}

// StopReply is the answer to should_stop.
type StopReply struct {
	Stop string `json:"stop,omitempty"` // [Stop] or [Preempt]
}

// StopRequested is what the trainer asked for in its newest answer: [Stop],
// [Preempt], or empty. After a Report, all ranks see the same; so whoever looks
// at it once after each report saves on the same step as all others.
func (c *Client) StopRequested() string {
	s, _ := c.stop.Load().(string)
	return s
}

// heard keeps the newest answer.
func (c *Client) heard(stop string) { c.stop.Store(stop) }

// ShouldStop asks the trainer whether the workers are to end, for programs that
// do not report each step. It is a collective: rank 0 asks, and every rank gets
// that answer, so all ranks agree on the step. A group of nil is that of the
// trainer's collectives.
func (c *Client) ShouldStop(ctx context.Context, g *collective.Group) (string, error) {
	if g == nil {
		g = collective.New(c.Collectives(), collective.Options{})
	}
	var answer struct{ Stop, Error string }
	if g.Rank() == 0 {
		var reply StopReply
		// The others wait for rank 0's answer: they get an error as well.
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
		return "", errors.New("rank 0 asks whether to stop: " + answer.Error)
	}
	c.heard(answer.Stop)
	return answer.Stop, nil
}
