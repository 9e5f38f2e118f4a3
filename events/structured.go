package events

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// structured is a recorded event in the JSON format of CloudEvents 1.0. Two extension
// attributes, sequence and stored, hold its place in the log. A third, ckptactor, is
// the sender, if the owner of the store reports it; ckptsig is the signature of a decision.
type structured struct {
	Sequence    uint64          `json:"sequence"`
	Stored      time.Time       `json:"stored"`
	SpecVersion string          `json:"specversion"`
	ID          string          `json:"id"`
	Type        string          `json:"type"`
	Source      string          `json:"source"`
	Time        time.Time       `json:"time"`
	Subject     string          `json:"subject"`
	ContentType string          `json:"datacontenttype"`
	Principal   string          `json:"ckptactor,omitempty"`
	Signature   string          `json:"ckptsig,omitempty"`
	Data        json.RawMessage `json:"data"`
}

// MarshalJSON writes a recorded event as one structured-mode CloudEvent, with
// its place in the log as extension attributes.
func (r Recorded) MarshalJSON() ([]byte, error) {
	return json.Marshal(structured{
		Sequence: r.Sequence, Stored: r.Stored.UTC(), SpecVersion: specVersion, ID: r.ID, Type: r.Type(), Source: r.Source,
		Time: r.Time.UTC(), Subject: Subject(r.Scope, r.Kind), ContentType: contentType, Principal: r.Principal, Signature: r.Signature, Data: r.Data,
	})
}

// UnmarshalJSON is the inverse of [Recorded.MarshalJSON]: it reads a line of `ckptstore
// events --json`. It does not decode the body: see [Event.Body]. Lines printed by older
// versions have no specversion and no datacontenttype.
func (r *Recorded) UnmarshalJSON(text []byte) error {
	var s structured
	if err := json.Unmarshal(text, &s); err != nil {
		return fmt.Errorf("decode a recorded event: %w", err)
	}
	bad := func(why string) error { return fmt.Errorf("decode recorded event %d: %s", s.Sequence, why) }
	scope, kind, err := parseSubject(s.Subject)
	if void := (Void{}).Kind(); s.Type == (Event{Kind: void, Version: 1}).Type() {
		scope, kind, err = scopeIn(s.Subject), void, nil // a void's subject may hold less
	}
	if err != nil {
		return bad(err.Error())
	}
	version, ok := strings.CutPrefix(s.Type, Prefix+"."+string(kind)+".v")
	v, err := strconv.Atoi(version)
	switch {
	case s.SpecVersion != "" && s.SpecVersion != specVersion:
		return bad(fmt.Sprintf("specversion %q, want %s", s.SpecVersion, specVersion))
	case s.ContentType != "" && s.ContentType != contentType:
		return bad(fmt.Sprintf("datacontenttype %q, want %s", s.ContentType, contentType))
	case !ok:
		return bad(fmt.Sprintf("type %q contradicts the subject %q", s.Type, s.Subject))
	case err != nil || v < 1:
		return bad(fmt.Sprintf("type %q has no version", s.Type))
	case s.Sequence == 0 || s.ID == "" || s.Time.IsZero() || len(s.Data) == 0:
		return bad("sequence, id, time or data is missing")
	}
	*r = Recorded{
		Event:    Event{ID: s.ID, Kind: kind, Version: v, Source: s.Source, Time: s.Time, Scope: scope, Data: s.Data, Principal: s.Principal, Signature: s.Signature},
		Sequence: s.Sequence, Stored: s.Stored,
	}
	return nil
}
