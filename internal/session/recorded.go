package session

import (
	"fmt"
	"strings"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/redact"
)

// recorded returns what the log gets of a body: command lines, configurations
// and the texts of errors without secrets. The body itself stays as it is, so
// that workers are started with what was given.
func recorded(names redact.Names, body events.Body) events.Body {
	switch b := body.(type) {
	case *events.JobStarted:
		c := *b
		c.Command, c.Flags = names.Args(b.Command), names.Args(b.Flags)
		return &c
	case *events.TrialCreated:
		c := *b
		c.Config = names.Config(b.Config)
		return &c
	case *events.JobEnded:
		c := *b
		return redacted(&c, &c.Reason)
	case *events.TrialPaused:
		c := *b
		return redacted(&c, &c.Reason)
	case *events.TrialErrored:
		c := *b
		return redacted(&c, &c.Message)
	case *events.WorkerExited:
		c := *b
		return redacted(&c, &c.Message, &c.Traceback)
	case *events.GroupStopped:
		c := *b
		return redacted(&c, &c.Reason)
	case *events.WriteFailed:
		c := *b
		return redacted(&c, &c.Error)
	case *events.CheckpointAborted:
		c := *b
		return redacted(&c, &c.Reason)
	case *events.RestoreFailed:
		c := *b
		return redacted(&c, &c.Error)
	}
	return body
}

// redacted redacts texts of a body, in place, and returns the body.
func redacted(body events.Body, texts ...*string) events.Body {
	for _, text := range texts {
		*text = redact.Text(*text)
	}
	return body
}

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
