package events

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// structured is a recorded event as one structured CloudEvent, with its place
// in the log beside it.
type structured struct {
	Sequence uint64          `json:"sequence"`
	Stored   time.Time       `json:"stored"`
	ID       string          `json:"id"`
	Type     string          `json:"type"`
	Source   string          `json:"source"`
	Time     time.Time       `json:"time"`
	Subject  string          `json:"subject"`
	Data     json.RawMessage `json:"data"`
}

// MarshalJSON writes a recorded event as one structured CloudEvent, with its
// place in the log beside it.
func (r Recorded) MarshalJSON() ([]byte, error) {
	return json.Marshal(structured{
		r.Sequence, r.Stored.UTC(), r.ID, r.Type(), r.Source, r.Time.UTC(), Subject(r.Scope, r.Kind), r.Data,
	})
}

// UnmarshalJSON is the inverse of [Recorded.MarshalJSON]: it reads a line of
// `ckptstore events --json`. The body is not looked into: see [Event.Body].
func (r *Recorded) UnmarshalJSON(text []byte) error {
	var s structured
	if err := json.Unmarshal(text, &s); err != nil {
		return fmt.Errorf("decode a recorded event: %w", err)
	}
	bad := func(why string) error { return fmt.Errorf("decode recorded event %d: %s", s.Sequence, why) }
	scope, kind, err := ParseSubject(s.Subject)
	if err != nil {
		return bad(err.Error())
	}
	version, ok := strings.CutPrefix(s.Type, Prefix+"."+string(kind)+".v")
	v, err := strconv.Atoi(version)
	switch {
	case !ok:
		return bad(fmt.Sprintf("type %q contradicts the subject %q", s.Type, s.Subject))
	case err != nil || v < 1:
		return bad(fmt.Sprintf("type %q has no version", s.Type))
	case s.Sequence == 0 || s.ID == "" || s.Time.IsZero() || len(s.Data) == 0:
		return bad("sequence, id, time or data is missing")
	}
	*r = Recorded{
		Event:    Event{ID: s.ID, Kind: kind, Version: v, Source: s.Source, Time: s.Time, Scope: scope, Data: s.Data},
		Sequence: s.Sequence, Stored: s.Stored,
	}
	return nil
}
