package query

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/ckptstore/ckptstore/projections"
)

// ViewsState identifies the state of the views.
type ViewsState struct {
	Sequence uint64 `json:"sequence"` // of the last event that they contain
	Reducer  int    `json:"reducer"`  // version of the folds
	Digest   string `json:"digest"`   // over all rows, hexadecimal
}

// State queries the state of the views. Unlike every other query it does not wait
// for the views to reach the log's end: it exists to check whether they do. It
// reads every row.
var State = Query[ViewsState]{Name: "views"}

func answerState(v Views) (json.RawMessage, error) {
	out := ViewsState{Reducer: projections.Version}
	err := v.ViewAt(func(r projections.Reader, cursor uint64) error {
		sum, err := projections.Digest(r)
		out.Sequence, out.Digest = cursor, fmt.Sprintf("%x", sum)
		return err
	})
	if err != nil {
		return nil, err
	}
	return json.Marshal(out)
}

// Past answers from rows that were folded up to a sequence, as all views were
// then. The rows must not change any more.
type Past struct {
	Rows     projections.Reader
	Sequence uint64
}

var (
	_ Source = Past{}
	_ Views  = Past{}
	_ Rows   = Past{}
)

// Wait implements [Views]: the past does not wait.
func (p Past) Wait(context.Context, uint64) error { return nil }

// ViewAt implements [Views].
func (p Past) ViewAt(read func(r projections.Reader, cursor uint64) error) error {
	return read(p.Rows, p.Sequence)
}

// Answer implements [Source]: it covers the log up to the sequence, and nothing
// later.
func (p Past) Answer(ctx context.Context, query string, params Params) (json.RawMessage, error) {
	return answer(ctx, p, query, params, 0)
}

// Read implements [Rows].
func (p Past) Read(_ context.Context, read func(projections.Reader) error) (here bool, err error) {
	return true, read(p.Rows)
}

// History has the rows as of events of the past.
type History interface {
	// At calls read with the rows as of the event at a sequence, as all views were then. The
	// reader is valid during the call.
	At(ctx context.Context, seq uint64, read func(projections.Reader) error) error
}

// Then answers as of one event. Its answers do not change.
type Then struct {
	History  History
	Sequence uint64
}

var (
	_ Source = Then{}
	_ Rows   = Then{}
)

// Answer implements [Source]: it covers the log up to the sequence, and nothing later.
func (t Then) Answer(ctx context.Context, query string, p Params) (json.RawMessage, error) {
	return answer(ctx, thenViews{ctx, t}, query, p, 0)
}

// Read implements [Rows].
func (t Then) Read(ctx context.Context, read func(projections.Reader) error) (here bool, err error) {
	return true, t.History.At(ctx, t.Sequence, read)
}

// thenViews are the views of one answer.
type thenViews struct {
	ctx context.Context
	Then
}

var _ Views = thenViews{}

// Wait implements [Views]: the past does not wait.
func (thenViews) Wait(context.Context, uint64) error { return nil }

// ViewAt implements [Views].
func (v thenViews) ViewAt(read func(r projections.Reader, cursor uint64) error) error {
	return v.History.At(v.ctx, v.Sequence, func(r projections.Reader) error { return read(r, v.Sequence) })
}
