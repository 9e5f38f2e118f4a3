// Package terminal makes text harmless before a terminal shows it. Names,
// messages and metrics come from stores, and a store may have been written by
// another person: an escape sequence in them could rewrite the screen, set the
// clipboard or answer on behalf of the user, and a bidirectional control could
// show one command and have another copied.
//
//	written as an escape                            because a terminal …
//	U+0000–U+001F without \n and \t, U+007F         obeys it
//	U+0080–U+009F, as characters and as lone bytes  may obey it: U+009B is ESC [
//	other bytes that are no UTF-8                   shows what it likes
//	U+2028, U+2029                                  may begin a line
//	format characters (category Cf)                 reorders or hides text
//
// Of the format characters, U+200C and U+200D stay: Persian, Indic scripts and
// emoji need them, and they neither move nor hide anything. So do the signs that
// Unicode counts among them although they are visible, such as U+06DD.
//
// Text is made harmless where it is written, not where it is read: the log, the
// views and all JSON keep what was recorded. [Writer] is the place for that. It
// lets no escape sequence through, not even those of our own colours: a writer
// that lets some through cannot tell ours from those of a hostile name. What the
// programs draw themselves, such as a progress bar, goes past it.
package terminal

import (
	"fmt"
	"unicode"
	"unicode/utf8"
)

// Text returns text in which every forbidden character is an escape such as
// \x1b, \u202e or \U000e0001. Clean text is returned as it is.
func Text(text string) string {
	if !dirty([]byte(text), forbidden) {
		return text
	}
	return string(appendClean(nil, []byte(text), forbidden))
}

// Line is [Text] for a value within one line: \n and \t are escapes too.
func Line(text string) string {
	if IsLine(text) {
		return text
	}
	return string(appendClean(nil, []byte(text), forbiddenInLine))
}

// IsLine reports whether [Line] changes nothing.
func IsLine(text string) bool { return !dirty([]byte(text), forbiddenInLine) }

// forbidden reports whether a character must not reach a terminal.
func forbidden(r rune) bool {
	switch {
	case r == '\n', r == '\t':
		return false
	case r < 0x20, r >= 0x7f && r < 0xa0:
		return true
	case r < 0xad: // of ASCII and Latin-1 the rest is harmless up to the soft hyphen
		return false
	case r == 0x2028, r == 0x2029:
		return true
	case r == 0x200c, r == 0x200d, unicode.Is(unicode.Prepended_Concatenation_Mark, r):
		return false
	}
	return unicode.Is(unicode.Cf, r)
}

func forbiddenInLine(r rune) bool { return r == '\n' || r == '\t' || forbidden(r) }

// dirty reports whether text has a character that is not to be shown.
func dirty(text []byte, not func(rune) bool) bool {
	for i := 0; i < len(text); {
		r, n := utf8.DecodeRune(text[i:])
		if r == utf8.RuneError && n == 1 || not(r) {
			return true
		}
		i += n
	}
	return false
}

// appendClean appends text with escapes for what is not to be shown.
func appendClean(to, text []byte, not func(rune) bool) []byte {
	for i := 0; i < len(text); {
		r, n := utf8.DecodeRune(text[i:])
		switch {
		case r == utf8.RuneError && n == 1:
			to = fmt.Appendf(to, `\x%02x`, text[i])
		case not(r):
			to = appendEscape(to, r)
		default:
			to = append(to, text[i:i+n]...)
		}
		i += n
	}
	return to
}

// appendEscape appends a character as Go writes it in a string.
func appendEscape(to []byte, r rune) []byte {
	switch {
	case r == '\n':
		return append(to, `\n`...)
	case r == '\t':
		return append(to, `\t`...)
	case r < utf8.RuneSelf:
		return fmt.Appendf(to, `\x%02x`, r)
	case r <= 0xffff:
		return fmt.Appendf(to, `\u%04x`, r)
	}
	return fmt.Appendf(to, `\U%08x`, r)
}
