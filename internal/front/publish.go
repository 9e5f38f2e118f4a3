package front

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/ckptstore/ckptstore/events"
)

// Prefixes of the subjects that clients publish to.
const (
	eventSubjects = events.Prefix + "."
	api           = "$JS.API."
	entries       = "$KV."
)

// publish passes a publication on, or refuses it.
func (s *session) publish(f frame) error {
	if f.reply != "" && !s.owns(f.reply) {
		return s.deny(f.reply, "")
	}
	// An answer on the subject of a request would pass for the request's answer.
	if f.reply != "" && !bounded(f.subject) && s.awaits(f.reply) {
		return s.deny(f.subject, f.reply)
	}
	// The filter of a consumer, with its wildcards, is a part of the subject.
	if !literal(f.subject) && !(strings.HasPrefix(f.subject, api+"CONSUMER.CREATE.") && pattern(f.subject)) {
		return s.deny(f.subject, f.reply)
	}
	var h header
	if f.header != nil {
		var err error
		if h, err = parseHeader(f.header, s.header); err != nil {
			return s.refuse(f, refuse(CodeEvent, "%v", err))
		}
		s.header = h // its memory is reused for the next frame
	}
	switch {
	case strings.HasPrefix(f.subject, eventSubjects):
		return s.event(f, h)
	case f.reply == "":
		return s.deny(f.subject, "")
	case strings.HasPrefix(f.subject, api):
		return s.request(f, h)
	case strings.HasPrefix(f.subject, entries):
		return s.entry(f, h)
	case f.subject == WhoSubject && h == nil && len(f.payload) == 0:
		return s.who(f.reply)
	case contains(s.f.o.Asks, f.subject) && h == nil && len(f.payload) == 0:
		return s.pass(f.subject, f.reply, nil, nil)
	}
	return s.deny(f.subject, f.reply)
}

// pass encodes a publication for the server.
func (s *session) pass(subject, reply string, h header, payload []byte) error {
	s.scratch = appendPub(s.scratch[:0], subject, reply, h, payload)
	err := s.to.add(s.scratch)
	if cap(s.scratch) > largeFrame {
		s.scratch = nil
	}
	return err
}

// passNow is pass for publications that were checked against the current log: a
// client that sends part of a frame after it cannot delay it until others have
// written.
func (s *session) passNow(subject, reply string, h header, payload []byte) error {
	if err := s.pass(subject, reply, h, payload); err != nil {
		return err
	}
	return s.to.flush()
}

// sendError sends an error of the protocol that does not end the connection.
func (s *session) sendError(format string, args ...any) error {
	return s.out.send([]byte("-ERR '" + fmt.Sprintf(format, args...) + "'\r\n"))
}

// deny denies a publication to a subject, in the server's words, and answers the
// request if it waits for an answer.
func (s *session) deny(subject, reply string) error {
	s.f.o.Logger.Info("client denied", "address", s.host, "principal", s.principal.Name, "subject", subject)
	if err := s.sendError("Permissions Violation for Publish to %q", subject); err != nil || reply == "" {
		return err
	}
	return s.answer(reply, refuse(CodeDenied, "the owner of the store does not let clients publish to %s", subject).answer())
}

// refuse answers a publication with the reason for its refusal.
func (s *session) refuse(f frame, why *Refusal) error {
	s.f.o.Logger.Info("client refused", "address", s.host, "principal", s.principal.Name, "subject", f.subject, "code", why.Code, "why", why.Text)
	if f.reply == "" {
		return s.sendError("Permissions Violation for Publish to %q", f.subject)
	}
	return s.answer(f.reply, why.answer())
}

// refusal converts an error of the log to a Refusal.
func refusal(err error) *Refusal {
	var r *Refusal
	if errors.As(err, &r) {
		return r
	}
	return busy(fmt.Errorf("the owner of the store could not check: %w", err))
}

// looking bounds a query to the log. It first flushes the client's frames to the
// server, as the query may wait.
func (s *session) looking() (context.Context, context.CancelFunc, error) {
	err := s.to.flush()
	ctx, cancel := context.WithTimeout(s.life, s.f.limits.Check)
	return ctx, cancel, err
}
