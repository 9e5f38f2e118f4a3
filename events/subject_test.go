package events

import (
	"encoding/json"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// names draws short byte strings, often awkward ones.
func names() *rapid.Generator[string] {
	awkward := []string{"", "_", "__", "%", "%5F", "%2E", ".", "..", "*", ">", "a.b", "a b", "\x00", "\xff\xfe", "ä", "模型", "s", "r0", "-", "/", "\r\n", strings.Repeat("%", maxName)}
	return rapid.OneOf(
		rapid.SampledFrom(awkward),
		rapid.StringN(0, maxName, maxName),
		rapid.Map(rapid.SliceOfN(rapid.Byte(), 0, maxName), func(b []byte) string { return string(b) }),
		rapid.StringOfN(rapid.SampledFrom([]rune("._*> %25F\x00é")), 0, 20, maxName),
	)
}

func scopes() *rapid.Generator[Scope] {
	return rapid.Custom(func(t *rapid.T) Scope {
		n := rapid.IntRange(0, 1<<31-1).Draw(t, "number")
		return Scope{
			Run: names().Draw(t, "run"), Trial: names().Draw(t, "trial"),
			Actor: rapid.SampledFrom([]Actor{Server, Rank(n), Node(n)}).Draw(t, "actor"),
		}
	})
}

func kindsOf() *rapid.Generator[Kind] {
	return rapid.SampledFrom(slices.Sorted(maps.Keys(kinds)))
}

func TestSubjectInverse(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		scope, kind := scopes().Draw(t, "scope"), kindsOf().Draw(t, "kind")
		if err := scope.Validate(); err != nil {
			t.Fatal(err)
		}
		subject := Subject(scope, kind)
		gotScope, gotKind, err := parseSubject(subject)
		if err != nil || gotScope != scope || gotKind != kind {
			t.Fatalf("%q is read as %+v, %s, %v; want %+v, %s", subject, gotScope, gotKind, err, scope, kind)
		}
		legal(t, subject)
		lane := Aggregate{Run: scope.Run, Trial: scope.Trial}.Lane()
		inLane := strings.HasPrefix(subject, strings.TrimSuffix(lane, ">"))
		if inLane != (scope.Actor == Server) {
			t.Fatalf("%q in lane %q: %v", subject, lane, inLane)
		}
	})
}

// legal fails unless NATS accepts the subject from a publisher: tokens of visible ASCII
// without wildcards, none of them empty.
func legal(t *rapid.T, subject string) {
	tokens := strings.Split(subject, ".")
	if len(tokens) != 6 {
		t.Fatalf("subject %q has %d tokens", subject, len(tokens))
	}
	for _, token := range tokens {
		if token == "" || strings.ContainsAny(token, "*>$") {
			t.Fatalf("subject %q has the token %q", subject, token)
		}
		for i := range len(token) {
			if token[i] <= ' ' || token[i] >= 0x7f {
				t.Fatalf("subject %q has the byte %#x", subject, token[i])
			}
		}
	}
}

// Two names never share a token, and every token is short enough for a file name.
func TestNameInverse(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b := names().Draw(t, "a"), names().Draw(t, "b")
		got, err := DecodeName(EncodeName(a))
		if err != nil || got != a {
			t.Fatalf("%q came back as %q, %v", a, got, err)
		}
		if (EncodeName(a) == EncodeName(b)) != (a == b) {
			t.Fatalf("%q and %q are %q and %q", a, b, EncodeName(a), EncodeName(b))
		}
		if len(EncodeName(a)) > 255 {
			t.Fatalf("%q has %d bytes as a file name", a, len(EncodeName(a)))
		}
	})
}

