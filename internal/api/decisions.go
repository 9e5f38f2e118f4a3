package api

import (
	"bytes"
	"cmp"
	"container/list"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"reflect"
	"slices"
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
	IfMatch string `header:"If-Match" minLength:"3" pattern:"^\"[0-9]{1,19}\"$" patternDescription:"a sequence in quotes, such as \"892\"" doc:"The last decision of the trial that the client has seen, in quotes: Ckpt-Lane-Sequence. If there is a newer one, the answer is 412"`
	Key     string `header:"Idempotency-Key" format:"uuid" doc:"ID of the decision's event. A repeated request with the same ID decides nothing and gets the first answer"`
}

// source returns the source of the events of a request.
func source(ctx context.Context) string { return "api/" + userOf(ctx).Name }

// terms returns the conditions for the store.
func (c Condition) terms(ctx context.Context) (store.Terms, error) {
	t := store.Terms{ID: strings.ToLower(c.Key), By: source(ctx), Principal: userOf(ctx).Principal()}
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

// UnmarshalJSON refuses null, which the schema does not allow.
func (w *Why) UnmarshalJSON(text []byte) error {
	var is struct {
		Reason json.RawMessage `json:"reason"`
	}
	if err := json.Unmarshal(text, &is); err != nil {
		return err
	}
	if is.Reason == nil {
		return nil
	}
	if string(is.Reason) == "null" {
		return errors.New("reason is null: leave it out, or give a text")
	}
	return json.Unmarshal(is.Reason, &w.Reason)
}

func (w *Why) reason() string {
	if w == nil {
		return ""
	}
	return w.Reason
}

// Fork is the body of a fork.
type Fork struct {
	Name       string         `json:"name" minLength:"1" maxLength:"80" pattern:"^[^\\x00-\\x1f\\x7f-\\x9f]*$" patternDescription:"no control characters" doc:"Of the new run"`
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
		Named
	}
	// ToPin pins a checkpoint.
	ToPin struct {
		ToMark
		Body *Why
	}
	// ToTag is about a tag of a checkpoint.
	ToTag struct {
		ToMark
		Tag string `path:"tag" maxLength:"128" pattern:"^[^\\x00-\\x1f\\x7f-\\x9f@/]*$" patternDescription:"no control characters, and no @ or /"`
	}
)

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
	one, release, err := h.once.enter(ctx, ofUser{userOf(ctx).Name, t.ID}, sha256.Sum256(append([]byte(operation+" "), text...)))
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
	decision(h, http.MethodPost, "/runs/{run}:stop", "stop-run", "Stop the live job of a run", "As `ckptstore stop RUN`.", h.stoppedBefore(false), stopping(false))
	decision(h, http.MethodPost, "/runs/{run}:preempt", "preempt-run", "Save, then stop the live job of a run", "As `ckptstore preempt RUN`.", h.stoppedBefore(true), stopping(true))
	decision(h, http.MethodPost, "/runs/{run}:fork", "fork-run", "Start a new run from a checkpoint",
		"As `ckptstore fork REF NAME`. If-Match is about the trial of the checkpoint.", h.forkedBefore, h.fork)
	const mark = "/runs/{run}/checkpoints/{id}"
	decision(h, http.MethodPut, mark+"/pin", "pin-checkpoint", "Exempt a checkpoint from retention", "As `ckptstore pin REF`.",
		func(ctx context.Context, in *ToPin, key string) (answer.Marked, bool, error) {
			return h.markedBefore(ctx, &in.ToMark, key, func(c string) events.Body {
				return &events.CheckpointPinned{Checkpoint: c, Reason: in.Body.reason()}
			})
		},
		func(ctx context.Context, in *ToPin) (answer.Marked, error) {
			c, err := h.store.Pin(ctx, in.ref(), in.Body.reason())
			return answer.MarkedFrom(c, ""), err
		})
	decision(h, http.MethodDelete, mark+"/pin", "unpin-checkpoint", "Remove the pin of a checkpoint", "As `ckptstore unpin REF`.",
		func(ctx context.Context, in *ToMark, key string) (answer.Marked, bool, error) {
			return h.markedBefore(ctx, in, key, func(c string) events.Body { return &events.CheckpointUnpinned{Checkpoint: c} })
		},
		func(ctx context.Context, in *ToMark) (answer.Marked, error) {
			c, err := h.store.Unpin(ctx, in.ref())
			return answer.MarkedFrom(c, ""), err
		})
	decision(h, http.MethodPut, mark+"/tags/{tag}", "tag-checkpoint", "Tag a checkpoint", "As `ckptstore tag REF NAME`.",
		func(ctx context.Context, in *ToTag, key string) (answer.Marked, bool, error) {
			return h.markedBefore(ctx, &in.ToMark, key, func(c string) events.Body { return &events.CheckpointTagged{Checkpoint: c, Tag: in.Tag} })
		},
		func(ctx context.Context, in *ToTag) (answer.Marked, error) {
			c, moved, err := h.store.Tag(ctx, in.ref(), in.Tag)
			return answer.MarkedFrom(c, moved), err
		})
	decision(h, http.MethodDelete, mark+"/tags/{tag}", "untag-checkpoint", "Remove a tag", "As `ckptstore tag --delete REF NAME`.",
		func(ctx context.Context, in *ToTag, key string) (answer.Marked, bool, error) {
			return h.markedBefore(ctx, &in.ToMark, key, func(c string) events.Body { return &events.CheckpointUntagged{Checkpoint: c, Tag: in.Tag} })
		},
		func(ctx context.Context, in *ToTag) (answer.Marked, error) {
			c, err := h.store.Untag(ctx, in.ref(), in.Tag)
			return answer.MarkedFrom(c, ""), err
		})
}

