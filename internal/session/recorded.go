package session

import (
	"fmt"
	"strings"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/redact"
)

// recorded returns the loggable form of a body: command lines, configurations and
// error texts without secrets. The body itself is unchanged, so that workers
// start with the original values.
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

// redacted redacts texts of a body in place, and returns the body.
func redacted(body events.Body, texts ...*string) events.Body {
	for _, text := range texts {
		*text = redact.Text(*text)
	}
	return body
}

// MaxMessage bounds the length in bytes of a text in the log; the rest is cut. An
// event must fit in the log, where a byte may take six.
const MaxMessage = 16 << 10

// marked is reserved for the mark of a cut, out of the remaining bytes.
const marked = 64

// Beginning returns text cut to at most limit bytes, with a mark at the cut.
func Beginning(text string, limit int) string {
	if len(text) <= limit {
		return text
	}
	kept := strings.ToValidUTF8(text[:limit-marked], "")
	return fmt.Sprintf("%s… (%d more bytes)", kept, len(text)-len(kept))
}

// End returns the last limit bytes of text at most, with a mark at the cut.
func End(text string, limit int) string {
	if len(text) <= limit {
		return text
	}
	kept := strings.ToValidUTF8(text[len(text)-limit+marked:], "")
	return fmt.Sprintf("(%d bytes before) …%s", len(text)-len(kept), kept)
}