// parseSubject accepts exactly what Subject writes.
func TestParseSubjectIsExact(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		token := rapid.StringOf(rapid.SampledFrom([]rune("ab._%250FfEe*> rns1")))
		subject := strings.Join([]string{
			Prefix, token.Draw(t, "run"), token.Draw(t, "trial"),
			rapid.OneOf(token, rapid.SampledFrom([]string{"s", "r0", "r07", "n1", "r-1"})).Draw(t, "actor"), "write", "sealed",
		}, ".")
		scope, kind, err := parseSubject(subject)
		if err == nil && Subject(scope, kind) != subject {
			t.Fatalf("%q was accepted as %q", subject, Subject(scope, kind))
		}
	})
	for _, bad := range []string{
		"", "ckpt", "ckpt.a.b.s.write", "ckpt.a.b.s.write.sealed.more", "other.a.b.s.write.sealed", "ckpt..b.s.write.sealed",
		"ckpt.a.b.x1.write.sealed", "ckpt.a.b.r.write.sealed", "ckpt.a.b.r01.write.sealed", "ckpt.a.b.r+1.write.sealed", "ckpt.a.b.r4294967296.write.sealed",
		"ckpt.a.b.s..sealed", "ckpt.a.b.s.write.", "ckpt.%2e.b.s.write.sealed", "ckpt.%61.b.s.write.sealed", "ckpt.%.b.s.write.sealed",
		"ckpt.%+1.b.s.write.sealed", "ckpt.*.b.s.write.sealed", "ckpt." + strings.Repeat("a", maxName+1) + ".b.s.write.sealed",
	} {
		if scope, kind, err := parseSubject(bad); err == nil {
			t.Errorf("%q was accepted as %+v, %s", bad, scope, kind)
		}
	}
}

func TestScopeErrors(t *testing.T) {
	for _, bad := range []Scope{{}, {Actor: "r"}, {Actor: "x"}, {Actor: "r-1"}, {Run: strings.Repeat("a", maxName+1), Actor: Server}} {
		if bad.Validate() == nil {
			t.Errorf("%+v was accepted", bad)
		}
		if _, err := NewFact(Stamp{ID: "x", Time: time.Unix(1, 0)}, bad, TrainingStarted{}); err == nil {
			t.Errorf("a fact of %+v was made", bad)
		}
	}
}

func TestEncodeInverse(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		value := rapid.Custom(func(t *rapid.T) json.RawMessage {
			data, err := json.Marshal(rapid.MapOf(rapid.String(), rapid.OneOf(
				rapid.Map(rapid.String(), func(s string) any { return s }),
				rapid.Map(rapid.Float64Range(-1e300, 1e300), func(f float64) any { return f }),
				rapid.Map(rapid.SliceOf(rapid.Byte()), func(b []byte) any { return b }),
			)).Draw(t, "value"))
			if err != nil {
				t.Fatal(err)
			}
			space := rapid.SampledFrom([]string{"", " ", "\n\t"})
			return json.RawMessage(space.Draw(t, "before") + string(data) + space.Draw(t, "after"))
		})
		e := Event{
			ID:      rapid.StringMatching(`[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}`).Draw(t, "id"),
			Kind:    kindsOf().Draw(t, "kind"),
			Version: rapid.IntRange(1, 1000).Draw(t, "version"),
			Source:  rapid.String().Draw(t, "source"),
			Time:    time.Unix(rapid.Int64Range(0, 1<<35).Draw(t, "seconds"), rapid.Int64Range(0, 1e9-1).Draw(t, "nanoseconds")).UTC(),
			Scope:   scopes().Draw(t, "scope"),
			Data:    value.Draw(t, "data"),
		}
		m := Encode(e)
		m.Header["Nats-Batch-Id"] = []string{"what the log adds"}
		got, err := Decode(m)
		if err != nil {
			t.Fatal(err)
		}
		if !got.Time.Equal(e.Time) {
			t.Fatalf("time %s came back as %s", e.Time, got.Time)
		}
		got.Time = e.Time
		if !reflect.DeepEqual(got, e) {
			t.Fatalf("%+v came back as %+v", e, got)
		}
	})
}
