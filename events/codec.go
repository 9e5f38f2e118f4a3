package events

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Header names of the envelope, in the spelling of the wire.
const (
	HeaderID          = "ce-id"
	HeaderType        = "ce-type"
	HeaderSource      = "ce-source"
	HeaderTime        = "ce-time"
	HeaderSpec        = "ce-specversion"
	HeaderContentType = "ce-datacontenttype"
	HeaderMsgID       = "Nats-Msg-Id" // equals ce-id: JetStream drops duplicates by it
	HeaderActor       = "ckpt-actor"  // the owner's word of who sent it; absent from what the owner appends
)

// What the envelope says of every event, in headers and in JSON.
const (
	specVersion = "1.0"
	contentType = "application/json"
)

// Message is an event as the log carries it.
type Message struct {
	Subject string              `json:"subject"`
	Header  map[string][]string `json:"header"`
	Data    json.RawMessage     `json:"data"`
}

// Type is the CloudEvents type: "ckpt.write.completed.v1".
func (e Event) Type() string {
	return Prefix + "." + string(e.Kind) + ".v" + strconv.Itoa(e.Version)
}

// Encode writes the envelope. The body is passed on as it is.
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
	return m
}

// Decode is the inverse of [Encode]. Headers it does not know are ignored;
// a missing or contradicting one is an error that names it. The body is not
// looked into: see [Event.Body].
func Decode(m Message) (Event, error) {
	bad := func(format string, args ...any) (Event, error) {
		return Event{}, fmt.Errorf("message on %q: %s", m.Subject, fmt.Sprintf(format, args...))
	}
	scope, kind, err := ParseSubject(m.Subject)
	if err != nil {
		return Event{}, err
	}
	if kind == (Void{}).Kind() {
		return bad("%s stands for what is no event", kind)
	}
	get := func(name string) string {
		if v := m.Header[name]; len(v) == 1 {
			return v[0]
		}
		return ""
	}
	for _, name := range []string{HeaderID, HeaderType, HeaderTime} {
		if get(name) == "" {
			return bad("header %s is missing or repeated", name)
		}
	}
	if spec := get(HeaderSpec); spec != specVersion {
		return bad("header %s is %q, want 1.0", HeaderSpec, spec)
	}
	if ct := get(HeaderContentType); ct != contentType {
		return bad("header %s is %q, want %s", HeaderContentType, ct, contentType)
	}
	version, ok := strings.CutPrefix(get(HeaderType), Prefix+"."+string(kind)+".v")
	if !ok {
		return bad("header %s is %q, which contradicts the subject", HeaderType, get(HeaderType))
	}
	v, err := strconv.Atoi(version)
	if err != nil || v < 1 {
		return bad("header %s has no version", HeaderType)
	}
	at, err := time.Parse(time.RFC3339Nano, get(HeaderTime))
	if err != nil {
		return bad("header %s: %v", HeaderTime, err)
	}
	if !json.Valid(m.Data) {
		return bad("body is not JSON")
	}
	return Event{
		ID: get(HeaderID), Kind: kind, Version: v, Source: get(HeaderSource),
		Time: at, Scope: scope, Data: m.Data, Principal: get(HeaderActor),
	}, nil
}
