package terminal

import (
	"bytes"
	"regexp"
	"unicode/utf8"
)

// style is the escape sequence that sets colours and weights (SGR). It moves
// nothing and a terminal answers nothing to it.
var style = regexp.MustCompile(`^\x1b\[[0-9;:]{0,64}m`)

// plainly ends all styles.
const plainly = "\x1b[0m"

// AppendOutput appends a line that a program printed, without its end, as
// [Text] but with the program's colours and with the carriage returns by which
// it redraws the line. Styles that the line leaves on end with it, so that the
// next line, of another program, does not have them.
func AppendOutput(to, line []byte) []byte {
	styled := false
	for i := 0; i < len(line); {
		_, n := utf8.DecodeRune(line[i:])
		switch line[i] {
		case '\r':
			to = append(to, '\r')
		case '\x1b':
			if set := style.Find(line[i:]); set != nil {
				n = len(set)
				styled = len(bytes.Trim(set[2:n-1], "0;:")) > 0
				to = append(to, set...)
				break
			}
			fallthrough
		default:
			to = appendClean(to, line[i:i+n], forbidden)
		}
		i += n
	}
	if styled {
		to = append(to, plainly...)
	}
	return to
}
