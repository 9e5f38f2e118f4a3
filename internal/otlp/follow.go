package otlp

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/internal/traces"
	"github.com/ckptstore/ckptstore/projections"
)

// run takes the cursor and follows the log, again and again, until ctx ends.
func (t *Tracer) run(ctx context.Context) {
	troubled := false
	for {
		err := t.session(ctx)
		if ctx.Err() != nil {
			return
		}
		var followed *store.FollowedError
		switch {
		case errors.As(err, &followed): // that process sends the traces
			troubled = false
		case !troubled:
			troubled = true
			t.options.Logger.Warn("traces interrupted; retrying", "error", err)
		}
		timer := time.NewTimer(t.comeback)
		select {
		case <-timer.C:
		case <-t.leave:
			timer.Stop()
			return
		case <-ctx.Done():
			timer.Stop()
			return
		}
	}
}

// session sends traces while this process has the cursor.
func (t *Tracer) session(ctx context.Context) error {
	last, err := t.store.Log.Last(ctx)
	if err != nil {
		return err
	}
	within, sub, err := t.store.Subscribe(ctx, Cursor)
	if err != nil {
		return err
	}
	from := sub.Sequence()
	if from == 0 { // the first process with traces
		from = last
		sub.Handled(from)
	}
	t.queue.reset(from)
	t.holds.Store(true)
	sending, stop := context.WithCancel(within)
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		t.send(sending, func() { sub.Handled(t.queue.done()) })
	}()
	err = t.follow(within, t.store.Log.Read(within, from+1, 0), sub.Passed)
	if within.Err() != nil {
		err = context.Cause(within)
	}
	stop()
	<-sent
	t.holds.Store(false)
	sub.Passed(t.queue.done())
	return errors.Join(err, sub.Close(ctx))
}

// follow takes the events of a log until ctx ends. It calls passed with the sequence up to which all
// traces are delivered.
func (t *Tracer) follow(ctx context.Context, log iter.Seq2[events.Recorded, error], passed func(uint64)) error {
	for r, err := range log {
		if err != nil {
			return err
		}
		t.take(ctx, r)
		if ctx.Err() != nil {
			return context.Cause(ctx) // r may not be in the queue, so no later event may be
		}
		passed(t.queue.done())
	}
	return nil
}

// take puts the trace of a save or load into the queue, if an event ends one.
func (t *Tracer) take(ctx context.Context, r events.Recorded) {
	switch r.Kind {
	case "checkpoint.committed", "checkpoint.aborted", "restore.completed", "restore.failed":
	default:
		t.queue.pass(r.Sequence)
		return
	}
	if time.Since(r.Stored) > t.oldest {
		t.queue.drop(r.Sequence, dropOld)
		return
	}
	within, cancel := context.WithTimeoutCause(ctx, rowsTimeout, fmt.Errorf("the rows were not read within %s", rowsTimeout))
	defer cancel()
	trace, err := t.traceOf(within, r)
	var text []byte
	if err == nil {
		text, err = t.encode(trace)
	}
	switch {
	case err == nil:
		t.unread = false
		t.queue.add(item{seq: r.Sequence, what: fmt.Sprintf("%s %s/%s", trace.Spans[0].Name, traces.Text(r.Scope.Run), traces.Text(r.Scope.Trial)), text: text})
	case ctx.Err() == nil:
		t.queue.drop(r.Sequence, dropUnread)
		if !t.unread {
			t.options.Logger.Warn("save or load not traced", "event", r.Sequence, "run", r.Scope.Run, "error", err)
		}
		t.unread = true
	}
}

// traceOf makes the trace that an event has ended.
func (t *Tracer) traceOf(ctx context.Context, r events.Recorded) (traces.Trace, error) {
	body, err := r.Body()
	if err != nil {
		return traces.Trace{}, err
	}
	end := traces.End{Sequence: r.Sequence, Stored: r.Stored}
	switch b := body.(type) {
	case *events.CheckpointCommitted:
		return t.save(ctx, r, b.Checkpoint, end)
	case *events.CheckpointAborted:
		end.Aborted, end.Reason = true, b.Reason
		return t.save(ctx, r, b.Checkpoint, end)
	case *events.RestoreCompleted:
		l, err := t.load(ctx, r, b.Attempt, b.Load)
		l.Slots, l.Peers, l.Passed = b.Slots, b.Peers, b.Passed
		return traces.OfLoad(t.store.ID, l), err
	case *events.RestoreFailed:
		l, err := t.load(ctx, r, b.Attempt, b.Load)
		return traces.OfLoad(t.store.ID, l), err
	}
	return traces.Trace{}, fmt.Errorf("event %s has a body of the type %T", r.Kind, body)
}

func (t *Tracer) save(ctx context.Context, r events.Recorded, id string, end traces.End) (traces.Trace, error) {
	s, err := query.Ask(ctx, t.store.Views(), query.Save, query.Params{Run: r.Scope.Run, Trial: r.Scope.Trial, Ref: id})
	if err != nil {
		return traces.Trace{}, err
	}
	return traces.OfSave(t.store.ID, s, end), nil
}

// load returns the n-th load of an attempt.
func (t *Tracer) load(ctx context.Context, r events.Recorded, attempt, n int) (traces.Load, error) {
	l := traces.Load{Run: r.Scope.Run, Trial: r.Scope.Trial, Stored: r.Stored}
	rows, err := query.Ask(ctx, t.store.Views(), query.Restores, query.Params{Run: l.Run, Trial: l.Trial, Attempt: attempt, Limit: 1, After: fmt.Sprint(n - 1)})
	if err != nil {
		return l, err
	}
	if len(rows) == 0 || rows[0].Load != n {
		return l, &projections.NotFoundError{What: "load", Ref: fmt.Sprintf("%d of attempt %d of %s/%s", n, attempt, l.Run, l.Trial)}
	}
	l.Restore = rows[0]
	return l, nil
}
