package api

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/ckptstore/ckptstore/internal/answer"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/query"
)

// Moment are the parameters of every GET.
type Moment struct {
	AsOf    uint64 `query:"as_of" minimum:"1" doc:"Answer as of the event with this sequence: the answer then never changes"`
	AtLeast uint64 `query:"at_least" doc:"Wait until the log has this sequence, for at most 10 s"`
}

// moment returns the sequence to answer as of, 0 for now, and whether the client chose it.
func (m Moment) moment() (asOf uint64, chosen bool, err error) { return m.AsOf, m.AsOf > 0, nil }

func (m Moment) atLeast() uint64 { return m.AtLeast }

// Paged are the parameters of a GET whose answer comes in pages.
type Paged struct {
	Moment
	Limit int    `query:"limit" minimum:"1" maximum:"1000" default:"100" doc:"Most rows of a page"`
	Page  string `query:"page" maxLength:"2000" pattern:"^(eyJzIjo[A-Za-z0-9_-]*)?$" patternDescription:"the member next of a page" doc:"The member next of the page before: it continues there, as of the same sequence"`
}

// place is where a page begins: after the row with a key, in a list as of a sequence.
type place struct {
	Sequence uint64 `json:"s"`
	Key      string `json:"k"`
}

// token returns the place as the member next of a page.
func (p place) token() string {
	text, _ := json.Marshal(p) // a number and a string always encode
	return base64.RawURLEncoding.EncodeToString(text)
}

// place returns where the page begins; zero for the first one.
func (p Paged) place() (at place, err error) {
	if p.Page == "" {
		return at, nil
	}
	text, err := base64.RawURLEncoding.DecodeString(p.Page)
	if err == nil {
		err = json.Unmarshal(text, &at)
	}
	if err != nil || at.Sequence == 0 || at.Key == "" {
		return at, badPage()
	}
	if p.AsOf > 0 && p.AsOf != at.Sequence {
		return at, problem.Errorf(problem.Invalid, "as_of %d: the page before was as of %d: leave as_of out, or ask for the first page", p.AsOf, at.Sequence)
	}
	return at, nil
}

// badPage returns the error for a token of another list, or without a place in this one.
func badPage() error {
	return problem.Errorf(problem.NotFound, "page: this is not the member next of a page of this list: ask for the first page again")
}

func (p Paged) moment() (uint64, bool, error) {
	at, err := p.place()
	if err != nil || at.Sequence > 0 {
		return at.Sequence, p.AsOf > 0, err
	}
	return p.Moment.moment()
}

// asked is the input of a GET.
type asked interface {
	moment() (asOf uint64, chosen bool, err error)
	atLeast() uint64
}

// at is where an answer is read.
type at struct {
	answer.From
	Sequence uint64 // that the answer covers at least; exactly, if Past is set
	lane     uint64 // the last decision of the trial that the answer is about; 0: none
	files    bool   // the answer has what was read from files, which may change
	final    bool   // the answer never changes, although the views are live
}

// Answer is a body with the headers of every answer.
type Answer[T any] struct {
	Sequence uint64 `header:"Ckpt-Sequence" doc:"The answer covers the log at least up to this sequence; with as_of, exactly"`
	Lane     string `header:"Ckpt-Lane-Sequence" doc:"Of the last decision of the trial, for If-Match"`
	Cache    string `header:"Cache-Control"`
	Body     T
}

// forever is the Cache-Control of answers as of a sequence.
const forever = "private, max-age=31536000, immutable"

// get adds a GET to the document.
func get[T, I any, P interface {
	*I
	asked
}](h *Handler, path, id, tag, summary, more string, do func(context.Context, *at, P) (T, error),
) {
	huma.Register(h.api, operation(http.MethodGet, path, id, tag, summary, more), func(ctx context.Context, in *I) (*Answer[T], error) {
		ctx, cancel := context.WithTimeout(ctx, answerLimit)
		defer cancel()
		asOf, chosen, err := P(in).moment()
		if err != nil {
			return nil, refused(err)
		}
		from, err := h.at(ctx, asOf, P(in).atLeast(), chosen)
		if err != nil {
			return nil, refused(err)
		}
		body, err := do(ctx, from, P(in))
		if err != nil {
			if from.Past {
				err = fmt.Errorf("as of sequence %d: %w", from.Sequence, err)
			}
			return nil, refused(err)
		}
		out := &Answer[T]{Sequence: from.Sequence, Body: body}
		if from.lane > 0 {
			out.Lane = fmt.Sprint(from.lane)
		}
		if chosen && from.Past && !from.files || from.final {
			out.Cache = forever
		}
		return out, nil
	})
}

