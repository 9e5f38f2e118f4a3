package trainer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/answer"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/services"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/internal/tune"
)

// tuner runs the trials of a search. What it knows of them is a fold of the log, by one
// reader. Each decision is in the log before it is acted on, and the next one is made when the
// reader has it. So a tuner that is killed loses nothing but the training since the last
// checkpoints.
type tuner struct {
	st     *store.Store
	base   launch.Config // of each trial
	shared session.Store
	def    tune.Definition
	slots  []slot
	retry  bool // trials that errored in earlier jobs are started again
	log    *slog.Logger

	deciding sync.Mutex // held from the choice of a decision until the reader has it

	mu      sync.Mutex
	state   tune.Replayed
	changed chan struct{} // closed when anything below or above changes
	failed  error         // of the reader, or of a trial that ends the search
	live    map[string]*trial
	free    []int // slots
	asked   *launch.StopRequest
	again   map[string]bool   // trials to start although they have their steps, or errored
	lost    map[string]error  // trials that this job does not start again, and why
	unsaved map[string]string // why the progress of a trial is not saved
	broken  []tune.Trial      // trials that failed before any trial had reported
	repeats map[string]int    // how often this job repeats the steps of a trial that has not saved them
}

// trial is a trial in training.
type trial struct {
	slot     int
	waits    bool // it was asked to end, because it has to wait or ignores that it has the most steps
	topped   int  // the attempt in which it was asked to end because it has the most steps
	requests chan launch.StopRequest
}

func newTuner(st *store.Store, cfg launch.Config, d tune.Definition, slots []slot, storage data.Storage) *tuner {
	t := &tuner{
		st: st, base: cfg, shared: sessionStore(st, cfg, storage), def: d, slots: slots, log: cfg.Logger,
		changed: make(chan struct{}), live: map[string]*trial{}, again: map[string]bool{}, lost: map[string]error{}, unsaved: map[string]string{},
		repeats: map[string]int{},
	}
	t.base.DiskUse = launch.NewDiskUse(t.shared, t.log, "`ckptstore gc`")
	for i := range slots {
		t.free = append(t.free, i)
	}
	return t
}

func (t *tuner) lane() events.Aggregate { return events.Aggregate{Run: t.base.Run} }

// source is the source of the tuner's events, as that of the job's others.
func (t *tuner) source() string { return "trainer/" + t.base.Job }

