package terminal_test

import (
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/internal/terminal"
)

func TestText(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"":                          "",
		"two\n\tlines":              "two\n\tlines",
		"\x1b]0;title\x07":          `\x1b]0;title\x07`,
		"a\x00b\rc\x7f":             `a\x00b\x0dc\x7f`,
		"\u009b31m red":             `\u009b31m red`,
		"lone \x9b byte, \xe2\x80":  `lone \x9b byte, \xe2\x80`,
		"pay \u202etxt.exe":         `pay \u202etxt.exe`,
		"\u2066a\u2069\u200f\u061c": `\u2066a\u2069\u200f\u061c`,
		"line\u2028break\u2029":     `line\u2028break\u2029`,
		"be\u200brt\ufeff":          `be\u200brt\ufeff`,
		"tag \U000e0041":            `tag \U000e0041`,
		`a backslash \x1b`:          `a backslash \x1b`,
		"Übung, 训练, می\u200cخواهم, ⠱⡀, 👩\u200d🚀, e\u0301": "Übung, 训练, می\u200cخواهم, ⠱⡀, 👩\u200d🚀, e\u0301",
		"\u06dd is seen":             "\u06dd is seen",
		"no-break\u00a0space \ufffd": "no-break\u00a0space \ufffd",
	} {
		if got := terminal.Text(text); got != want {
			t.Errorf("%q is shown as %q, want %q", text, got, want)
		}
	}
}

func TestLine(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"a name":         "a name",
		"two\nlines\t\r": `two\nlines\t\x0d`,
		"\u202e\x9b":     `\u202e\x9b`,
	} {
		if got := terminal.Line(text); got != want {
			t.Errorf("%q is shown as %q, want %q", text, got, want)
		}
		if got := terminal.IsLine(text); got != (text == want) {
			t.Errorf("%q is a line: %v", text, got)
		}
	}
}

func TestOutput(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"loss 0.1":                              "loss 0.1",
		"\x1b[1;31mred\x1b[0m":                  "\x1b[1;31mred\x1b[0m",
		"\x1b[38:2::1:2:3mleft on":              "\x1b[38:2::1:2:3mleft on\x1b[0m",
		"\x1b[31ma\x1b[mb":                      "\x1b[31ma\x1b[mb",
		" 10%\r 20%":                            " 10%\r 20%",
		"\x1b[2J\x1b[A\x1b]52;c;eA==\x07":       `\x1b[2J\x1b[A\x1b]52;c;eA==\x07`,
		"\x1b[" + strings.Repeat("1", 65) + "m": `\x1b[` + strings.Repeat("1", 65) + "m",
		"\u009b31m \x9b \u202e":                 `\u009b31m \x9b \u202e`,
		"\x1b\x1b[32mx\x1b":                     `\x1b` + "\x1b[32mx" + `\x1b` + "\x1b[0m",
	} {
		if got := string(terminal.AppendOutput(nil, []byte(text))); got != want {
			t.Errorf("%q is shown as %q, want %q", text, got, want)
		}
	}
}

// obeyed reports whether a terminal would obey a character, or whether it would
// hide or reorder others. It lists the characters by number, independent of the
// package's tables.
func obeyed(text string) (rune, bool) {
	for i, r := range text {
		switch {
		case r == '\n', r == '\t':
		case r < 0x20, r >= 0x7f && r <= 0x9f,
			r == 0xad, r == 0x61c, r == 0x180e, r == 0x200b, r == 0x200e, r == 0x200f,
			r >= 0x2028 && r <= 0x202e, r >= 0x2060 && r <= 0x206f, r == 0xfeff, r >= 0xfff9 && r <= 0xfffb,
			r >= 0xe0000 && r <= 0xe007f:
			return r, true
		case r == utf8.RuneError:
			if _, n := utf8.DecodeRuneInString(text[i:]); n == 1 {
				return r, true
			}
		}
	}
	return 0, false
}

// hostile draws text with many characters of interest, and lone bytes.
func hostile() *rapid.Generator[string] {
	special := rapid.SampledFrom([]string{
		"\x1b", "\x1b[31m", "\x1b[0m", "\x1b]0;x\x07", "\r", "\n", "\t", "\u009b", "\x9b", "\xe2\x80", "\xae", "\xf3\xa0\x81", "\x81",
		"\u202e", "\u2069", "\u200b", "\u200d", "\u2028", "\u061c", "\ufeff", "\U000e0041", "\u06dd", `\x1b`, "plain",
	})
	part := rapid.OneOf(special, rapid.String(), rapid.Map(rapid.SliceOf(rapid.Byte()), func(b []byte) string { return string(b) }))
	return rapid.Map(rapid.SliceOf(part), func(parts []string) string { return strings.Join(parts, "") })
}

func TestNoTextIsObeyed(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		text := hostile().Draw(t, "text")
		for name, show := range map[string]func(string) string{"Text": terminal.Text, "Line": terminal.Line} {
			got := show(text)
			if r, bad := obeyed(got); bad {
				t.Fatalf("%s(%q) = %q has %U", name, text, got, r)
			}
			if again := show(got); again != got {
				t.Fatalf("%s is not idempotent: %q, then %q", name, got, again)
			}
			if name == "Line" && strings.ContainsAny(got, "\n\t") {
				t.Fatalf("Line(%q) = %q is not one line", text, got)
			}
		}
		if _, bad := obeyed(text); !bad && !strings.ContainsFunc(text, func(r rune) bool { return unicode.Is(unicode.Cf, r) }) {
			if got := terminal.Text(text); got != text {
				t.Fatalf("clean text %q is shown as %q", text, got)
			}
		}
	})
}

func TestOutputHasStylesOnly(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		line := strings.ReplaceAll(hostile().Draw(t, "line"), "\n", "")
		got := string(terminal.AppendOutput(nil, []byte(line)))
		if again := string(terminal.AppendOutput(nil, []byte(got))); again != got {
			t.Fatalf("not idempotent: %q, then %q", got, again)
		}
		bare := strings.ReplaceAll(strings.ReplaceAll(strings.ReplaceAll(got, "\x1b[31m", ""), "\x1b[0m", ""), "\r", "")
		if r, bad := obeyed(bare); bad {
			t.Fatalf("%q is shown as %q, which has %U", line, got, r)
		}
	})
}
