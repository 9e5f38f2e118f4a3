package api

import (
	"context"
	"slices"
	"strconv"

	"github.com/danielgtaylor/huma/v2"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/answer"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// Event is an event of the log: a CloudEvent 1.0 in structured mode, whose extensions sequence
// and stored give its place.
type Event struct{ events.Recorded }

var _ huma.SchemaProvider = Event{}

// Schema implements [huma.SchemaProvider].
func (Event) Schema(huma.Registry) *huma.Schema {
	text := func(format string) *huma.Schema { return &huma.Schema{Type: huma.TypeString, Format: format} }
	return &huma.Schema{
		Type: huma.TypeObject, Description: "A CloudEvent 1.0 in structured mode",
		Properties: map[string]*huma.Schema{
			"sequence": {Type: huma.TypeInteger, Description: "Position in the log, from 1"},
			"stored":   text("date-time"), "specversion": text(""), "id": text(""), "type": text(""), "source": text(""), "time": text("date-time"),
			"subject": text(""), "datacontenttype": text(""),
			"ckptactor": {Type: huma.TypeString, Description: "The sender, as the owner of the store identified it"},
			"ckptsig":   {Type: huma.TypeString, Description: "The signature of a decision by its decider, which the server has not checked"},
			"data":      {Description: "The body; docs/reference/events.md has the bodies of all types"},
		},
		Required: []string{"sequence", "stored", "specversion", "id", "type", "source", "time", "subject", "datacontenttype", "data"},
	}
}

// EventPage is a page of events.
type EventPage struct {
	Events []Event `json:"events"`
	// Next is of the next page. A page may have fewer events than the limit, or none, and a next
	// one: at most 20,000 events of the log are read for a page, and it ends after 4 MiB of bodies.
	Next string `json:"next,omitempty"`
}

// Inputs of the reads.
type (
	// OfEvents selects events.
	OfEvents struct {
		Paged
		Run    string   `query:"run" doc:"Only events of this run"`
		Type   []string `query:"type,explode" doc:"Only events of this type, such as checkpoint.committed or checkpoint.*; repeatable"`
		Before uint64   `query:"before" doc:"The events before this sequence, the newest first without after and first; default: the newest events of the log"`
		After  uint64   `query:"after" doc:"The events after this sequence, the oldest first"`
		First  bool     `query:"first" doc:"Begin with the first event of the log, the oldest first"`
	}
	// OfEvent names an event.
	OfEvent struct {
		Moment
		Sequence uint64 `path:"sequence" minimum:"1"`
	}
)

// readEvents adds the reads of the log.
func (h *Handler) readEvents() {
	get(h, "/events", "list-events", "events", "Read the events of the log", "The lines of `ckptstore events --json`.", h.events)
	get(h, "/events/{sequence}", "get-event", "events", "Read one event", "", func(ctx context.Context, from *at, in *OfEvent) (Event, error) {
		if err := h.needsLog(); err != nil {
			return Event{}, err
		}
		if in.Sequence > from.Sequence {
			return Event{}, answer.PastEnd("sequence", in.Sequence, from.Sequence)
		}
		from.final = true
		r, err := h.store.Log.At(ctx, in.Sequence)
		return Event{r}, err
	})
	get(h, "/timeline", "get-timeline", "events", "Count the events of the log by family", "In columns of 100 events or more, along the log. Each answer reads at most 20,000 events that the server has not counted.", h.timeline)
	describeStream(h.api)
}

// moment implements [asked]: events need no views, whatever the sequence of the page before.
func (in OfEvents) moment() (uint64, bool, error) { return 0, false, nil }

// wanted selects events by run and types.
type wanted struct {
	run   string
	types []events.Pattern
}

func wantedOf(run string, types []string) (w wanted, err error) {
	w.run = run
	for _, text := range types {
		p, err := events.ParsePattern(text)
		if err != nil {
			return w, problem.Errorf(problem.NotFound, "type: %w", err)
		}
		w.types = append(w.types, p)
	}
	return w, nil
}

func (w wanted) has(r events.Recorded) bool {
	if w.run != "" && r.Scope.Run != w.run {
		return false
	}
	return len(w.types) == 0 || slices.ContainsFunc(w.types, func(p events.Pattern) bool { return p.Match(r.Kind) })
}

const (
	// mostRead is how many events are read for a page.
	mostRead = 20_000
	// mostBytes is the length of the bodies after which a page ends: an event has up to a megabyte.
	mostBytes = 4 << 20
	// leastWindow is the number of events of the first window, when reading backwards.
	leastWindow = 256
)

func (h *Handler) events(ctx context.Context, from *at, in *OfEvents) (EventPage, error) {
	out := EventPage{Events: []Event{}}
	if err := h.needsLog(); err != nil {
		return out, err
	}
	w, err := wantedOf(in.Run, in.Type)
	if err != nil {
		return out, err
	}
	forward := in.After > 0 || in.First
	begin, err := in.place()
	if err != nil {
		return out, err
	}
	end := from.Sequence
	switch {
	case begin.Sequence > from.Sequence:
		return out, problem.Errorf(problem.NotFound, "page: its list is as of event %d, and the log ends at %d: ask for the first page again", begin.Sequence, from.Sequence)
	case begin.Sequence > 0:
		end = begin.Sequence
	case in.AsOf > from.Sequence:
		return out, answer.PastEnd("as-of", in.AsOf, from.Sequence)
	case in.AsOf > 0:
		end, from.final = in.AsOf, true
	}
	next := end
	if in.After > from.Sequence {
		return out, problem.Errorf(problem.NotFound, "after %d: the log ends at %d: ask for events after that, or with at_least", in.After, from.Sequence)
	}
	if in.Before > 0 {
		end = min(end, in.Before-1)
		next = end
	}
	if forward {
		next = in.After + 1
	}
	if begin.Key != "" {
		if next, err = strconv.ParseUint(begin.Key, 10, 64); err != nil {
			return out, notOfEvents()
		}
		if next == 0 || next > end { // a page that is complete has no next one
			return out, notOfEvents()
		}
	}
	if forward {
		next, err = h.readForward(ctx, w, in.Limit, next, end, &out.Events)
	} else {
		next, err = h.readBackward(ctx, w, in.Limit, next, &out.Events)
	}
	if forward && next <= end || !forward && next > 0 {
		out.Next = place{end, strconv.FormatUint(next, 10)}.token()
	}
	return out, err
}

func notOfEvents() error {
	return problem.Errorf(problem.NotFound, "page: this is not the member next of a page of events: ask for the first page again")
}

// readForward appends events from a sequence on, and returns the sequence to continue at.
func (h *Handler) readForward(ctx context.Context, w wanted, limit int, next, end uint64, to *[]Event) (uint64, error) {
	if next > end {
		return next, nil
	}
	until, bytes := min(end, next+mostRead-1), 0
	for r, err := range h.store.Log.Read(ctx, next, until) {
		if err != nil {
			return next, err
		}
		next = r.Sequence + 1
		if w.has(r) {
			*to = append(*to, Event{r})
			if bytes += len(r.Data); len(*to) == limit || bytes >= mostBytes {
				break
			}
		}
	}
	return next, nil
}

// readBackward appends events from a sequence back, the newest first, and returns the sequence
// to continue at, 0 at the start of the log. It reads windows that double, because the log is
// read forwards.
func (h *Handler) readBackward(ctx context.Context, w wanted, limit int, next uint64, to *[]Event) (uint64, error) {
	read, left := uint64(0), mostBytes
	for size := uint64(leastWindow); next > 0 && read < mostRead; size *= 2 {
		size = min(size, mostRead-read)
		first := next - min(next, size) + 1
		var window []Event
		held, cut := 0, false
		for r, err := range h.store.Log.Read(ctx, first, next) {
			if err != nil {
				return next, err
			}
			if read++; w.has(r) {
				window = append(window, Event{r})
				for held += len(r.Data); held > left && len(window) > 1; cut = true { // the page has only the newest of them
					held -= len(window[0].Data)
					window[0] = Event{}
					window = window[1:]
				}
			}
		}
		left -= held
		for _, e := range slices.Backward(window) {
			if *to = append(*to, e); len(*to) == limit {
				return e.Sequence - 1, nil
			}
		}
		if cut || left <= 0 {
			return window[0].Sequence - 1, nil
		}
		next = first - 1
	}
	return next, nil
}
