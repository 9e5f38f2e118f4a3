package events

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Header names of the envelope, as spelled on the wire.
const (
	HeaderID          = "ce-id"
	HeaderType        = "ce-type"
	HeaderSource      = "ce-source"
	HeaderTime        = "ce-time"
	HeaderSpec        = "ce-specversion"
	HeaderContentType = "ce-datacontenttype"
	HeaderMsgID       = "Nats-Msg-Id" // equals ce-id: JetStream drops duplicates by it
	HeaderActor       = "ckpt-actor"  // sender according to the owner; absent from events that the owner appends for itself
	HeaderSignature   = "ckpt-sig"    // of a decision, by its decider
)

// Envelope values that are the same for every event, in headers and in JSON.
const (
	specVersion = "1.0"
	contentType = "application/json"
)

// Message is an event in the form that the log stores.
type Message struct {
	Subject string              `json:"subject"`
	Header  map[string][]string `json:"header"`
	Data    json.RawMessage     `json:"data"`
}

// Type returns the CloudEvents type, such as "ckpt.write.completed.v1".
func (e Event) Type() string {
	return Prefix + "." + string(e.Kind) + ".v" + strconv.Itoa(e.Version)
}

// Encode writes the envelope. It passes the body on unchanged.
func Encode(e Event) Message {
	m := Message{
		Subject: Subject(e.Scope, e.Kind),
		Header: map[string][]string{
			HeaderID:          {e.ID},
			HeaderMsgID:       {e.ID},
			HeaderType:        {e.Type()},
			HeaderSource:      {e.Source},
			HeaderTime:        {e.Time.UTC().Format(time.RFC3339Nano)},
			HeaderSpec:        {specVersion},
			HeaderContentType: {contentType},
		},
		Data: e.Data,
	}
	if e.Principal != "" {
		m.Header[HeaderActor] = []string{e.Principal}
	}
	if e.Signature != "" {
		m.Header[HeaderSignature] = []string{e.Signature}
	}
	return m
}

// Decode is the inverse of [Encode]. It ignores unknown headers; its error names a
// missing or contradicting header. It checks that the body is JSON, but does not decode
// it: see [Event.Body].
func Decode(m Message) (Event, error) {
	e, err := Envelope(m.Subject, func(name string) string {
		if v := m.Header[name]; len(v) == 1 {
			return v[0]
		}
		return ""
	}, m.Data)
	if err == nil && !json.Valid(m.Data) {
		return Event{}, fmt.Errorf("message on %q: body is not JSON", m.Subject)
	}
	return e, err
}

// Envelope is [Decode] without the check of the body. header returns the value of a
// header, or "" if the header is missing or repeated.
func Envelope(subject string, header func(name string) string, body json.RawMessage) (Event, error) {
	bad := func(format string, args ...any) (Event, error) {
		return Event{}, fmt.Errorf("message on %q: %s", subject, fmt.Sprintf(format, args...))
	}
	scope, kind, err := parseSubject(subject)
	if err != nil {
		return Event{}, err
	}
	if kind == (Void{}).Kind() {
		return bad("%s stands for what is no event", kind)
	}
	e := Event{
		ID: header(HeaderID), Kind: kind, Source: header(HeaderSource), Scope: scope, Data: body,
		Principal: header(HeaderActor), Signature: header(HeaderSignature),
	}
	typ, at := header(HeaderType), header(HeaderTime)
	for _, required := range [...]struct{ name, value string }{{HeaderID, e.ID}, {HeaderType, typ}, {HeaderTime, at}} {
		if required.value == "" {
			return bad("header %s is missing or repeated", required.name)
		}
	}
	if spec := header(HeaderSpec); spec != specVersion {
		return bad("header %s is %q, want 1.0", HeaderSpec, spec)
	}
	if ct := header(HeaderContentType); ct != contentType {
		return bad("header %s is %q, want %s", HeaderContentType, ct, contentType)
	}
	version, ok := cutType(typ, kind)
	if !ok {
		return bad("header %s is %q, which contradicts the subject", HeaderType, typ)
	}
	if e.Version, err = strconv.Atoi(version); err != nil || e.Version < 1 {
		return bad("header %s has no version", HeaderType)
	}
	if e.Time, err = time.Parse(time.RFC3339Nano, at); err != nil {
		return bad("header %s: %v", HeaderTime, err)
	}
	if e.Time = e.Time.UTC(); e.Time.Year() < 1 || e.Time.Year() > 9999 {
		return bad("header %s is %q, which has no year of four digits in UTC", HeaderTime, at)
	}
	return e, nil
}

// ParseSequence parses a sequence of the log. It accepts only the canonical spelling,
// as conditions and headers use it.
func ParseSequence(text string) (uint64, error) {
	n, err := strconv.ParseUint(text, 10, 64)
	if err == nil && strconv.FormatUint(n, 10) != text {
		err = fmt.Errorf("%q is not how %d is written", text, n)
	}
	return n, err
}

// cutType returns the part of a CloudEvents type after "ckpt.<kind>.v".
func cutType(typ string, kind Kind) (version string, ok bool) {
	for _, part := range [...]string{Prefix, ".", string(kind), ".v"} {
		if typ, ok = strings.CutPrefix(typ, part); !ok {
			return "", false
		}
	}
	return typ, true
}
