package api

import (
	"bytes"
	"container/list"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"

	"github.com/danielgtaylor/huma/v2"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/answer"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// Condition are the headers of every decision.
type Condition struct {
	IfMatch string `header:"If-Match" doc:"The last decision of the trial that the client has seen, in quotes: Ckpt-Lane-Sequence. If there is a newer one, the answer is 412"`
	Key     string `header:"Idempotency-Key" format:"uuid" doc:"ID of the decision's event. A repeated request with the same ID decides nothing and gets the first answer"`
}

// terms returns the conditions for the store.
func (c Condition) terms(ctx context.Context) (store.Terms, error) {
	t := store.Terms{ID: strings.ToLower(c.Key), By: "api/" + userOf(ctx).Name}
	if c.IfMatch == "" {
		return t, nil
	}
	text, ok := strings.CutPrefix(c.IfMatch, `"`)
	text, closed := strings.CutSuffix(text, `"`)
	seq, err := strconv.ParseUint(text, 10, 64)
	if !ok || !closed || err != nil {
		return t, problem.Errorf(problem.Invalid, "If-Match: %s: want a sequence in quotes, such as \"892\"", c.IfMatch)
	}
	t.After = &seq
	return t, nil
}

func (c Condition) key() Condition { return c }

// Why is the body of a decision that has a reason.
type Why struct {
	Reason string `json:"reason,omitempty" maxLength:"1000" doc:"Recorded in the log"`
}

func (w *Why) reason() string {
	if w == nil {
		return ""
	}
	return w.Reason
}

// Fork is the body of a fork.
type Fork struct {
	Name       string         `json:"name" minLength:"1" maxLength:"80" doc:"Of the new run"`
	Checkpoint string         `json:"checkpoint,omitempty" doc:"Of the run: an ID, name or tag; default: latest"`
	Set        map[string]any `json:"set,omitempty" doc:"Changes of the configuration"`
}

// Inputs of the decisions.
type (
	// ToStop asks a job to end.
	ToStop struct {
		Condition
		Run  string `path:"run"`
		Body *Why
	}
	// ToFork begins a run at a checkpoint.
	ToFork struct {
		Condition
		Run  string `path:"run"`
		Body Fork
	}
	// ToMark is about a checkpoint.
	ToMark struct {
		Condition
		Run   string `path:"run"`
		ID    string `path:"id" doc:"ID, the beginning of one, name or tag"`
		Trial string `query:"trial" doc:"Of the run, if it has several"`
	}
	// ToPin pins a checkpoint.
	ToPin struct {
		ToMark
		Body *Why
	}
	// ToTag is about a tag of a checkpoint.
	ToTag struct {
		ToMark
		Tag string `path:"tag"`
	}
)

func (in ToMark) ref() string { return OfCheckpoint{Run: in.Run, ID: in.ID, Trial: in.Trial}.ref() }

// decided is the answer to a decision.
type decided[T any] struct {
	Sequence uint64 `header:"Ckpt-Sequence" doc:"The log has the decision at or before this sequence"`
	Body     T
}

// decision adds a decision to the document. repeated returns the answer if the event of the
// request's ID is in the log.
func decision[T, I any, P interface {
	*I
	key() Condition
}](h *Handler, method, path, id, summary, more string,
	repeated func(context.Context, P, string) (T, bool, error), do func(context.Context, P) (T, error),
) {
	huma.Register(h.api, operation(method, path, id, "decisions", summary, more), func(ctx context.Context, in *I) (*decided[T], error) {
		ctx, cancel := context.WithTimeout(ctx, answerLimit)
		defer cancel()
		out, err := h.decideOnce(ctx, id, P(in).key(), in, func(ctx context.Context, key string) (any, error) {
			if key != "" {
				if out, found, err := repeated(ctx, P(in), key); err != nil || found {
					return out, err
				}
			}
			return do(ctx, P(in))
		})
		if err != nil {
			return nil, refused(err)
		}
		last, err := h.last(ctx)
		return &decided[T]{last, out.(T)}, refused(err)
	})
}

// decideOnce makes a decision, unless a request with the same key was answered.
func (h *Handler) decideOnce(ctx context.Context, operation string, c Condition, request any, do func(context.Context, string) (any, error)) (any, error) {
	if err := h.needsLog(); err != nil {
		return nil, err
	}
	t, err := c.terms(ctx)
	if err != nil {
		return nil, err
	}
	ctx = store.WithTerms(ctx, t)
	if t.ID == "" {
		return do(ctx, "")
	}
	text, err := json.Marshal(request)
	if err != nil {
		return nil, fmt.Errorf("encode the request: %w", err)
	}
	one, release, err := h.once.enter(ctx, t.ID, sha256.Sum256(append([]byte(operation+" "), text...)))
	if err != nil {
		return nil, err
	}
	defer release()
	if one.done {
		return one.body, nil
	}
	body, err := do(ctx, t.ID)
	if err == nil {
		one.body, one.done = body, true
	}
	return body, err
}

// decide adds the decisions.
func (h *Handler) decide() {
	stopping := func(preempt bool) func(context.Context, *ToStop) (answer.Stopped, error) {
		return func(ctx context.Context, in *ToStop) (answer.Stopped, error) { return h.stop(ctx, in, preempt) }
	}
	decision(h, http.MethodPost, "/runs/{run}:stop", "stop-run", "Stop the live job of a run", "As `ckptstore stop RUN`.", h.stoppedBefore, stopping(false))
	decision(h, http.MethodPost, "/runs/{run}:preempt", "preempt-run", "Save, then stop the live job of a run", "As `ckptstore preempt RUN`.", h.stoppedBefore, stopping(true))
	decision(h, http.MethodPost, "/runs/{run}:fork", "fork-run", "Start a new run from a checkpoint",
		"As `ckptstore fork REF NAME`. If-Match is about the trial of the checkpoint.", h.forkedBefore, h.fork)
	const mark = "/runs/{run}/checkpoints/{id}"
	decision(h, http.MethodPut, mark+"/pin", "pin-checkpoint", "Exempt a checkpoint from retention", "As `ckptstore pin REF`.",
		func(ctx context.Context, in *ToPin, key string) (answer.Marked, bool, error) {
			return h.markedBefore(ctx, &in.ToMark, key)
		},
		func(ctx context.Context, in *ToPin) (answer.Marked, error) {
			c, err := h.store.Pin(ctx, in.ref(), in.Body.reason())
			return answer.MarkedFrom(c, ""), err
		})
	decision(h, http.MethodDelete, mark+"/pin", "unpin-checkpoint", "Remove the pin of a checkpoint", "As `ckptstore unpin REF`.", h.markedBefore,
		func(ctx context.Context, in *ToMark) (answer.Marked, error) {
			c, err := h.store.Unpin(ctx, in.ref())
			return answer.MarkedFrom(c, ""), err
		})
	ofTag := func(ctx context.Context, in *ToTag, key string) (answer.Marked, bool, error) {
		return h.markedBefore(ctx, &in.ToMark, key)
	}
	decision(h, http.MethodPut, mark+"/tags/{tag}", "tag-checkpoint", "Tag a checkpoint", "As `ckptstore tag REF NAME`.", ofTag,
		func(ctx context.Context, in *ToTag) (answer.Marked, error) {
			c, moved, err := h.store.Tag(ctx, in.ref(), in.Tag)
			return answer.MarkedFrom(c, moved), err
		})
	decision(h, http.MethodDelete, mark+"/tags/{tag}", "untag-checkpoint", "Remove a tag", "As `ckptstore tag --delete REF NAME`.", ofTag,
		func(ctx context.Context, in *ToTag) (answer.Marked, error) {
			c, err := h.store.Untag(ctx, in.ref(), in.Tag)
			return answer.MarkedFrom(c, ""), err
		})
}

func (h *Handler) stop(ctx context.Context, in *ToStop, preempt bool) (answer.Stopped, error) {
	out := answer.Stopped{Run: in.Run, Preempt: preempt, Reason: in.Body.reason()}
	if out.Reason == "" {
		out.Reason = "stopped by " + userOf(ctx).Name + " over HTTP"
	}
	if err := answer.KnownRun(ctx, h.store.Views(), in.Run); err != nil {
		return out, err
	}
	live, err := h.store.Stop(ctx, in.Run, projections.DefaultTrial, out.Reason, preempt)
	if err != nil {
		return out, err
	}
	out.Job, out.Host, out.PID = live.Job, live.Host, live.PID
	return out, nil
}

// before returns the decision of a trial with an ID, if it is in the log and of one of these
// kinds.
func (h *Handler) before(ctx context.Context, run, trial, id string, kinds ...events.Kind) (events.Body, bool, error) {
	r, found, err := h.store.Decided(ctx, events.Aggregate{Run: run, Trial: trial}, id)
	if err != nil || !found {
		return nil, false, err
	}
	for _, k := range kinds {
		if r.Kind == k {
			body, err := r.Body()
			return body, true, err
		}
	}
	return nil, false, problem.Errorf(problem.Conflict, "Idempotency-Key %s is the ID of event %d, %s: use another", id, r.Sequence, r.Kind)
}

func (h *Handler) stoppedBefore(ctx context.Context, in *ToStop, id string) (answer.Stopped, bool, error) {
	body, found, err := h.before(ctx, in.Run, projections.DefaultTrial, id, events.TrialStopRequested{}.Kind())
	b, ok := body.(*events.TrialStopRequested)
	if err != nil || !found || !ok {
		return answer.Stopped{}, false, err
	}
	out := answer.Stopped{Run: in.Run, Job: b.Job, Preempt: b.Preempt, Reason: b.Reason}
	jobs, err := query.Ask(ctx, h.store.Views(), query.Jobs, query.Params{Run: in.Run})
	for _, j := range jobs {
		if j.ID == b.Job {
			out.Host, out.PID = j.Host, j.PID
		}
	}
	return out, true, err
}

func (h *Handler) fork(ctx context.Context, in *ToFork) (answer.Forked, error) {
	ref := in.Body.Checkpoint
	if ref == "" {
		ref = "latest"
	}
	t, err := h.store.Fork(ctx, in.Run+"@"+ref, in.Body.Name, in.Body.Set)
	return answer.ForkedFrom(t), err
}

func (h *Handler) forkedBefore(ctx context.Context, in *ToFork, id string) (answer.Forked, bool, error) {
	if err := store.ValidRun(in.Body.Name); err != nil {
		return answer.Forked{}, false, nil // Fork reports it
	}
	_, found, err := h.before(ctx, in.Body.Name, projections.DefaultTrial, id, events.TrialCreated{}.Kind())
	if err != nil || !found {
		return answer.Forked{}, false, err
	}
	t, err := query.Ask(ctx, h.store.Views(), query.Trial, query.Params{Run: in.Body.Name, Trial: projections.DefaultTrial})
	return answer.ForkedFrom(t), true, err
}

func (h *Handler) markedBefore(ctx context.Context, in *ToMark, id string) (answer.Marked, bool, error) {
	c, err := query.Ask(ctx, h.store.Views(), query.Resolve, query.Params{Ref: in.ref()})
	if err != nil {
		return answer.Marked{}, false, err
	}
	_, found, err := h.before(ctx, c.Run, c.Trial, id,
		events.CheckpointPinned{}.Kind(), events.CheckpointUnpinned{}.Kind(), events.CheckpointTagged{}.Kind(), events.CheckpointUntagged{}.Kind())
	return answer.MarkedFrom(c, ""), found, err
}

// answers are the answers to the last decisions with a key. A server that was restarted looks
// for the event in the log instead.
type answers struct {
	mu    sync.Mutex
	byKey map[string]*list.Element
	order *list.List // of *once, the last used first
}

// once is the answer to a decision with a key.
type once struct {
	key     string
	request [sha256.Size]byte
	turn    chan struct{} // held by the request that decides
	done    bool
	body    any
}

// mostAnswers is how many answers are kept.
const mostAnswers = 1000

func newAnswers() *answers { return &answers{byKey: map[string]*list.Element{}, order: list.New()} }

// enter waits for the turn of a request with a key.
func (a *answers) enter(ctx context.Context, key string, request [sha256.Size]byte) (one *once, release func(), err error) {
	a.mu.Lock()
	e := a.byKey[key]
	if e == nil {
		e = a.order.PushFront(&once{key: key, request: request, turn: make(chan struct{}, 1)})
		a.byKey[key] = e
		if a.order.Len() > mostAnswers {
			oldest := a.order.Back()
			a.order.Remove(oldest)
			delete(a.byKey, oldest.Value.(*once).key)
		}
	}
	a.order.MoveToFront(e)
	one = e.Value.(*once)
	a.mu.Unlock()
	if !bytes.Equal(one.request[:], request[:]) {
		return nil, nil, problem.Errorf(problem.Conflict, "Idempotency-Key %s was used for another request: use another", key)
	}
	select {
	case one.turn <- struct{}{}:
		return one, func() { <-one.turn }, nil
	case <-ctx.Done():
		return nil, nil, context.Cause(ctx)
	}
}
