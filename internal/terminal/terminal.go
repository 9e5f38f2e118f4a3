// Package terminal escapes text before a terminal shows it. Names, messages and
// metrics come from stores, and another person may have written a store. An
// escape sequence in them could rewrite the screen, set the clipboard or answer
// on behalf of the user. A bidirectional control could show one command and have
// another copied.
//
//	escaped                                         because a terminal …
//	U+0000–U+001F without \n and \t, U+007F         obeys it
//	U+0080–U+009F, as characters and as lone bytes  may obey it: U+009B is ESC [
//	bytes that are not UTF-8                        shows them in its own way
//	U+2028, U+2029                                  may begin a line
//	format characters (category Cf)                 reorders or hides text
//
// Of the format characters, U+200C and U+200D stay: Persian, Indic scripts and
// emoji need them, and they neither move nor hide anything. Visible signs that
// Unicode counts as format characters stay too, such as U+06DD.
//
// Text is escaped where it is written, not where it is read: the log, the views
// and all JSON keep the recorded text. [Writer] escapes it. It lets no escape
// sequence through, not even our own colours: it could not tell ours from those
// in a hostile name. The programs write their own drawings, such as a progress
// bar, past it.
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

// IsLine reports whether [Line] would change nothing.
func IsLine(text string) bool { return !dirty([]byte(text), forbiddenInLine) }

// forbidden reports whether a character must not reach a terminal.
func forbidden(r rune) bool {
	switch {
	case r == '\n', r == '\t':
		return false
	case r < 0x20, r >= 0x7f && r < 0xa0:
		return true
	case r < 0xad: // the rest of ASCII and Latin-1 is harmless up to the soft hyphen
		return false
	case r == 0x2028, r == 0x2029:
		return true
	case r == 0x200c, r == 0x200d, unicode.Is(unicode.Prepended_Concatenation_Mark, r):
		return false
	}
	return unicode.Is(unicode.Cf, r)
}

func forbiddenInLine(r rune) bool { return r == '\n' || r == '\t' || forbidden(r) }

// dirty reports whether text has a forbidden character.
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

// appendClean appends text with forbidden characters escaped.
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

// appendEscape appends a character as an escape of Go's syntax.
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
