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
// has a subscription there. Nobody else gets what is sent there, and answers to
// it come from the server and the front alone. A client that connects again
// claims its id again; then its old connection, which may be half open, is asked
// for a sign of life.
const inbox = "_INBOX."

// shortInbox is the least number of characters of an id.
const shortInbox = 16

// challenge is how long an old connection has to show that it is alive.
const challenge = 2 * time.Second

// subscription is a SUB of the client.
type subscription struct {
	subject string
	inbox   string // the name of its inbox
	most    int    // messages until it ends, 0 without end
	had     int
}

// inboxOf is the id of an inbox; not ok for any other subject. The tokens after
// the id may have wildcards only if patterns are allowed.
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

// matches reports whether a subject is under a pattern.
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

// subscribe takes a SUB of a private inbox, and denies all others.
func (s *session) subscribe(f frame) error {
	id, ok := inboxOf(f.subject, true)
	if !ok || f.queue != "" {
		return s.say("Permissions Violation for Subscription to %q", f.subject)
	}
	s.subsMu.Lock()
	_, again := s.subs[f.sid]
	n := len(s.subs)
	s.subsMu.Unlock()
	switch {
	case again:
		return errParse
	case n >= s.f.limits.Subscriptions:
		return s.say("maximum subscriptions exceeded")
	}
	if err := s.to.flush(); err != nil { // the claim may wait
		return err
	}
	name := inboxName(id)
	switch mine, err := s.claim(name); {
	case err != nil:
		return err
	case !mine:
		return s.say("Permissions Violation for Subscription to %q", f.subject)
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

// drop forgets a subscription, and the claim with the last one. The caller holds
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

// errNotYet ends a session whose inbox is that of another one that is about to end: its
// client connects again, and finds the inbox free.
const errNotYet = protocolError("Stale Connection")

// claim makes an inbox the session's own, unless it is that of another session that
// is alive.
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

// outlives waits for the end of a session that was closed. Of two that wait for
// each other, none gets what it wants.
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

// lives asks the client of a session for a sign of life: what it has sent before, and
// lies unread when this process was stopped, is none.
func (s *session) lives() bool {
	asked := s.pinged.Add(1)
	// To a client that takes nothing this would wait for its own deadline.
	s.f.all.Go(func() {
		_ = s.out.send([]byte("PING\r\n")) // which is seen by the lack of an answer
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

// sessionName is what a session is called where others read it: it survives a new
// connection of the client, and tells nothing of the client's inbox.
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
