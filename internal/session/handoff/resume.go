package handoff

import (
	"fmt"
	"sync"
)

// Reported is the answer to a report.
type Reported struct {
	Iteration int    `json:"iteration"`      // 0: the rank only stated that it has returned
	Stop      string `json:"stop,omitempty"` // the request to the rank, in the words of the trainer
	Done      bool   `json:"done,omitempty"` // the rank makes no further report
	Step      int64  `json:"step"`
}

// String returns the form of the header.
func (r Reported) String() string {
	return fmt.Sprintf("%d %t %d %s", r.Iteration, r.Done, r.Step, r.Stop)
}

// ParseReported parses the form of the header.
func ParseReported(text string) (r Reported, err error) {
	n, err := fmt.Sscanf(text, "%d %t %d %s", &r.Iteration, &r.Done, &r.Step, &r.Stop)
	if n == 3 {
		err = nil // without a request to stop
	}
	return r, err
}

// Earlier has the reports that an earlier coordinator of the living group has answered: from
// the log, and from the processes of the group's nodes.
type Earlier struct {
	Last    Reported         // newest iteration in the log
	Reports map[int]Reported // last answer to each rank
}

// Check returns why a group cannot continue, or nil: ranks may be at most one report apart.
func (e Earlier) Check(world int) error {
	newest := e.newest()
	for rank := range world {
		of := e.Reports[rank]
		if !of.Done && of.Iteration < newest-1 {
			return fmt.Errorf("rank %d has the answer to report %d, and the newest is report %d", rank, of.Iteration, newest)
		}
	}
	return nil
}

// newest returns the newest iteration that the log or a rank has.
func (e Earlier) newest() int {
	n := e.Last.Iteration
	for _, of := range e.Reports {
		n = max(n, of.Iteration)
	}
	return n
}

// resumed is a [Handoff]'s knowledge of the iterations before it.
type resumed struct {
	from int // iterations so far

	waits   sync.Mutex
	behind  map[int]bool // ranks that have reported the last iteration, and have no answer
	answers Reported     // to that report
}

// Resume continues after the reports of an earlier coordinator. All ranks had made the newest report
// with an answer or a record, so those without the answer get the same.
func (h *Handoff) Resume(e Earlier) {
	h.from, h.behind = e.newest(), map[int]bool{}
	h.answers = Reported{Iteration: h.from}
	h.step.Store(e.Last.Step)
	if e.Last.Iteration == 0 {
		h.step.Store(-1)
	}
	for rank := range h.boxes {
		of := e.Reports[rank]
		switch {
		case of.Done:
			h.words[rank] = lastWord{true, of.Step}
			h.left[rank] = true
		case of.Iteration < h.from:
			h.behind[rank] = true
		}
		if of.Iteration == h.from && h.from > 0 {
			h.answers.Stop = of.Stop
			h.step.Store(max(h.step.Load(), of.Step))
		}
	}
}

// late returns the answer to a rank's report of the iteration that all ranks had reported before
// this coordinator took over, once.
func (r *resumed) late(rank int) (of Reported, late bool) {
	r.waits.Lock()
	defer r.waits.Unlock()
	late = r.behind[rank]
	delete(r.behind, rank)
	return r.answers, late
}
