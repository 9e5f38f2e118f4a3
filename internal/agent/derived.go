package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// maxNamesakes bounds the number of runs of one derived name.
const maxNamesakes = 1000

// joinDerived is join for a run whose name comes from the script alone. While
// another process has that run, the caller joins the first of NAME-2, NAME-3 and
// so on that no run has yet, and so begins a new run. If there are such runs and
// it would resume, joinDerived refuses: the user must choose the run to continue.
func (a *Agent) joinDerived(ctx context.Context, r JoinRequest) (JoinReply, error) {
	name := r.Run
	known, err := a.store.RunNames(ctx)
	if err != nil {
		return JoinReply{}, err
	}
	taken, err := a.taken(ctx, name)
	if err != nil {
		return JoinReply{}, err
	}
	if !taken {
		if err := a.ambiguous(ctx, r); err != nil {
			return JoinReply{}, err
		}
		reply, err := a.join(ctx, r)
		if !isTaken(err) {
			return reply, err
		}
	}
	for n := 2; n < maxNamesakes; n++ {
		if r.Run = fmt.Sprintf("%s-%d", name, n); known[r.Run] {
			continue
		}
		if err := r.check(); err != nil {
			return JoinReply{}, err
		}
		if reply, err := a.join(ctx, r); !isTaken(err) {
			return reply, err
		}
	}
	return JoinReply{}, problem.Errorf(problem.Conflict, "run %q and %d others of that name are in use or were used: choose a name, by CKPTSTORE_RUN or ckptstore.init(run=…)", name, maxNamesakes-2)
}

// lingers is how long the processes of a run may take to disappear: a program
// that is killed and started again at once finds its run free.
const lingers = 500 * time.Millisecond

// taken reports whether a live job has a run, in this agent or elsewhere. join
// waits for an ending job of this agent.
func (a *Agent) taken(ctx context.Context, run string) (bool, error) {
	for end := time.Now().Add(lingers); ; {
		a.mu.Lock()
		err := a.inUse(run, projections.DefaultTrial)
		a.mu.Unlock()
		if err == nil {
			break
		}
		if time.Now().After(end) {
			return true, nil
		}
		select {
		case <-time.After(lingers / 20):
		case <-ctx.Done():
			return false, ctx.Err()
		}
	}
	live, err := a.store.LiveJob(ctx, run)
	return live != nil && live.PID != os.Getpid(), err
}

func isTaken(err error) bool {
	return errors.As(err, new(occupiedError)) || errors.As(err, new(*store.RunningError))
}

// ambiguous refuses to resume a run by a derived name if other runs have that
// name.
func (a *Agent) ambiguous(ctx context.Context, r JoinRequest) error {
	if r.Resume != "auto" && r.Resume != "require" {
		return nil
	}
	all, err := a.store.Namesakes(ctx, r.Run)
	if err != nil || !slices.ContainsFunc(all, func(n store.Namesake) bool { return n.Run != r.Run }) {
		return err
	}
	var texts []string
	for _, n := range all {
		texts = append(texts, fmt.Sprintf("%s (step %d)", n.Run, n.Step))
	}
	return problem.Errorf(problem.Conflict, "run %q has its name from the script alone, and there are checkpoints of several: %s: choose one to continue, by CKPTSTORE_RUN=%s or ckptstore.init(run=…), or begin afresh with resume=\"none\"",
		r.Run, strings.Join(texts, ", "), all[0].Run)
}
