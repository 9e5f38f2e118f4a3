package events

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

// TestVoidBody checks for each kind that a JSON body that is not an object is void, and
// that the void is the same each time.
func TestVoidBody(t *testing.T) {
	for kind := range kinds {
		for _, data := range []string{`"text"`, `[1]`, `7`, `true`} {
			e := Event{ID: "x", Kind: kind, Version: 1, Scope: Scope{Run: "a", Trial: "main", Actor: Server}, Data: json.RawMessage(data)}
			body, err := e.Body()
			void, ok := body.(*Void)
			if err != nil || !ok {
				t.Errorf("%s with the body %s is %T, %v", kind, data, body, err)
				continue
			}
			sum := sha256.Sum256([]byte(Subject(e.Scope, kind) + "\n" + data))
			if void.Digest != hex.EncodeToString(sum[:]) || void.Subject != Subject(e.Scope, kind) || !strings.Contains(void.Why, string(kind)) {
				t.Errorf("%s with the body %s: %+v", kind, data, void)
			}
		}
	}
}

// TestNewVoid checks that a void is in the lane that the message's subject begins with,
// is no longer than needed, survives JSON, and is never taken for an appended event.
func TestNewVoid(t *testing.T) {
	at := time.Date(2026, 3, 14, 15, 9, 26, 0, time.UTC)
	for subject, scope := range map[string]Scope{
		"ckpt.a.main.s.checkpoint.committed":                {Run: "a", Trial: "main", Actor: Server},
		"ckpt.a.main.s.one":                                 {Run: "a", Trial: "main", Actor: Server},
		"ckpt.a.main.s.one.two.three":                       {Run: "a", Trial: "main", Actor: Server},
		"ckpt._._.s.junk.junk":                              {Actor: Server},
		"ckpt.a.main.someone.junk.junk":                     {Run: "a", Trial: "main"},
		"ckpt.a":                                            {},
		"ckpt.a b.main.s.x.y":                               {},
		"ckpt." + strings.Repeat("a", 9000) + ".main.s.x.y": {},
	} {
		m := Message{Subject: subject, Data: []byte("\xff junk \x1b[31m")}
		e := NewVoid(m, 7, at, errors.New(strings.Repeat("why ü", 400)))
		if e.Scope != scope || !e.Time.Equal(at) {
			t.Errorf("%.50s: %+v", subject, e.Scope)
		}
		body, err := e.Body()
		void, ok := body.(*Void)
		if err != nil || !ok || len(void.Why) > longText+3 || len(void.Subject) > longText+3 || !utf8.ValidString(void.Why) {
			t.Errorf("%.50s: %+v, %v", subject, body, err)
		}
		if again := NewVoid(m, 7, at, errors.New(strings.Repeat("why ü", 400))); again.ID != e.ID || string(again.Data) != string(e.Data) {
			t.Errorf("%.50s: %+v and %+v", subject, e, again)
		}
		text, err := json.Marshal(Recorded{Event: e, Sequence: 7, Stored: at})
		if err != nil || !json.Valid(text) {
			t.Errorf("%.50s: %s, %v", subject, text, err)
		}
		var back Recorded
		if err := json.Unmarshal(text, &back); err != nil || back.Scope != scope || back.Kind != e.Kind || string(back.Data) != string(e.Data) {
			t.Errorf("%.50s: %s came back as %+v, %v", subject, text, back, err)
		}
		wire := Encode(e)
		if _, err := Decode(wire); err == nil {
			t.Errorf("%.50s: the wire may carry %s", subject, wire.Subject)
		}
	}
}
