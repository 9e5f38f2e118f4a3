package query

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/ckptstore/ckptstore/internal/httpkit"
	"github.com/ckptstore/ckptstore/projections"
)

// Views is the part of the projections that a server uses.
type Views interface {
	// Wait blocks until the views have folded the event at seq.
	Wait(ctx context.Context, seq uint64) error
	// ViewAt calls read with one consistent state, that of the log at cursor.
	ViewAt(read func(r projections.Reader, cursor uint64) error) error
}

// waitLimit bounds how long a query waits for the views to catch up.
const waitLimit = 30 * time.Second

// Local answers from views in this process.
type Local struct {
	Views Views
	Last  func(context.Context) (uint64, error) // sequence of the log's end
}

var (
	_ Source = (*Local)(nil)
	_ Rows   = (*Local)(nil)
)

// Read implements [Rows].
func (l *Local) Read(ctx context.Context, read func(projections.Reader) error) (here bool, err error) {
	seq, err := l.Last(ctx)
	if err != nil {
		return true, err
	}
	return true, view(ctx, l.Views, seq, func(r projections.Reader, _ uint64) error { return read(r) })
}

// Answer implements [Source].
func (l *Local) Answer(ctx context.Context, query string, p Params) (json.RawMessage, error) {
	seq, err := l.Last(ctx)
	if err != nil {
		return nil, err
	}
	return answer(ctx, l.Views, query, p, seq)
}

func answer(ctx context.Context, v Views, query string, p Params, atLeast uint64) (json.RawMessage, error) {
	ask, ok := answers[query]
	switch {
	case query == State.Name:
		return answerState(v)
	case !ok:
		return nil, &projections.NotFoundError{What: "query", Ref: query}
	}
	var out json.RawMessage
	err := view(ctx, v, atLeast, func(r projections.Reader, _ uint64) error {
		value, err := ask(r, p)
		if err == nil {
			out, err = json.Marshal(value)
		}
		return err
	})
	return out, err
}

// view reads the views once they have reached a sequence.
func view(ctx context.Context, v Views, atLeast uint64, read func(r projections.Reader, cursor uint64) error) error {
	ctx, cancel := context.WithTimeout(ctx, waitLimit)
	defer cancel()
	if err := v.Wait(ctx, atLeast); err != nil {
		return fmt.Errorf("the views have not reached sequence %d of the log: %w", atLeast, err)
	}
	return v.ViewAt(read)
}

// Handler serves every query of v.
func Handler(v Views) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/{query}", func(w http.ResponseWriter, r *http.Request) {
		p, atLeast, err := parseParams(r.URL.Query())
		var out json.RawMessage
		if err == nil {
			out, err = answer(r.Context(), v, r.PathValue("query"), p, atLeast)
		}
		if err != nil {
			httpkit.Refuse(w, err)
			return
		}
		w.Header().Set("Content-Type", httpkit.JSON)
		_, _ = w.Write(out) // a disconnected client needs no answer
	})
	return mux
}

func (p Params) encode(atLeast uint64) string {
	v := url.Values{
		"run": {p.Run}, "trial": {p.Trial}, "ref": {p.Ref}, "attempt": {strconv.Itoa(p.Attempt)},
		"all": {strconv.FormatBool(p.All)}, "at_least": {strconv.FormatUint(atLeast, 10)},
	}
	if len(p.Metrics) > 0 {
		v["metric"] = p.Metrics
	}
	if p.Before != 0 {
		v.Set("before", strconv.FormatUint(p.Before, 10))
	}
	for name, n := range map[string]int{"from": p.From, "until": p.Until, "points": p.Points, "limit": p.Limit} {
		if n != 0 {
			v.Set(name, strconv.Itoa(n))
		}
	}
	return v.Encode()
}

func parseParams(q url.Values) (p Params, atLeast uint64, err error) {
	p = Params{Run: q.Get("run"), Trial: q.Get("trial"), Ref: q.Get("ref"), Metrics: q["metric"]}
	var errs []error
	parse := func(name string, set func(string) error) {
		if v := q.Get(name); v != "" {
			if err := set(v); err != nil {
				errs = append(errs, fmt.Errorf("parameter %s: %w", name, err))
			}
		}
	}
	for name, n := range map[string]*int{"attempt": &p.Attempt, "from": &p.From, "until": &p.Until, "points": &p.Points, "limit": &p.Limit} {
		parse(name, func(v string) (err error) { *n, err = strconv.Atoi(v); return err })
	}
	parse("all", func(v string) (err error) { p.All, err = strconv.ParseBool(v); return err })
	parse("before", func(v string) (err error) { p.Before, err = strconv.ParseUint(v, 10, 64); return err })
	parse("at_least", func(v string) (err error) { atLeast, err = strconv.ParseUint(v, 10, 64); return err })
	if err := errors.Join(errs...); err != nil {
		return p, 0, fmt.Errorf("%w: %w", projections.ErrReference, err)
	}
	return p, atLeast, nil
}
