package session

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/collective"
	"github.com/ckptstore/ckptstore/internal/session/retry"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/projections"
)

// recoverSaves ends the saves that the trial's earlier attempts left open. A save
// of the newest attempt is committed if all its bytes are in files or in slots
// that the dead trainer left; all others are aborted.
func (j *Job) recoverSaves(ctx context.Context, trial projections.Trial) error {
	open, err := j.store.Views.OpenCheckpoints(ctx, j.cfg.Run, j.cfg.Trial)
	if err != nil || len(open) == 0 {
		return err
	}
	newest := false
	for _, c := range open {
		if c.Attempt == trial.Attempt {
			newest = true
			continue
		}
		_, err := j.decisions.decide(ctx, &events.CheckpointAborted{
			Attempt: c.Attempt, Checkpoint: c.ID, Reason: fmt.Sprintf("attempt %d took over", trial.Attempt),
		})
		if err != nil && !errors.Is(err, errEnded) {
			return err
		}
	}
	if !newest {
		return nil
	}
	attempts, err := j.store.Views.Attempts(ctx, j.cfg.Run, j.cfg.Trial)
	if err != nil {
		return err
	}
	at := slices.IndexFunc(attempts, func(a projections.Attempt) bool { return a.Attempt == trial.Attempt })
	if at < 0 {
		return fmt.Errorf("trial %s of run %s: the views have no attempt %d; run `ckptstore verify`", trial.Name, trial.Run, trial.Attempt)
	}
	world, from := attempts[at].WorldSize, attempts[at].StartedSeq
	kept, err := j.adopt(ctx, trial.Attempt, world, from)
	if err != nil {
		return err
	}
	defer kept.close()
	err = j.takeOver(ctx, trial.Attempt, world, from, kept)
	if len(kept.saves) > 0 && errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		j.log.Warn("staged saves of a dead trainer aborted: not finished in time", "drain_timeout", j.cfg.DrainTimeout, "error", err)
		err = j.takeOver(ctx, trial.Attempt, world, from, nil)
	}
	return err
}

// TakeOver ends the saves of an attempt of this job, whose group could not end
// them itself. from is the sequence at which the attempt began.
func (j *Job) TakeOver(ctx context.Context, attempt int, from uint64) error {
	return j.takeOver(ctx, attempt, j.world, from, nil)
}

// takeOver replays an attempt into a new coordinator, which ends its saves. The
// saves in kept have their bytes in shared memory and are finished.
func (j *Job) takeOver(ctx context.Context, attempt, world int, from uint64, kept *adopted) error {
	known, err := j.store.Log.Last(ctx)
	if err != nil {
		return err
	}
	const why = "the trainer ended before the save was complete"
	coord := planner.NewCoordinator(j.coordinator(attempt, world))
	s := newSaver(j.decisions, j.store, coord, j.log, staging.New(j.arenas, j.cfg.staging(j.log)))
	s.alone = kept != nil // its slots are not locked: the trainer that wrote is dead
	s.onCommit(j.cfg.Committed, nil)
	if kept == nil {
		coord.Abandon(why)
	} else {
		coord.Abandon(why, kept.saves...)
		kept.serve(s)
	}
	defer s.slots.Close()
	s.drain <- drain{why, known}
	ctx, cancel := j.store.calls.Timeout(ctx, j.cfg.DrainTimeout)
	defer cancel()
	if err := s.run(ctx, from, known); err != nil {
		return fmt.Errorf("end the saves that attempt %d left open: %w", attempt, err)
	}
	return nil
}

// ReportedHeader is on the answer to a relayed report: a [Reported]. The process of the rank's
// node remembers it, for a coordinating process that takes over.
const ReportedHeader = "Ckptstore-Reported"

// RequestHeader is on the answer to a relayed question of a rank whether to end: the request, as
// [Orders] has it. The process of the rank's node remembers it too.
const RequestHeader = "Ckptstore-Request"