// Times of waiting for a sequence.
const (
	atLeastLimit = 10 * time.Second
	atLeastPoll  = 25 * time.Millisecond
)

// at returns where to read an answer: the live views with asOf 0, rows folded up to asOf
// otherwise. A page after the first is read from the live views while the log has not grown.
func (h *Handler) at(ctx context.Context, asOf, atLeast uint64, chosen bool) (*at, error) {
	last, err := h.reach(ctx, atLeast)
	if err != nil {
		return nil, err
	}
	if asOf == 0 || !chosen && asOf == last {
		return &at{From: answer.Live(h.store), Sequence: last}, nil
	}
	if asOf > last {
		return nil, answer.PastEnd("as-of", asOf, last)
	}
	if err := h.needsLog(); err != nil {
		return nil, err
	}
	rows, err := h.pasts.at(ctx, h, asOf, chosen)
	if err != nil {
		return nil, fmt.Errorf("as of sequence %d: %w", asOf, err)
	}
	return &at{From: answer.From{Store: h.store, Views: rows.Source, Now: rows.stored, Past: true}, Sequence: asOf}, nil
}

// reach waits until the log has a sequence, and returns its end.
func (h *Handler) reach(ctx context.Context, sequence uint64) (uint64, error) {
	limit, cancel := context.WithTimeout(ctx, atLeastLimit)
	defer cancel()
	tick := time.NewTicker(atLeastPoll)
	defer tick.Stop()
	for {
		last, err := h.last(ctx)
		if err != nil || last >= sequence {
			return last, err
		}
		select {
		case <-tick.C:
		case <-limit.Done():
			if ctx.Err() != nil {
				return last, context.Cause(ctx)
			}
			return last, problem.Errorf(problem.NotFound, "at_least %d: the log ends at %d after %v: ask again, or for less", sequence, last, atLeastLimit)
		}
	}
}

// receiptsEnd returns the sequence of the newest receipt.
func (h *Handler) receiptsEnd() uint64 {
	if past, ok := h.store.Views().(query.Past); ok {
		return past.Sequence
	}
	return 0
}

// pasts are the states of the log that were asked for last. One is folded at a time, and a few
// are kept.
type pasts struct {
	turn chan struct{} // held while a state is folded

	mu   sync.Mutex
	kept []folded // the last used first
}

// folded is the state as of an event.
type folded struct {
	query.Source
	sequence uint64
	stored   time.Time // when the event was stored
}

// keptPasts is how many states are kept. In a process without views of its own, those of the
// beginning of the log hold rows; the others do not.
const keptPasts = 4

// find returns a kept state.
func (p *pasts) find(sequence uint64) (folded, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	i := slices.IndexFunc(p.kept, func(f folded) bool { return f.sequence == sequence })
	if i < 0 {
		return folded{}, false
	}
	f := p.kept[i]
	p.kept = append([]folded{f}, slices.Delete(p.kept, i, i+1)...)
	return f, true
}

// at returns the state as of a sequence. If the client chose it, the state must be prepared; the next
// page of a list waits for it.
func (p *pasts) at(ctx context.Context, h *Handler, sequence uint64, chosen bool) (folded, error) {
	if f, ok := p.find(sequence); ok {
		return f, nil
	}
	if chosen { // first: the turn may be that of a page, which waits
		if err := h.store.Past.Prepared(sequence); err != nil {
			return folded{}, err
		}
	}
	select {
	case p.turn <- struct{}{}:
		defer func() { <-p.turn }()
	case <-ctx.Done():
		return folded{}, context.Cause(ctx)
	}
	if f, ok := p.find(sequence); ok {
		return f, nil
	}
	f := folded{sequence: sequence}
	for r, err := range h.store.Log.Read(ctx, sequence, sequence) {
		if err != nil {
			return folded{}, err
		}
		f.stored = r.Stored
	}
	source, err := h.store.Past.AsOf(ctx, sequence)
	if err != nil {
		return folded{}, err
	}
	f.Source = source
	p.mu.Lock()
	defer p.mu.Unlock()
	p.kept = append([]folded{f}, p.kept...)
	p.kept = p.kept[:min(len(p.kept), keptPasts)]
	return f, nil
}
