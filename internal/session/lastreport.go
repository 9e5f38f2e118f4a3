package session

import (
	"context"
	"math"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// Metrics with a meaning of their own, as in Ray's function API.
const (
	metricDuplicate    = "__duplicate__"    // true: the rank has returned without a last report; not an iteration
	metricTimeThisIter = "time_this_iter_s" // seconds of the rank's own work, in place of the trainer's measurement
)

// alreadyDone refuses requests after a rank's last report.
func alreadyDone(rank int, at int64) error {
	return problem.Errorf(problem.Conflict, "already done: rank %d finished with step %d; it cannot report again", rank, at)
}

// isMarker reports whether a report only records that a rank has returned.
func isMarker(r client.Report) bool { return r.Metrics[metricDuplicate] == true }

// ownTime removes the rank's own time measurement from its metrics and returns
// it, or nil if there is none. Left in, it would make every rank's report differ.
func ownTime(metrics map[string]any) (*float64, error) {
	said, has := metrics[metricTimeThisIter]
	if !has {
		return nil, nil
	}
	seconds, ok := said.(float64)
	if !ok || seconds < 0 || math.IsInf(seconds, 0) {
		return nil, badRequest("metric %q is %v: want seconds, a number from 0 on, or leave it out", metricTimeThisIter, said)
	}
	delete(metrics, metricTimeThisIter)
	return &seconds, nil
}

// lastWord is a rank's last report, guarded by the rank's mailbox.
type lastWord struct {
	said bool
	step int64
}

// enter takes a rank's mailbox for a report. It refuses reports after the rank's
// last one. A marker does not count as an iteration and needs no mailbox: the
// rank has ended as if its process had.
func (h *handoff) enter(ctx context.Context, rank int, r client.Report) (counts bool, err error) {
	select { // even after the end, to return the reason
	case h.boxes[rank] <- struct{}{}:
	default:
		select {
		case h.boxes[rank] <- struct{}{}:
		case <-h.over:
			return false, h.why
		case <-ctx.Done():
			return false, ctx.Err()
		}
	}
	word := &h.words[rank]
	switch marker := isMarker(r); {
	case word.said:
		err = alreadyDone(rank, word.step)
	case marker:
		*word = lastWord{true, r.Step}
		h.finished <- rank
	default:
		word.said, word.step = r.Done, r.Step
		return true, nil
	}
	<-h.boxes[rank]
	return false, err
}

// finishedAll reports whether every rank has made its last report and all reports
// are answered.
func (h *handoff) finishedAll() bool {
	for rank := range h.words {
		select {
		case h.boxes[rank] <- struct{}{}:
		default:
			return false
		}
		said := h.words[rank].said
		<-h.boxes[rank]
		if !said {
			return false
		}
	}
	return true
}

// leave removes the ranks whose last report was taken.
func (h *handoff) leave(got []delivery) {
	for rank, d := range got {
		if d.Done {
			h.left[rank] = true
		}
	}
}