// run runs the search until nothing is left to train. It returns the trials as they are
// then, nil if the search has not begun.
func (t *tuner) run(ctx context.Context) (board *tune.Board, err error) {
	about := services.New(t.st, t.log)
	defer func() { err = errors.Join(err, about.Close()) }()
	t.base.Services = about
	if err := t.known(ctx); err != nil {
		return nil, err
	}
	ended, err := launch.Began(ctx, t.base, t.shared)
	if err != nil {
		return nil, err
	}
	reason := ""
	defer func() { err = ended(reason, err) }()
	if t.state.Search == nil {
		if err := t.begin(ctx); err != nil {
			return nil, err
		}
	}
	reading, stop := context.WithCancel(ctx)
	var reader sync.WaitGroup
	reader.Go(func() { t.read(reading) })
	defer reader.Wait()
	defer stop()
	defer t.takeRequests(ctx)()
	if err = t.settle(ctx); err == nil {
		err = t.search(ctx)
	}
	look, cancel := context.WithTimeout(context.WithoutCancel(ctx), lookTime)
	defer cancel()
	unsaved, uerr := t.unsavedNow(look)
	if uerr != nil && err == nil {
		err = uerr
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	b := t.state.Board(t.base.Run, nil, unsaved)
	if t.asked != nil {
		reason = "stopped as asked: " + t.asked.Reason
	}
	if err == nil {
		err = t.verdict(b)
	}
	return &b, err
}

// known folds the search that the log has, if it is the same. It refuses a run that was
// trained without a search.
func (t *tuner) known(ctx context.Context) (err error) {
	t.state, err = answer.ReplaySearch(ctx, t.st, t.base.Run)
	if errors.Is(err, tune.ErrNoSearch) {
		trials, err := query.Ask(ctx, t.st.Views(), query.Trials, query.Params{Run: t.base.Run, Limit: 1})
		if err != nil || len(trials) == 0 {
			return err
		}
		return problem.Errorf(problem.Conflict, "run %q has trial %s and no search: choose another --name", t.base.Run, trials[0].Name)
	}
	if err != nil {
		return err
	}
	t.def.Finite = t.state.Search.Finite // older searches compare infinite values
	if err := same(t.state.Search.Definition, t.def); err != nil {
		return problem.Errorf(problem.Conflict, "run %q has another search: %s: give the same, or choose another --name", t.base.Run, err)
	}
	t.def = t.state.Search.Definition
	for _, d := range t.state.Decisions {
		if d.Problem != "" {
			t.log.Warn("earlier decision does not follow from the log", "event", d.Sequence, "trial", d.Trial, "rung", d.Rung, "problem", d.Problem)
		}
	}
	t.log.Info("search continued", "run", t.base.Run, "decisions", len(t.state.Decisions))
	return nil
}

// begin opens the search.
func (t *tuner) begin(ctx context.Context) error {
	d, err := events.NewDecision(store.Stamp(t.source()), t.lane(), t.def.Body(t.base.Job))
	if err != nil {
		return err
	}
	if _, err := t.append(ctx, d, 0); err != nil {
		return fmt.Errorf("begin the search: %w", err)
	}
	t.state, err = answer.ReplaySearch(ctx, t.st, t.base.Run)
	return err
}

// same returns how two definitions differ.
func same(was, is tune.Definition) error {
	a, err := json.Marshal(was.Body(""))
	if err != nil {
		return err
	}
	b, err := json.Marshal(is.Body(""))
	if err != nil {
		return err
	}
	if string(a) != string(b) {
		return fmt.Errorf("the log has %s, and this command %s", a, b)
	}
	return nil
}

// read folds the events that are appended from now on.
func (t *tuner) read(ctx context.Context) {
	for r, err := range t.st.Log.Read(ctx, t.state.Search.Last()+1, 0) {
		if err == nil {
			t.mu.Lock()
			err = t.state.Next(t.base.Run, r)
			t.tell()
			t.mu.Unlock()
			t.obey(r)
		}
		if err != nil {
			if ctx.Err() == nil {
				t.fail(fmt.Errorf("read the reports of the trials: %w", err))
			}
			return
		}
	}
}

// obey ends the search if an event of the log asks a trial of it to end, unless the search
// has asked.
func (t *tuner) obey(r events.Recorded) {
	if r.Scope.Run != t.base.Run || r.Source == t.source() || r.Kind != (events.TrialStopRequested{}).Kind() {
		return
	}
	body, err := r.Body()
	if err != nil {
		return // of a newer version: its job reads it
	}
	if b, ok := body.(*events.TrialStopRequested); ok && b.Job == t.base.Job {
		t.end(launch.StopRequest{Preempt: b.Preempt, Reason: b.Reason})
	}
}

// fail ends the search.
func (t *tuner) fail(err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.failed = errors.Join(t.failed, err)
	t.tell()
}

// tell wakes all that wait for a change. The caller holds the lock.
func (t *tuner) tell() {
	close(t.changed)
	t.changed = make(chan struct{})
}

// await waits until a condition holds, which it checks with the lock held. It returns an
// error if ctx or the reader ends first.
func (t *tuner) await(ctx context.Context, holds func() bool) error {
	for {
		t.mu.Lock()
		done, failed, changed := holds(), t.failed, t.changed
		t.mu.Unlock()
		if done || failed != nil {
			return failed
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// decide appends the next decision if wanted accepts it, and returns when the reader has it.
// decided reports whether there was one.
func (t *tuner) decide(ctx context.Context, wanted func(events.SearchAssigned) bool) (decided bool, err error) {
	t.deciding.Lock()
	defer t.deciding.Unlock()
	t.mu.Lock()
	next, ok := t.state.Search.Next()
	ok = ok && t.asked == nil && wanted(next)
	end := t.state.End
	t.mu.Unlock()
	if !ok {
		return false, nil
	}
	next.Job = t.base.Job
	if next.Parent != nil {
		if asked, err := t.pin(ctx, next.Trial, *next.Parent); asked || err != nil {
			return false, err
		}
	}
	d, err := events.NewDecision(store.Stamp(t.source()), t.lane(), &next)
	if err != nil {
		return false, err
	}
	seq, err := t.append(ctx, d, end)
	if errors.Is(err, errAsked) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("assign rung %d to trial %s: %w", next.Rung, next.Trial, err)
	}
	t.log.Info("trial assigned", "trial", next.Trial, "rung", next.Rung, "steps", next.Steps, "reason", next.Reason)
	if err := t.await(ctx, func() bool { return t.state.Search.Last() >= seq || t.asked != nil }); err != nil || next.Parent == nil {
		return true, err
	}
	return true, t.fork(ctx, next.Trial, *next.Parent, next.Config)
}

// judge is called with each report of a trial before its workers get their reply. A trial
// that has reached its rung continues only if the next decision is to train it further. An
// attempt that repeats steps is asked at those of the rung.
func (t *tuner) judge(ctx context.Context, name string, m *events.Metrics) *launch.StopRequest {
	search := func() *tune.Search { return t.state.Search }
	if t.await(ctx, func() bool { return search().Heard(name, m.Attempt, m.Iteration) || t.asked != nil }) != nil {
		return nil
	}
	t.mu.Lock()
	at, _ := search().Trial(name)
	live := t.live[name]
	top, ready := at.Rung == search().Top(), at.Reached && m.Step >= search().Steps(at.Rung)
	if !ready || t.asked != nil || live.waits {
		t.mu.Unlock()
		return nil
	}
	if top && live.topped != m.Attempt {
		live.topped = m.Attempt
		reason := search().Waits(name)
		t.mu.Unlock()
		return &launch.StopRequest{Preempt: true, Last: true, Reason: reason}
	}
	t.mu.Unlock()
	if !top {
		mine, err := t.decide(ctx, func(next events.SearchAssigned) bool { return next.Trial == name })
		if mine || err != nil {
			return nil
		}
	}
	t.mu.Lock()
	at, _ = search().Trial(name)
	if !at.Reached { // assigned by another goroutine meanwhile
		t.mu.Unlock()
		return nil
	}
	reason := search().Waits(name)
	live.waits = true
	t.mu.Unlock()
	if _, err := t.st.Stop(t.terms(ctx), t.base.Run, name, reason, true); err != nil {
		t.log.Warn("stop of a trial is not in the log", "trial", name, "error", err)
	}
	return &launch.StopRequest{Preempt: true, Reason: reason}
}

// takeRequests passes requests to end on to all trials, until the caller calls stop.
func (t *tuner) takeRequests(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var ended sync.WaitGroup
	ended.Go(func() {
		select {
		case r := <-t.base.Requests:
			t.end(r)
		case <-ctx.Done():
		}
	})
	return func() {
		cancel()
		ended.Wait()
	}
}

// end asks all trials to end. The first request counts.
func (t *tuner) end(r launch.StopRequest) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.endLocked(r)
}

// endLocked is end for a caller that holds the lock.
func (t *tuner) endLocked(r launch.StopRequest) {
	if t.asked != nil {
		return
	}
	t.asked = &r
	for _, live := range t.live {
		live.requests <- r // it has room for the only request
	}
	t.tell()
}

// search starts trials until nothing is left to train, or the search is asked to end.
func (t *tuner) search(ctx context.Context) (err error) {
	training, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var running sync.WaitGroup
	defer running.Wait()
	for {
		for {
			name, slot, ok, err := t.next(training)
			if err != nil {
				cancel(err)
				return err
			}
			if !ok {
				break
			}
			running.Go(func() { t.train(training, name, slot) })
		}
		t.mu.Lock()
		changed, failed, busy, asked := t.changed, t.failed, len(t.live) > 0, t.asked
		over := !busy && (asked != nil || t.over())
		t.mu.Unlock()
		switch {
		case failed != nil:
			cancel(failed)
			return failed
		case over && asked != nil && asked.Preempt:
			return t.preemption(ctx, asked.Reason)
		case over:
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// startable reports whether a trial has something to train now. The caller holds the lock.
func (t *tuner) startable(at tune.Trial) bool {
	return t.live[at.Name] == nil && t.lost[at.Name] == nil &&
		(at.Open() || t.again[at.Name] || slices.Contains(t.state.Search.Unsettled(), at.Name)) // its checkpoint was deleted
}

// over reports whether nothing is left to train, in this job at least. The caller holds the
// lock.
func (t *tuner) over() bool {
	_, more := t.state.Search.Next()
	return !more && !slices.ContainsFunc(t.state.Search.Assigned(), t.startable)
}

// next decides which trial is trained next, and takes a free slot for it. Clones are decided
// and forked first: the trials that they are forked from are not trained before that.
func (t *tuner) next(ctx context.Context) (name string, slot int, ok bool, err error) {
	for {
		for cloned := t.def.PBT(); cloned; {
			if cloned, err = t.decide(ctx, func(next events.SearchAssigned) bool { return next.Parent != nil }); err != nil {
				return "", 0, false, err
			}
		}
		t.mu.Lock()
		if len(t.free) == 0 || t.asked != nil || t.failed != nil {
			t.mu.Unlock()
			return "", 0, false, nil
		}
		for _, at := range t.state.Search.Assigned() {
			if t.startable(at) {
				delete(t.again, at.Name)
				slot, t.free = t.free[0], t.free[1:]
				t.live[at.Name] = &trial{slot: slot, requests: make(chan launch.StopRequest, 1)}
				t.mu.Unlock()
				return at.Name, slot, true, nil
			}
		}
		t.mu.Unlock()
		decided, err := t.decide(ctx, func(events.SearchAssigned) bool { return true })
		if err != nil || !decided {
			return "", 0, false, err
		}
	}
}

// train trains one trial until its workers have ended, and frees its slot.
func (t *tuner) train(ctx context.Context, name string, slot int) {
	err := launch.Run(ctx, t.config(name, slot), t.shared)
	t.mu.Lock()
	waits := t.live[name].waits
	var failure error // of the workers: it is that of the trial only if the log has its end
	switch preempted, lost := (*launch.PreemptedError)(nil), (*launch.LostSaveError)(nil); {
	case err == nil:
		delete(t.unsaved, name)
	case errors.As(err, &preempted):
		t.preempted(name, preempted)
		err = nil
	case errors.As(err, &lost):
		t.log.Warn("trial ended without its last save", "trial", name, "error", err)
		t.lost[name], t.unsaved[name] = lost, lost.Reason
		err = nil
	case errors.Is(err, launch.ErrNotWhole):
		t.stuck(name, err)
		err = nil
	case errors.As(err, new(*launch.FailedError)):
		t.log.Warn("trial failed", "trial", name, "error", err)
		delete(t.unsaved, name)
		failure, err = err, nil
	}
	t.mu.Unlock()
	// The slot is free when the reader has how the trial has ended.
	if err == nil {
		var last uint64
		if last, err = t.st.Log.Last(ctx); err == nil {
			err = t.await(ctx, func() bool { return t.state.Search.Last() >= last })
		}
	}
	// A search that was asked to end may have a log that does not answer.
	t.mu.Lock()
	defer t.mu.Unlock()
	at, _ := t.state.Search.Trial(name)
	if err == nil && failure != nil && at.Ended != tune.Errored {
		t.stuck(name, failure)
	}
	if err == nil && waits && slices.Contains(t.state.Search.Unsettled(), name) && t.lost[name] == nil {
		t.repeat(name)
	}
	if err == nil && at.Open() && !waits && t.lost[name] == nil {
		// Neither the search nor its training ended it.
		t.endLocked(launch.StopRequest{Reason: fmt.Sprintf("trial %s was asked to end", name)})
	}
	if at.Ended == tune.Errored && !t.state.Search.Reported() {
		t.judgeBroken(at)
	}
	if err != nil && t.failed == nil && ctx.Err() == nil && !(t.asked != nil && store.Unserved(err)) {
		t.failed = fmt.Errorf("trial %s: %w", name, err)
	}
	delete(t.live, name)
	t.free = append(t.free, slot)
	slices.Sort(t.free)
	t.tell()
}

// stuck records that a trial cannot continue: this job does not start it again, and fails when the
// other trials are trained. The caller holds the lock.
func (t *tuner) stuck(name string, err error) {
	t.log.Error("trial cannot continue; the others do", "trial", name, "error", err)
	t.lost[name], t.unsaved[name] = err, err.Error()
}

// preempted records what a trial that was preempted has saved. It ends the search, unless the
// search has preempted the trial. The caller holds the lock.
func (t *tuner) preempted(name string, e *launch.PreemptedError) {
	delete(t.unsaved, name)
	if !e.Saved {
		t.unsaved[name] = e.Why
	}
	live := t.live[name]
	switch {
	case !live.waits:
		t.endLocked(launch.StopRequest{Preempt: true, Reason: e.Reason})
	case !e.Saved && live.topped > 0:
		t.log.Warn("trial has its steps and has not saved them", "trial", name, "why", e.Why)
		t.lost[name] = problem.Errorf(problem.Failed, "it has its steps and has not saved them, and %s; the same command repeats them", e.Why)
	case !e.Saved:
		t.log.Warn("trial has to wait and has not saved; it repeats its steps if it is trained further", "trial", name, "why", e.Why)
	}
}

// config returns the configuration of the launch of a trial.
func (t *tuner) config(name string, slot int) launch.Config {
	cfg := t.base
	cfg.Trial, cfg.Shared = name, true
	t.mu.Lock()
	at, _ := t.state.Search.Trial(name)
	t.mu.Unlock()
	cfg.Command = t.def.Space.Fill(cfg.Command, at.Config)
	cfg.TrialConfig = t.trialConfig(at.Config)
	cfg.Nodes, cfg.BackendConfig = session.OneNode(t.slots[slot].workers), t.slots[slot].devices
	cfg.Judge = func(ctx context.Context, m *events.Metrics) *launch.StopRequest { return t.judge(ctx, name, m) }
	t.mu.Lock()
	if live := t.live[name]; live != nil {
		cfg.Requests = live.requests
	}
	t.mu.Unlock()
	if cfg.Output.Dir != "" {
		cfg.Output.Dir = filepath.Join(cfg.Output.Dir, events.EncodeName(name))
	}
	cfg.Logger = t.log.With("trial", name)
	out := marked{cfg.Stderr, name} // stdout has the table of the trials alone
	cfg.Stdout, cfg.Stderr = out, out
	return cfg
}

// marked writes lines with a trial in front. Each write is a whole line.
type marked struct {
	to    io.Writer
	trial string
}

// Write implements [io.Writer].
func (m marked) Write(line []byte) (int, error) {
	n, err := m.to.Write(append([]byte("["+m.trial+"] "), line...))
	return max(0, n-len(m.trial)-3), err
}
