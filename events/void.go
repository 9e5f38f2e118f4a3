package events

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/ckptstore/ckptstore/internal/problem"
)

// ErrNewer reports that an event was written by a newer version of this program.
var ErrNewer = problem.New(problem.Newer, "written by a newer version")

// NewerError names an event in a well-formed envelope that this version does not know.
// It matches [ErrNewer]. Such an event is never a [Void].
type NewerError struct {
	ID      string
	Kind    Kind
	Version int
}

// Error implements error.
func (e *NewerError) Error() string {
	what := fmt.Sprintf("the unknown kind %q", e.Kind)
	if e.Kind.Known() {
		what = fmt.Sprintf("version %d of %s, this program knows version %d", e.Version, e.Kind, max(1, kinds[e.Kind].newest))
	}
	return fmt.Sprintf("event %s has %s: it was %v: upgrade this program to read it", e.ID, what, ErrNewer)
}

// ProblemKind returns [problem.Newer].
func (*NewerError) ProblemKind() problem.Kind { return problem.Newer }

// Is makes every NewerError an [ErrNewer].
func (e *NewerError) Is(target error) bool { return target == ErrNewer }

// Void stands for a message of the log that is not a valid event. No program appends
// it. Readers return it in place of the message, so that no sequence is missing, and
// folds and subscribers continue after it. Whether a message is void follows from the
// message and its sequence alone, so all readers of one version agree. The owner of the
// store records it with [LogVoided].
type Void struct {
	Subject string `json:"subject"`
	Digest  string `json:"digest"` // SHA-256 over subject, a line feed and body, in hex
	Why     string `json:"why"`
}

// Kind implements [Body]. No subject of the log contains it.
func (Void) Kind() Kind { return "log.void" }

// longText is the number of bytes that a [Void] keeps of a foreign text.
const longText = 512

// NewVoid returns the event that stands for the message at a sequence, stored at the
// given time. Its scope is whatever can be parsed from the subject. A message in the
// lane of an aggregate therefore keeps its place in that lane.
func NewVoid(m Message, sequence uint64, at time.Time, why error) Event {
	v := voidOf(m.Subject, m.Data, why)
	data, err := json.Marshal(v)
	if err != nil {
		panic(err) // impossible: a struct of three strings
	}
	return Event{
		ID: fmt.Sprintf("void-%d-%s", sequence, v.Digest[:16]), Kind: v.Kind(), Version: 1, Source: "log", Time: at.UTC(),
		Scope: scopeIn(m.Subject), Data: data,
	}
}

func voidOf(subject string, data []byte, why error) *Void {
	text := why.Error()
	for _, form := range []string{"message on %q: ", "subject %q: "} {
		text = strings.TrimPrefix(text, fmt.Sprintf(form, subject))
	}
	return &Void{Subject: shortText(subject), Digest: VoidDigest(subject, data), Why: shortText(text)}
}

// VoidDigest returns the digest of a [Void] that stands for this message.
func VoidDigest(subject string, data []byte) string {
	h := sha256.New()
	h.Write([]byte(subject + "\n"))
	h.Write(data)
	return hex.EncodeToString(h.Sum(nil))
}

// shortText makes text valid UTF-8 and truncates it.
func shortText(text string) string {
	text = strings.ToValidUTF8(text, "\uFFFD")
	if len(text) <= longText {
		return text
	}
	end := longText
	for !utf8.RuneStart(text[end]) {
		end--
	}
	return text[:end] + "…"
}

// scopeIn returns the part of the scope that can be parsed from a possibly invalid
// subject. It is empty unless run and trial can be parsed.
func scopeIn(subject string) (s Scope) {
	tokens := strings.Split(subject, ".")
	if len(tokens) < 4 || tokens[0] != Prefix {
		return s
	}
	run, err1 := DecodeName(tokens[1])
	trial, err2 := DecodeName(tokens[2])
	if err1 != nil || err2 != nil || len(run) > maxName || len(trial) > maxName {
		return s
	}
	s.Run, s.Trial = run, trial
	// The lane of an aggregate begins below the actor of decisions.
	if actor := Actor(tokens[3]); actor.validate() == nil && (actor != Server || len(tokens) > 4) {
		s.Actor = actor
	}
	return s
}
