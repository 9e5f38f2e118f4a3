package events

import (
	"bytes"
	"encoding/json"
	"maps"
	"math"
	"net/url"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// attributeName is the form that CloudEvents 1.0 allows for attributes, extensions
// included.
var attributeName = regexp.MustCompile(`^[a-z0-9]{1,20}$`)

// TestStructuredIsCloudEvents holds every kind to the JSON format of CloudEvents
// 1.0 and to the members that docs/reference/events.md names.
func TestStructuredIsCloudEvents(t *testing.T) {
	for _, body := range samples {
		r := recordedSample(t, body)
		text, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		var members map[string]json.RawMessage
		if err := json.Unmarshal(text, &members); err != nil {
			t.Fatal(err)
		}
		member := func(name string) string {
			var s string
			if err := json.Unmarshal(members[name], &s); err != nil || s == "" {
				t.Errorf("%s: %s is %s, want a string that is not empty", r.Kind, name, members[name])
			}
			return s
		}
		want := map[string]string{
			"specversion": "1.0", "id": r.ID, "source": r.Source, "type": r.Type(), "subject": Subject(r.Scope, r.Kind),
			"datacontenttype": "application/json",
		}
		for name, value := range want {
			if got := member(name); got != value {
				t.Errorf("%s: %s is %q, want %q", r.Kind, name, got, value)
			}
		}
		if _, err := url.Parse(member("source")); err != nil {
			t.Errorf("%s: source is no URI reference: %v", r.Kind, err)
		}
		for _, name := range []string{"time", "stored"} {
			if _, err := time.Parse(time.RFC3339Nano, member(name)); err != nil {
				t.Errorf("%s: %s: %v", r.Kind, name, err)
			}
		}
		var sequence int64
		if err := json.Unmarshal(members["sequence"], &sequence); err != nil || sequence != int64(r.Sequence) {
			t.Errorf("%s: sequence is %s, %v", r.Kind, members["sequence"], err)
		}
		var data bytes.Buffer
		if err := json.Compact(&data, r.Data); err != nil || !bytes.Equal(members["data"], data.Bytes()) {
			t.Errorf("%s: data is %s, want the body %s", r.Kind, members["data"], r.Data)
		}
		if want := `"cert:alice"`; string(members["ckptactor"]) != want {
			t.Errorf("%s: ckptactor is %s, want %s", r.Kind, members["ckptactor"], want)
		}
		known := append(slices.Collect(maps.Keys(want)), "time", "stored", "sequence", "data", "ckptactor")
		for name, value := range members {
			if !attributeName.MatchString(name) || !slices.Contains(known, name) {
				t.Errorf("%s: attribute %q, which no page names or CloudEvents does not allow", r.Kind, name)
			}
			// Only data may be an object or an array.
			if name != "data" && (value[0] == '{' || value[0] == '[') {
				t.Errorf("%s: attribute %s is %s, want a string, number or boolean", r.Kind, name, value)
			}
		}

		var back Recorded
		if err := json.Unmarshal(text, &back); err != nil || !reflect.DeepEqual(back, r) {
			t.Errorf("%s: read back %+v, %v; want %+v", r.Kind, back, err, r)
		}
	}
}

// TestStructuredOfOthers reads lines of older versions and rejects lines that are not
// CloudEvents 1.0 in JSON.
func TestStructuredOfOthers(t *testing.T) {
	r := recordedSample(t, samples[0])
	text, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	older := strings.Replace(strings.Replace(string(text), `"specversion":"1.0",`, "", 1), `"datacontenttype":"application/json",`, "", 1)
	var back Recorded
	if err := json.Unmarshal([]byte(older), &back); err != nil || older == string(text) || !reflect.DeepEqual(back, r) {
		t.Errorf("an older line %s: %+v, %v", older, back, err)
	}
	for from, to := range map[string]string{`"specversion":"1.0"`: `"specversion":"0.3"`, `"application/json"`: `"application/xml"`} {
		line := strings.Replace(string(text), from, to, 1)
		if err := json.Unmarshal([]byte(line), &back); err == nil || line == string(text) || !strings.Contains(err.Error(), "want") {
			t.Errorf("%s was read: %v", line, err)
		}
	}
}

// recordedSample returns a recorded event of a body, with the largest sequence that is
// an Integer of CloudEvents.
func recordedSample(t *testing.T, body Body) Recorded {
	t.Helper()
	e, err := newEvent(Stamp{ID: "0192f0c1-2a3b-7c4d-8e5f-60718293a4b5", Source: "trainer/0192f0c1-0000-7000-8000-000000000001", Time: time.Date(2026, 3, 14, 15, 9, 26, 5e8, time.UTC)}, scopeOf(body.Kind()), body)
	if err != nil {
		t.Fatal(err)
	}
	e.Principal = "cert:alice"
	return Recorded{Event: e, Sequence: math.MaxInt32, Stored: time.Date(2026, 3, 14, 15, 9, 27, 0, time.UTC)}
}