// why returns the reason that the log gets.
func (in *ToStop) why(ctx context.Context) string {
	return cmp.Or(in.Body.reason(), "stopped by "+userOf(ctx).Name+" over HTTP")
}

func (h *Handler) stop(ctx context.Context, in *ToStop, preempt bool) (answer.Stopped, error) {
	out := answer.Stopped{Run: in.Run, Preempt: preempt, Reason: in.why(ctx)}
	if err := answer.KnownRun(ctx, h.store.Views(), in.Run); err != nil {
		return out, err
	}
	live, err := h.store.StopRun(ctx, in.Run, out.Reason, preempt)
	if err != nil {
		return out, err
	}
	out.Job, out.Host, out.PID = live.Job, live.Host, live.PID
	return out, nil
}

// before returns the decision of a trial with an ID, if it is in the log. One of another user is
// a conflict.
func (h *Handler) before(ctx context.Context, run, trial, id string) (r events.Recorded, body events.Body, found bool, err error) {
	r, found, err = h.store.Decided(ctx, events.Aggregate{Run: run, Trial: trial}, id)
	if err != nil || !found {
		return r, nil, false, err
	}
	if r.Source != source(ctx) {
		return r, nil, false, otherThan(r)
	}
	body, err = r.Body()
	return r, body, err == nil, err
}

// otherThan reports a request whose key is the ID of the event of another decision.
func otherThan(r events.Recorded) error {
	return problem.Errorf(problem.Conflict, "Idempotency-Key %s is the ID of event %d, %s, which another request has decided: use another", r.ID, r.Sequence, r.Kind)
}

// meant reports whether a reference meant a checkpoint when a decision was made. Tags and
// latest may mean another one since.
func (h *Handler) meant(ctx context.Context, r events.Recorded, ref, run, trial, checkpoint string) (bool, error) {
	if ref == run+"/"+trial+"@"+checkpoint || ref == run+"@"+checkpoint && trial == projections.DefaultTrial {
		return true, nil
	}
	then, err := h.pasts.at(ctx, h, r.Sequence-1, false)
	if err != nil {
		return false, fmt.Errorf("as of sequence %d: %w", r.Sequence-1, err)
	}
	c, err := query.Ask(ctx, then.Source, query.Resolve, query.Params{Ref: ref})
	if errors.Is(err, projections.ErrNotFound) || errors.Is(err, projections.ErrReference) {
		return false, nil
	}
	return c.Run == run && c.Trial == trial && c.ID == checkpoint, err
}

