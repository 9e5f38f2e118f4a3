package trainer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"

	"github.com/ckptstore/ckptstore/internal/answer"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/tune"
	"github.com/ckptstore/ckptstore/projections"
)

// unsavedNow returns the trials with the most steps that are in no checkpoint.
func (t *tuner) unsavedNow(ctx context.Context) ([]string, error) {
	t.mu.Lock()
	topped := t.state.Search.Topped()
	t.mu.Unlock()
	return answer.Unsaved(ctx, t.st, t.base.Run, topped, t.def.MaxSteps)
}

// lookTime bounds the query for what is saved after the search.
const lookTime = 10 * time.Second

// verdict returns why a search without other errors has failed. The caller holds the lock.
func (t *tuner) verdict(b tune.Board) (err error) {
	for _, name := range slices.Sorted(maps.Keys(t.lost)) {
		err = errors.Join(err, fmt.Errorf("trial %s: %w", name, t.lost[name]))
	}
	run := t.base.Run
	var errored []tune.Trial
	for _, at := range t.state.Search.Assigned() {
		if at.Ended == tune.Errored {
			errored = append(errored, at)
		}
	}
	switch {
	case err != nil:
		return err
	case b.Best == nil && len(errored) == t.def.Trials:
		return problem.Errorf(problem.Failed, "all %d trials failed; %s: %s; see `ckptstore logs %s/%s`. The same command with --retry-errored starts them again", len(errored), errored[0].Name, errored[0].Failure, run, errored[0].Name)
	case len(t.broken) >= tooMany:
		return problem.Errorf(problem.Failed, "%d trials failed in the same way, and none has reported: %s; see `ckptstore logs %s/%s`. The same command trains the other trials, and with --retry-errored these, too", len(t.broken), t.broken[0].Failure, run, t.broken[0].Name)
	case t.asked != nil || b.Best != nil:
		return nil
	}
	return problem.Errorf(problem.Failed, "no trial of run %q has reported a finite number as %q: see `ckptstore logs %s/%s`, or give another --metric to another --name", run, t.def.Metric, run, t.def.Name(0))
}

// settle ends what dead jobs left of the trials, and finds those to start again: trials with
// the most steps that are in no checkpoint and, if the user asks for it, those that errored.
func (t *tuner) settle(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var waiting sync.WaitGroup
	defer waiting.Wait()
	defer cancel()
	waiting.Go(func() { // a search that is asked to end may have a log that does not answer
		_ = t.await(ctx, func() bool { return t.asked != nil })
		cancel()
	})
	err := t.settleAll(ctx)
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.asked != nil {
		return nil
	}
	return cmp.Or(t.failed, err)
}

func (t *tuner) settleAll(ctx context.Context) error {
	t.mu.Lock()
	assigned := t.state.Search.Assigned()
	t.mu.Unlock()
	if len(assigned) == 0 {
		return nil
	}
	trials, err := query.Ask(ctx, t.st.Views(), query.Trials, query.Params{Run: t.base.Run})
	if err != nil {
		return err
	}
	if err := t.forkAll(ctx, assigned); err != nil {
		return err
	}
	for _, row := range trials {
		if !slices.ContainsFunc(assigned, func(at tune.Trial) bool { return at.Name == row.Name }) || row.Status != projections.Running && row.Status != projections.Stopping {
			continue
		}
		if err := launch.Settle(ctx, t.config(row.Name, 0), t.shared); err != nil {
			return fmt.Errorf("end what trial %s left: %w", row.Name, err)
		}
	}
	last, err := t.st.Log.Last(ctx)
	if err == nil { // saves that were finished above count
		err = t.await(ctx, func() bool { return t.state.Search.Last() >= last })
	}
	if err != nil {
		return err
	}
	unsaved, err := t.unsavedNow(ctx)
	if err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, name := range append(unsaved, t.state.Search.Unsettled()...) {
		t.log.Warn("trial has its steps and no checkpoint of them; repeating", "trial", name)
		t.again[name] = true
	}
	for _, at := range assigned {
		if t.retry && at.Ended == tune.Errored && at.ReplacedBy == "" {
			t.again[at.Name] = true
		}
	}
	return nil
}

// preemption returns the error of a search that was preempted.
func (t *tuner) preemption(ctx context.Context, reason string) error {
	e := &launch.PreemptedError{Reason: reason, Checkpoint: "the newest checkpoint of each trial"}
	look, cancel := context.WithTimeout(context.WithoutCancel(ctx), lookTime)
	defer cancel()
	trials, err := query.Ask(look, t.st.Views(), query.Trials, query.Params{Run: t.base.Run})
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case len(t.unsaved) > 0:
		name := slices.Sorted(maps.Keys(t.unsaved))[0]
		e.Why = fmt.Sprintf("trial %s: %s", name, t.unsaved[name])
		if more := len(t.unsaved) - 1; more > 0 {
			e.Why += fmt.Sprintf(" (and %d more)", more)
		}
	case err != nil:
		e.Why = fmt.Sprintf("it is unknown what is saved: %s", err)
	case !slices.ContainsFunc(trials, func(t projections.Trial) bool { return t.Head != "" }):
		e.Checkpoint, e.Why = "", "no checkpoint was committed"
	}
	e.Saved = e.Why == ""
	return e
}

// tooMany is how many trials may fail in the same way before any has reported: then the
// workers are broken, and more trials would fail alike.
const tooMany = 3

// judgeBroken ends the search if its workers are broken. The caller holds the lock.
func (t *tuner) judgeBroken(at tune.Trial) {
	if len(t.broken) > 0 && alike(t.broken[0].Failure) != alike(at.Failure) {
		t.broken = nil
	}
	t.broken = append(t.broken, at)
	if len(t.broken) >= tooMany {
		t.endLocked(launch.StopRequest{Reason: fmt.Sprintf("%d trials failed in the same way, and none has reported", len(t.broken))})
	}
}

// alike returns a failure without its numbers, such as those of ranks and processes.
func alike(failure string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsDigit(r) {
			return -1
		}
		return r
	}, failure)
}
