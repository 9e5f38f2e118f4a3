package front

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
	"time"
)

// An inbox is a subject below _INBOX.<id>. The id is a secret of the client that
// chose it: the first session to subscribe below it claims it, for as long as it
// has a subscription there. No other session receives messages sent there, and
// only the server and the front send answers there. A client that reconnects
// claims its id again. Its old connection, which may be half open, then gets a
// challenge.
const inbox = "_INBOX."

// shortInbox is the minimum length of an id in characters.
const shortInbox = 16

// challenge is how long an old connection has to prove that it is alive.
const challenge = 2 * time.Second

// subscription is a SUB of the client.
type subscription struct {
	subject string
	inbox   string // name of its inbox
	most    int    // messages until it ends; 0: no limit
	had     int
}

// inboxOf returns the id of an inbox; ok is false for any other subject. The
// tokens after the id may have wildcards only if patterns is set.
func inboxOf(subject string, patterns bool) (id string, ok bool) {
	rest, ok := strings.CutPrefix(subject, inbox)
	if !ok {
		return "", false
	}
	id, rest, more := strings.Cut(rest, ".")
	if len(id) < shortInbox || !headerName(strings.ReplaceAll(id, "_", "-")) {
		return "", false
	}
	return id, !more || literal(rest) || patterns && pattern(rest)
}

// literal reports whether a subject has no wildcard and no empty token.
func literal(subject string) bool {
	for token := range strings.SplitSeq(subject, ".") {
		if token == "" || token == "*" || token == ">" {
			return false
		}
	}
	return true
}

// pattern reports whether a subject has no empty token, and > only at its end.
func pattern(subject string) bool {
	tokens := strings.Split(subject, ".")
	for i, token := range tokens {
		if token == "" || token == ">" && i < len(tokens)-1 {
			return false
		}
	}
	return true
}

// matches reports whether a subject matches a pattern.
func matches(pattern, subject string) bool {
	for {
		want, patterns, more := strings.Cut(pattern, ".")
		got, rest, left := strings.Cut(subject, ".")
		switch {
		case want == ">":
			return true
		case want != "*" && want != got, more != left:
			return false
		case !more:
			return true
		}
		pattern, subject = patterns, rest
	}
}

// subscribe accepts a SUB of a private inbox, and denies all others.
func (s *session) subscribe(f frame) error {
	id, ok := inboxOf(f.subject, true)
	if !ok || f.queue != "" {
		return s.sendError("Permissions Violation for Subscription to %q", f.subject)
	}
	s.subsMu.Lock()
	_, again := s.subs[f.sid]
	n := len(s.subs)
	s.subsMu.Unlock()
	switch {
	case again:
		return errParse
	case n >= s.f.limits.Subscriptions:
		return s.sendError("maximum subscriptions exceeded")
	}
	if err := s.to.flush(); err != nil { // the claim may wait
		return err
	}
	name := inboxName(id)
	switch mine, err := s.claim(name); {
	case err != nil:
		return err
	case !mine:
		return s.sendError("Permissions Violation for Subscription to %q", f.subject)
	}
	s.subsMu.Lock()
	s.subs[f.sid] = &subscription{subject: f.subject, inbox: name}
	s.subsMu.Unlock()
	return s.to.add(fmt.Appendf(nil, "SUB %s %s\r\n", f.subject, f.sid))
}

func (s *session) unsubscribe(f frame) error {
	s.subsMu.Lock()
	if sub := s.subs[f.sid]; sub != nil {
		if f.most > sub.had {
			sub.most = f.most
		} else {
			s.drop(f.sid, sub)
		}
	}
	s.subsMu.Unlock()
	text := "UNSUB " + f.sid
	if f.most > 0 {
		text = fmt.Sprintf("%s %d", text, f.most)
	}
	return s.to.add([]byte(text + "\r\n"))
}

// drop removes a subscription, and the claim with the last one. The caller holds
// subsMu.
func (s *session) drop(sid string, sub *subscription) {
	delete(s.subs, sid)
	for _, other := range s.subs {
		if other.inbox == sub.inbox {
			return
		}
	}
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	if s.f.claims[sub.inbox] == s {
		delete(s.f.claims, sub.inbox)
	}
}

// errNotYet ends a session whose inbox belongs to an ending session: its client
// reconnects, and then finds the inbox free.
const errNotYet = protocolError("Stale Connection")

// claim claims an inbox for the session, unless another live session has it.
func (s *session) claim(name string) (mine bool, err error) {
	for {
		s.f.mu.Lock()
		other := s.f.claims[name]
		if other == nil || other == s {
			s.f.claims[name] = s
		}
		s.f.mu.Unlock()
		if other == nil || other == s {
			return true, nil
		}
		if s.f.life.Err() != nil || other.lives() {
			return false, nil
		}
		other.close()
		if !s.outlives(other) {
			return false, errNotYet
		}
	}
}

// outlives waits for the end of a session that was closed. Two sessions that wait
// for each other both fail.
func (s *session) outlives(other *session) bool {
	timer := time.NewTimer(challenge)
	defer timer.Stop()
	select {
	case <-other.done:
		return true
	case <-timer.C:
	case <-s.f.life.Done():
	}
	return false
}

// lives challenges the client of a session. Data that the client sent before, and
// that lay unread while this process was stopped, does not count.
func (s *session) lives() bool {
	asked := s.pinged.Add(1)
	// With a client that does not read, this would block until its own deadline.
	s.f.all.Go(func() {
		_ = s.out.send([]byte("PING\r\n")) // the missing answer shows a failure
	})
	timer := time.NewTimer(challenge)
	defer timer.Stop()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for s.ponged.Load() < asked {
		select {
		case <-s.done:
			return false
		case <-timer.C:
			return false
		case <-tick.C:
		}
	}
	return true
}

// owns reports whether a subject is in an inbox of this session.
func (s *session) owns(reply string) bool {
	id, ok := inboxOf(reply, false)
	if !ok {
		return false
	}
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	return s.f.claims[inboxName(id)] == s
}

// sessionName returns the public name of a session: it survives a reconnection of
// the client, and reveals nothing of the client's inbox.
func sessionName(reply string) string {
	id, _ := inboxOf(reply, false)
	return inboxName(id)
}

func inboxName(id string) string {
	sum := sha256.Sum256([]byte("ckptstore session\x00" + id))
	return hex.EncodeToString(sum[:16])
}

// lives reports whether a session of this name has a connection, or may have one.
func (f *Front) lives(name string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.o.Several || f.claims[name] != nil || time.Since(f.began) < f.limits.Comeback
}
