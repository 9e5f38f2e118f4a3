package session

import (
	"fmt"
	"strings"
)

// MaxMessage bounds what the log keeps of a text, in bytes: its beginning. An event
// has to fit the log, where a byte may take six.
const MaxMessage = 16 << 10

// marked is how much a mark of a cut takes of the bytes that are left.
const marked = 64

// Beginning returns text cut to at most limit bytes, with a mark where it is cut.
func Beginning(text string, limit int) string {
	if len(text) <= limit {
		return text
	}
	kept := strings.ToValidUTF8(text[:limit-marked], "")
	return fmt.Sprintf("%s… (%d more bytes)", kept, len(text)-len(kept))
}

// End returns the end of text, of at most limit bytes, with a mark where it is cut.
func End(text string, limit int) string {
	if len(text) <= limit {
		return text
	}
	kept := strings.ToValidUTF8(text[len(text)-limit+marked:], "")
	return fmt.Sprintf("(%d bytes before) …%s", len(text)-len(kept), kept)
}