func (h *Handler) stoppedBefore(preempt bool) func(context.Context, *ToStop, string) (answer.Stopped, bool, error) {
	return func(ctx context.Context, in *ToStop, id string) (answer.Stopped, bool, error) {
		trials, err := query.Ask(ctx, h.store.Views(), query.Trials, query.Params{Run: in.Run})
		if err != nil {
			return answer.Stopped{}, false, err
		}
		var r events.Recorded
		var body events.Body
		found := false
		for i := len(trials) - 1; i >= 0 && !found; i-- { // that of a search is in the lane of the last trial
			if r, body, found, err = h.before(ctx, in.Run, trials[i].Name, id); err != nil {
				return answer.Stopped{}, false, err
			}
		}
		if !found {
			return answer.Stopped{}, false, nil
		}
		b, ok := body.(*events.TrialStopRequested)
		if !ok || b.Preempt != preempt || b.Reason != in.why(ctx) {
			return answer.Stopped{}, false, otherThan(r)
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
}

// ref returns the reference to the checkpoint that the new run begins at.
func (in *ToFork) ref() string { return in.Run + "@" + cmp.Or(in.Body.Checkpoint, "latest") }

func (h *Handler) fork(ctx context.Context, in *ToFork) (answer.Forked, error) {
	t, err := h.store.Fork(ctx, in.ref(), in.Body.Name, in.Body.Set)
	return answer.ForkedFrom(t), err
}

func (h *Handler) forkedBefore(ctx context.Context, in *ToFork, id string) (answer.Forked, bool, error) {
	if err := store.ValidRun(in.Body.Name); err != nil {
		return answer.Forked{}, false, nil // Fork reports it
	}
	r, body, found, err := h.before(ctx, in.Body.Name, projections.DefaultTrial, id)
	if err != nil || !found {
		return answer.Forked{}, false, err
	}
	b, ok := body.(*events.TrialCreated)
	if !ok || b.Parent == nil {
		return answer.Forked{}, false, otherThan(r)
	}
	p := b.Parent
	same, err := h.meant(ctx, r, in.ref(), p.Run, p.Trial, p.Checkpoint)
	if err == nil && same {
		same, err = h.configured(ctx, b, in.Body.Set)
	}
	if err != nil {
		return answer.Forked{}, false, err
	}
	if !same {
		return answer.Forked{}, false, otherThan(r)
	}
	t, err := query.Ask(ctx, h.store.Views(), query.Trial, query.Params{Run: in.Body.Name, Trial: projections.DefaultTrial})
	return answer.ForkedFrom(t), true, err
}

// configured reports whether a fork has the configuration of its parent with these changes, as
// far as the log has them: secrets are not in it.
func (h *Handler) configured(ctx context.Context, b *events.TrialCreated, set map[string]any) (bool, error) {
	parent, err := query.Ask(ctx, h.store.Views(), query.Trial, query.Params{Run: b.Parent.Run, Trial: b.Parent.Trial})
	if err != nil {
		return false, err
	}
	want := map[string]any{}
	maps.Copy(want, parent.Config)
	maps.Copy(want, set)
	has, err := decoded(b.Config)
	if err != nil {
		return false, err
	}
	wants, err := decoded(want)
	return sameConfig(has, wants), err
}

// decoded returns a configuration with the types of values that JSON has.
func decoded(config map[string]any) (out map[string]any, err error) {
	text, err := json.Marshal(config)
	if err == nil {
		err = json.Unmarshal(text, &out)
	}
	if err != nil {
		return nil, fmt.Errorf("encode the configuration: %w", err)
	}
	return out, nil
}

// redactedMark is in the place of a secret in a configuration of the log.
const redactedMark = "[redacted]"

// sameConfig reports whether a value of the log can be of a configuration.
func sameConfig(has, want any) bool {
	switch has := has.(type) {
	case string:
		return strings.Contains(has, redactedMark) || has == want
	case []any:
		want, ok := want.([]any)
		return ok && slices.EqualFunc(has, want, sameConfig)
	case map[string]any:
		want, ok := want.(map[string]any)
		return ok && maps.EqualFunc(has, want, sameConfig)
	}
	return reflect.DeepEqual(has, want)
}

// markedBefore returns the checkpoint of a decision with an ID. want returns the decision of the
// request about a checkpoint. What the request's reference means now does not matter: a tag
// that was removed means nothing.
func (h *Handler) markedBefore(ctx context.Context, in *ToMark, id string, want func(checkpoint string) events.Body) (answer.Marked, bool, error) {
	trials, err := h.trialsOf(ctx, in)
	if err != nil {
		return answer.Marked{}, false, err
	}
	for _, trial := range trials {
		r, body, found, err := h.before(ctx, in.Run, trial, id)
		if err != nil {
			return answer.Marked{}, false, err
		}
		if !found {
			continue
		}
		of := checkpointOf(body)
		if of == "" || !reflect.DeepEqual(body, want(of)) {
			return answer.Marked{}, false, otherThan(r)
		}
		same, err := h.meant(ctx, r, in.ref(), in.Run, trial, of)
		if err != nil {
			return answer.Marked{}, false, err
		}
		if !same {
			return answer.Marked{}, false, otherThan(r)
		}
		c, err := query.Ask(ctx, h.store.Views(), query.Resolve, query.Params{Ref: in.Run + "/" + trial + "@" + of})
		return answer.MarkedFrom(c, ""), true, err
	}
	return answer.Marked{}, false, nil
}

// trialsOf returns the trials in which a request may have decided.
func (h *Handler) trialsOf(ctx context.Context, in *ToMark) ([]string, error) {
	if in.Trial != "" {
		return []string{in.Trial}, nil
	}
	all, err := query.Ask(ctx, h.store.Views(), query.Trials, query.Params{Run: in.Run})
	names := make([]string, 0, len(all))
	for _, t := range all {
		names = append(names, t.Name)
	}
	if i := slices.Index(names, projections.DefaultTrial); i >= 0 {
		return names[i : i+1], err // a reference without a trial means this one
	}
	return names, err
}

// checkpointOf returns the checkpoint of a decision about one.
func checkpointOf(body events.Body) string {
	switch b := body.(type) {
	case *events.CheckpointPinned:
		return b.Checkpoint
	case *events.CheckpointUnpinned:
		return b.Checkpoint
	case *events.CheckpointTagged:
		return b.Checkpoint
	case *events.CheckpointUntagged:
		return b.Checkpoint
	}
	return ""
}

// answers are the answers to the last decisions with a key. A server that was restarted looks
// for the event in the log instead.
type answers struct {
	mu    sync.Mutex
	byKey map[ofUser]*list.Element
	order *list.List // of *once, the last used first
}

// ofUser is the key that a user chose for a request.
type ofUser struct{ user, key string }

// once is the answer to a decision with a key.
type once struct {
	key     ofUser
	request [sha256.Size]byte
	turn    chan struct{} // held by the request that decides
	done    bool
	body    any
}

// mostAnswers is how many answers are kept.
const mostAnswers = 1000

func newAnswers() *answers { return &answers{byKey: map[ofUser]*list.Element{}, order: list.New()} }

// enter waits for the turn of a request with a key.
func (a *answers) enter(ctx context.Context, key ofUser, request [sha256.Size]byte) (one *once, release func(), err error) {
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
		return nil, nil, problem.Errorf(problem.Conflict, "Idempotency-Key %s was used for another request: use another", key.key)
	}
	select {
	case one.turn <- struct{}{}:
		return one, func() { <-one.turn }, nil
	case <-ctx.Done():
		return nil, nil, context.Cause(ctx)
	}
}
