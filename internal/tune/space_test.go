package tune_test

import (
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/internal/tune"
)

func space(t *testing.T, text string) tune.Space {
	t.Helper()
	s, err := tune.ReadSpace([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestGrid: trials go through the combinations of the grids in order, the last name first.
func TestGrid(t *testing.T) {
	s := space(t, `{"a": {"grid": [1, 2]}, "b": {"grid": ["x", "y", "z"]}, "c": true}`)
	if s.Cells() != 6 {
		t.Fatalf("%d combinations", s.Cells())
	}
	var got []string
	for i := range 7 {
		c := s.Draw(1, i)
		if c["c"] != true {
			t.Errorf("a value that is no domain became %v", c["c"])
		}
		got = append(got, strings.Join(s.Fill([]string{"{a}{b}"}, c), ""))
	}
	if text := strings.Join(got, " "); text != "1x 1y 1z 2x 2y 2z 1x" {
		t.Errorf("combinations: %s", text)
	}
}

// TestDraws: every draw is in its domain, and depends on the seed and the trial alone, also
// after the space was in the log.
func TestDraws(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const text = `{"c": {"choice": [1, "two", null]}, "i": {"integer": [-2, 3]}, "l": {"loguniform": [0.0001, 0.1]}, "u": {"uniform": [-1, 1]}}`
		s, err := tune.ReadSpace([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		logged, err := json.Marshal(s.Values())
		if err != nil {
			t.Fatal(err)
		}
		again, err := tune.ReadSpace(logged)
		if err != nil {
			t.Fatal(err)
		}
		seed, trial := rapid.Int64().Draw(t, "seed"), rapid.IntRange(0, 1000).Draw(t, "trial")
		c := s.Draw(seed, trial)
		if !reflect.DeepEqual(c, again.Draw(seed, trial)) {
			t.Fatalf("trial %d is another after the space was in the log", trial)
		}
		between := func(name string, lo, hi float64) {
			if v, ok := c[name].(float64); !ok || v < lo || v > hi {
				t.Fatalf("%s is %v, want a number from %v to %v", name, c[name], lo, hi)
			}
		}
		between("i", -2, 3)
		between("l", 0.0001, 0.1)
		between("u", -1, 1)
		if v := c["i"].(float64); v != float64(int(v)) {
			t.Fatalf("an integer is %v", v)
		}
		if c["c"] != 1.0 && c["c"] != "two" && c["c"] != nil {
			t.Fatalf("a choice is %v", c["c"])
		}
	})
}

// TestTrialsDiffer: random draws of trials and of seeds differ.
func TestTrialsDiffer(t *testing.T) {
	s := space(t, `{"u": {"uniform": [0, 1]}}`)
	seen := map[any]bool{}
	for seed := range int64(3) {
		for trial := range 50 {
			seen[s.Draw(seed, trial)["u"]] = true
		}
	}
	if len(seen) != 150 {
		t.Errorf("%d different values in 150 draws", len(seen))
	}
}

func TestBadSpaces(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{`[]`, "no JSON object"},
		{`{}`, "is empty"},
		{`{"a": 1} {"b": 2}`, "more than one"},
		{`{"a{": 1}`, "no braces"},
		{`{"a": {"choice": []}}`, "not empty"},
		{`{"a": {"choice": 3}}`, "want a list"},
		{`{"a": {"normal": [0, 1]}}`, `normal: want one of {"choice"`},
		{`{"a": {"uniform": [0, 1], "grid": [1]}}`, "or one of"},
		{`{"a": {"uniform": [1]}}`, "want [LOW, HIGH]"},
		{`{"a": {"uniform": [1, "b"]}}`, "b is no number"},
		{`{"a": {"uniform": [2, 1]}}`, "2 is above 1"},
		{`{"a": {"uniform": [-1e308, 1.7e308]}}`, "too wide"},
		{`{"a": {"loguniform": [0, 1]}}`, "0 is not above 0"},
		{`{"a": {"integer": [0, 1.5]}}`, "want whole numbers"},
	} {
		_, err := tune.ReadSpace([]byte(c.text))
		if !errors.Is(err, tune.ErrDefinition) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.text, err, c.want)
		}
	}
}

// TestFill: strings of a configuration are arguments as they are, and braces of other names
// stay.
func TestFill(t *testing.T) {
	s := space(t, `{"lr": 0.001, "act": "tanh", "deep": true}`)
	got := s.Fill([]string{"train", "--lr={lr}", "{act}-{deep}", "{other}", "{}"}, s.Draw(1, 0))
	if want := []string{"train", "--lr=0.001", "tanh-true", "{other}", "{}"}; !reflect.DeepEqual(got, want) {
		t.Errorf("filled: %q, want %q", got, want)
	}
}

// TestCheck: a placeholder that is a whole argument or value must name something of the space.
func TestCheck(t *testing.T) {
	s := space(t, `{"lr": 0.001, "deep.n": 2}`)
	for _, c := range []struct{ arg, bad string }{
		{"{lr}", ""},
		{"--lr={lr}", ""},
		{"--n={deep.n}", ""},
		{"x{learning}y", ""},
		{"echo ${HOME}", ""},
		{"{}", ""},
		{"{ print $1 }", ""},
		{"{learningrate}", `no "learningrate", only deep.n, lr`},
		{"--lr={rate}", `argument --lr={rate}: the search space has no "rate"`},
	} {
		err := s.Check([]string{"train", c.arg})
		if (err == nil) != (c.bad == "") || err != nil && !(errors.Is(err, tune.ErrDefinition) && strings.Contains(err.Error(), c.bad)) {
			t.Errorf("%s: %v, want %q", c.arg, err, c.bad)
		}
	}
}
