package trainer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/internal/tune"
)

// A clone of population-based training is decided and made in four steps, each durable before the
// next: its donor's checkpoint is pinned; the decision is in the log; the fork is in the log; the
// pin is removed. A tuner that was killed between two of them decides the same, or finds the
// decision, and repeats the fork.

// pin keeps the checkpoint that a trial is about to be forked from. asked reports that the search
// was asked to end meanwhile.
func (t *tuner) pin(ctx context.Context, name string, from events.TrialParent) (asked bool, err error) {
	err = t.patiently(ctx, "checkpoint.pinned", func() error { return t.st.PinFork(t.terms(ctx), from, t.base.Run, name) })
	switch {
	case errors.Is(err, errAsked):
		return true, nil
	case err != nil:
		return false, fmt.Errorf("keep the checkpoint that trial %s is forked from: %w", name, err)
	}
	return false, nil
}

// fork forks a trial from the checkpoint that a decision names, unless an earlier tuner did. If
// the search is asked to end meanwhile, the next tuner does.
func (t *tuner) fork(ctx context.Context, name string, from events.TrialParent, config map[string]any) error {
	err := t.patiently(ctx, "trial.created", func() error {
		return t.st.ForkTrial(t.terms(ctx), from, t.base.Run, name, t.trialConfig(config))
	})
	if errors.Is(err, errAsked) {
		return nil
	}
	return err
}

// forkAll makes the forks that an earlier tuner decided and did not make.
func (t *tuner) forkAll(ctx context.Context, assigned []tune.Trial) error {
	for _, at := range assigned {
		if at.Parent == nil || at.ReplacedBy != "" {
			continue
		}
		if err := t.fork(ctx, at.Name, *at.Parent, at.Config); err != nil {
			return err
		}
	}
	return nil
}

// trialConfig returns the configuration of a trial with values of the search space.
func (t *tuner) trialConfig(values map[string]any) map[string]any {
	config := map[string]any{}
	maps.Copy(config, t.base.TrialConfig)
	maps.Copy(config, values)
	return config
}

// repeat starts a trial of a population again that has the steps of its interval and has not saved
// them: the others wait for it. After as many repetitions as workers may fail, the trial is
// lost. The caller holds the lock.
func (t *tuner) repeat(name string) {
	why := cmp.Or(t.unsaved[name], "its checkpoint does not exist")
	if t.repeats[name]++; t.base.MaxRestarts >= 0 && t.repeats[name] > t.base.MaxRestarts {
		t.lost[name] = problem.Errorf(problem.Failed, "it has its steps and has not saved them: %s; all trials wait for it. The same command repeats them", why)
		return
	}
	t.log.Warn("trial has its steps and has not saved them; repeating", "trial", name, "why", why)
	t.again[name] = true
}

// terms returns a context whose decisions have the source of the tuner's.
func (t *tuner) terms(ctx context.Context) context.Context {
	return store.WithTerms(ctx, store.Terms{By: t.source()})
}

// errAsked reports that a decision was not made because the search was asked to end.
var errAsked = errors.New("the search was asked to end")

// append appends a decision of the search: see [tuner.patiently].
func (t *tuner) append(ctx context.Context, d events.Decision, after uint64) (seq uint64, err error) {
	err = t.patiently(ctx, string(d.Kind), func() (err error) {
		seq, err = t.st.Log.Decide(ctx, d, after)
		return err
	})
	return seq, err
}

// patiently appends to the log, however long it does not answer, unless the search is asked to
// end meanwhile: with errAsked it is unknown whether the log has it.
func (t *tuner) patiently(ctx context.Context, what string, try func() error) error {
	for silent := false; ; silent = true {
		err := try()
		if err == nil || !store.Unserved(err) || ctx.Err() != nil {
			return err
		}
		t.mu.Lock()
		asked := t.asked != nil
		t.mu.Unlock()
		if asked {
			return errAsked
		}
		if !silent {
			t.log.Warn("log does not take the search's decision; retrying", "kind", what, "error", err)
		}
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
		}
	}
}