// Reported is the answer to a report.
type Reported struct {
	Iteration int    `json:"iteration"`      // 0: the rank only stated that it has returned
	Stop      string `json:"stop,omitempty"` // the request, as [Orders] has it
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

// Resumed is what the coordinating process of a living group knows of the time before it: from
// the log, and from the processes of the group's nodes.
type Resumed struct {
	Known   uint64           // last event in the log when this process took over
	Heard   uint64           // all nodes have got the forwarded events up to here
	Last    Reported         // newest iteration in the log
	Loads   int              // number of the newest load in the log
	Reports map[int]Reported // last answer to each rank
	// Sequence is the number of the newest collective that a rank has the answer to, and Parts
	// the answer; 0: no rank has made one.
	Sequence uint64
	Parts    [][]byte
}

// Check returns why a group cannot continue, or nil: ranks may be at most one report apart.
func (r *Resumed) Check(world int) error {
	newest := r.newest()
	for rank := range world {
		of := r.Reports[rank]
		if !of.Done && of.Iteration < newest-1 {
			return fmt.Errorf("rank %d has the answer to report %d, and the newest is report %d", rank, of.Iteration, newest)
		}
	}
	return nil
}

// newest returns the newest iteration that the log or a rank has.
func (r *Resumed) newest() int {
	n := r.Last.Iteration
	for _, of := range r.Reports {
		n = max(n, of.Iteration)
	}
	return n
}

// hub returns the hub of a group's collectives.
func (r *Resumed) hub(world int) Hub {
	h := collective.NewHub(world)
	if r != nil && r.Sequence > 0 {
		h.Resume(r.Sequence, r.Parts)
	}
	return h
}

// resumed is a handoff's knowledge of the iterations before it.
type resumed struct {
	from int // iterations so far

	waits   sync.Mutex
	behind  map[int]bool // ranks that have reported the last iteration, and have no answer
	answers Reported     // to that report
}

// resume continues after the reports of an earlier coordinator. All ranks had made the newest report
// with an answer or a record, so those without the answer get the same.
func (h *handoff) resume(r *Resumed) {
	if r == nil {
		return
	}
	h.from, h.behind = r.newest(), map[int]bool{}
	h.answers = Reported{Iteration: h.from}
	h.step.Store(r.Last.Step)
	if r.Last.Iteration == 0 {
		h.step.Store(-1)
	}
	for rank := range h.boxes {
		of := r.Reports[rank]
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

// Resume takes over the coordination of the trial's last attempt, whose group lives on other
// nodes: from now on, the coordinator before it can decide nothing. It returns the trial, the attempt,
// and what the log has of it.
func (j *Job) Resume(ctx context.Context, noted func(seq uint64), by *events.GroupCoordinator) (trial projections.Trial, attempt projections.Attempt, of *Resumed, err error) {
	if trial, err = j.store.Views.Trial(ctx, j.cfg.Run, j.cfg.Trial); err != nil {
		return trial, attempt, nil, err
	}
	j.decisions = &decisionLog{
		eventWriter: j.writer, agg: events.Aggregate{Run: j.cfg.Run, Trial: j.cfg.Trial},
		conflict: j.store.Conflict, attempt: trial.Attempt, last: trial.LaneSeq, noted: noted,
	}
	by.Attempt = trial.Attempt
	if _, err = j.decisions.decide(ctx, by); err != nil {
		return trial, attempt, nil, err
	}
	// The coordinator before may have started another attempt just before that.
	if trial, err = j.store.Views.Trial(ctx, j.cfg.Run, j.cfg.Trial); err != nil {
		return trial, attempt, nil, err
	}
	j.decisions.attempt = trial.Attempt
	attempts, err := j.store.Views.Attempts(ctx, j.cfg.Run, j.cfg.Trial)
	if err != nil {
		return trial, attempt, nil, err
	}
	at := slices.IndexFunc(attempts, func(a projections.Attempt) bool { return a.Attempt == trial.Attempt })
	if at < 0 {
		return trial, attempt, nil, fmt.Errorf("trial %s of run %s: the views have no attempt %d; run `ckptstore verify`", trial.Name, trial.Run, trial.Attempt)
	}
	attempt = attempts[at]
	of, err = j.soFar(ctx, attempt)
	return trial, attempt, of, err
}

// soFar reads the reports and loads of an attempt.
func (j *Job) soFar(ctx context.Context, a projections.Attempt) (*Resumed, error) {
	known, err := j.store.Log.Last(ctx)
	if err != nil {
		return nil, err
	}
	of := &Resumed{Known: known, Reports: map[int]Reported{}}
	for r, err := range j.store.Log.ReadTrial(ctx, events.Aggregate{Run: j.cfg.Run, Trial: j.cfg.Trial}, a.StartedSeq, known) {
		if err != nil {
			return nil, err
		}
		if r.Kind != (events.Metrics{}).Kind() && r.Kind != (events.RestoreBegun{}).Kind() {
			continue
		}
		body, err := r.Body()
		if err != nil {
			return nil, err
		}
		switch b := body.(type) {
		case *events.Metrics:
			if b.Attempt == a.Attempt && b.Iteration > of.Last.Iteration {
				of.Last = Reported{Iteration: b.Iteration, Step: b.Step}
			}
		case *events.RestoreBegun:
			if b.Attempt == a.Attempt {
				of.Loads = max(of.Loads, b.Load)
			}
		}
	}
	return of, nil
}

// Overtaken returns an [ErrFenced] if another process coordinates by now: this one must record
// nothing more about the attempt. It returns nil before the trial is open.
func (j *Job) Overtaken(ctx context.Context) error {
	if j.decisions == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, retry.EndTimeout)
	defer cancel()
	if err := j.decisions.overtaken(ctx); errors.Is(err, ErrFenced) {
		return err
	}
	return nil // the log does not answer: it takes no facts either
}
