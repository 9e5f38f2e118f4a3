package session

import (
	"context"
	"fmt"
	"math"
	"net/http"

	"github.com/ckptstore/ckptstore/client"
)

// Metrics that a report gives a meaning, as those of Ray's function API.
const (
	metricDuplicate    = "__duplicate__"    // true: the rank has returned without saying that it is done; no iteration
	metricTimeThisIter = "time_this_iter_s" // seconds of the rank's own work, instead of the trainer's measure
)

// alreadyDone refuses what comes after a rank's last report.
func alreadyDone(rank int, at int64) error {
	return &problem{http.StatusConflict, fmt.Errorf("already done: rank %d said with step %d that it has finished, and no report of it is taken any more", rank, at)}
}

// isMarker reports whether a report only says that a rank has returned.
func isMarker(r client.Report) bool { return r.Metrics[metricDuplicate] == true }

// ownTime takes the time that a rank has measured out of its metrics; nil if
// it says none. With it among them, no two ranks would report alike.
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

// lastWord is a rank's last report. It is used under the rank's mailbox.
type lastWord struct {
	said bool
	step int64
}

// enter takes a rank's mailbox for a report. It refuses what comes after the
// rank's last one. A marker does not count: it is no iteration, needs no
// mailbox, and the rank has ended as if its process had.
func (h *handoff) enter(ctx context.Context, rank int, r client.Report) (counts bool, err error) {
	select { // even when all is over, to say why
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

// finishedAll reports whether every rank has made its last report, and none is
// being answered.
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

// leave takes out the ranks whose last report was taken.
func (h *handoff) leave(got []delivery) {
	for rank, d := range got {
		if d.Done {
			h.left[rank] = true
		}
	}
}
