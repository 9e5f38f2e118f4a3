package session

import (
	"strings"
	"testing"
	"unicode/utf8"
)

// Cut text is marked, fits its bound and is valid.
func TestCuts(t *testing.T) {
	t.Parallel()
	for _, unit := range []string{"x", "ü", "€", "\xff"} {
		for n := range 8 {
			text := strings.Repeat("y", n) + strings.Repeat(unit, 3000)
			for _, cut := range []func(string, int) string{Beginning, End} {
				got := cut(text, 1000)
				if len(got) > 1000 || unit != "\xff" && len(got) < 900 || !utf8.ValidString(got) || !strings.Contains(got, "bytes") {
					t.Fatalf("%q: %d bytes: %q", unit, len(got), got)
				}
				if got := cut(text, len(text)); got != text {
					t.Fatalf("%q was changed", unit)
				}
			}
		}
	}
	if got := End("first "+strings.Repeat("x", 1000)+" last", 200); !strings.HasSuffix(got, " last") || strings.Contains(got, "first") {
		t.Errorf("the end is %q", got)
	}
	if got := Beginning("first "+strings.Repeat("x", 1000)+" last", 200); !strings.HasPrefix(got, "first ") || strings.Contains(got, "last") {
		t.Errorf("the beginning is %q", got)
	}
}
