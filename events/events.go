// Package events defines the facts and decisions on the log: their content ([Body] and
// its kinds), their scope ([Scope], the subject), their envelope ([Event]) and their
// form on the wire ([Encode], [Decode]).
//
//	subject   ckpt.<run>.<trial>.<actor>.<family>.<kind>
//	headers   CloudEvents 1.0, binary mode; ce-id is also the Nats-Msg-Id
//	body      JSON, kept raw and re-emitted as it came
//	void      stands for a message that is not a valid event ([Void])
//
// A fact is an observation. Facts are appended unconditionally and may be batched; the
// log keeps a fact of an old attempt, and folds ignore it. A decision changes the state
// for all readers. Decisions are appended one at a time, each only if no other decision
// of its [Aggregate] came first. The two are different types, [Fact] and [Decision], so
// that no call site can confuse them.
//
// The package is pure: its callers mint identifiers and times. The order of events is
// the sequence of the stream, never an ID or a clock.
package events

//go:generate go test -run ^TestDocs$ . -update

import (
	"encoding/json"
	"fmt"
	"time"
)

// Event is one entry of the log in its envelope.
type Event struct {
	ID      string // UUIDv7, minted once and reused on every retry
	Kind    Kind
	Version int    // of the body's schema
	Source  string // the appender, such as "trainer/<job>"
	Time    time.Time
	Scope   Scope
	Data    json.RawMessage // the body, unchanged

	// Principal is the sender as authenticated by the store's owner, not as claimed by
	// the sender: "token", "cert:alice", "uid:1000". It is empty if the owner itself
	// appended the event, or if the server does not report senders.
	Principal string

	// Signature of a decision by the trainer or user that made it, over the store, the
	// event and its place in the lane: "v1 NAME+HASH AFTER BASE64". Empty: not signed.
	// Nothing in this package checks it.
	Signature string
}

// Recorded is an event with its place in the log.
type Recorded struct {
	Event
	Sequence uint64    // position in the stream, from 1
	Stored   time.Time // when it was stored, by the server's clock
}

// Fact is an event that is appended unconditionally.
type Fact struct{ Event }

// Decision is an event that is appended only if its aggregate ends where the appender
// believes it ends.
type Decision struct{ Event }

// Stamp holds what the caller mints for a new event.
type Stamp struct {
	ID     string
	Source string
	Time   time.Time
}

// NewFact wraps body for the log. The scope's actor must not be [Server], whose lane
// belongs to decisions.
func NewFact(stamp Stamp, scope Scope, body Body) (Fact, error) {
	if body.Kind().Decides() {
		return Fact{}, fmt.Errorf("event %s is a decision, not a fact", body.Kind())
	}
	if scope.Actor == Server {
		return Fact{}, fmt.Errorf("event %s: a fact cannot have the actor of decisions", body.Kind())
	}
	e, err := newEvent(stamp, scope, body)
	return Fact{e}, err
}

// NewDecision wraps body for the lane of agg.
func NewDecision(stamp Stamp, agg Aggregate, body Body) (Decision, error) {
	if !body.Kind().Decides() {
		return Decision{}, fmt.Errorf("event %s is a fact, not a decision", body.Kind())
	}
	e, err := newEvent(stamp, agg.scope(), body)
	return Decision{e}, err
}

func newEvent(stamp Stamp, scope Scope, body Body) (Event, error) {
	if stamp.ID == "" || stamp.Time.IsZero() {
		return Event{}, fmt.Errorf("event %s has no ID or no time", body.Kind())
	}
	if err := scope.Validate(); err != nil {
		return Event{}, fmt.Errorf("event %s: %w", body.Kind(), err)
	}
	data, err := json.Marshal(body)
	if err != nil {
		return Event{}, fmt.Errorf("event %s: encode body: %w", body.Kind(), err)
	}
	return Event{
		ID: stamp.ID, Kind: body.Kind(), Version: versionOf(body), Source: stamp.Source,
		Time: stamp.Time.UTC(), Scope: scope, Data: data,
	}, nil
}

// versioned is a body whose version depends on its content.
type versioned interface{ schemaVersion() int }

var _ versioned = GroupStarted{}

func versionOf(body Body) int {
	if v, ok := body.(versioned); ok {
		return v.schemaVersion()
	}
	return 1
}

// Known reports whether this version of the program has a body type for the event.
func (e Event) Known() bool {
	s, ok := kinds[e.Kind]
	return ok && e.Version >= 1 && e.Version <= max(1, s.newest)
}

// Body decodes the body into the type of its kind. If the body does not fit its kind,
// Body returns a [*Void], which carries no information. For an unknown kind or a newer
// version it returns a [*NewerError]; the caller must not skip such an event.
func (e Event) Body() (Body, error) {
	if e.Kind == (Void{}).Kind() {
		v := new(Void)
		if err := json.Unmarshal(e.Data, v); err != nil {
			return nil, fmt.Errorf("event %s (%s): decode body: %w", e.ID, e.Kind, err)
		}
		return v, nil
	}
	spec, ok := kinds[e.Kind]
	if !ok || !e.Known() {
		return nil, &NewerError{ID: e.ID, Kind: e.Kind, Version: e.Version}
	}
	body := spec.zero()
	if err := decodeBody(e.Data, body); err != nil {
		return voidOf(Subject(e.Scope, e.Kind), e.Data, fmt.Errorf("the body is none of %s: %w", e.Kind, err)), nil
	}
	return body, nil
}

// deepest is the limit on the nesting of objects and lists in a body. encoding/json
// stops at 10,000, and rows embed bodies.
const deepest = 100

func decodeBody(data []byte, body Body) error {
	if tooDeep(data) {
		return fmt.Errorf("more than %d objects and lists lie in one another", deepest)
	}
	if err := json.Unmarshal(data, body); err != nil {
		return err
	}
	if b, ok := body.(checked); ok {
		return b.check()
	}
	return nil
}

// checked is a body whose members must fit each other.
type checked interface{ check() error }

// tooDeep only counts brackets, because encoding/json already checks that they match.
func tooDeep(data []byte) bool {
	depth, quoted := 0, false
	for i := 0; i < len(data); i++ {
		switch c := data[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			quoted = !quoted
		case quoted:
		case c == '{' || c == '[':
			if depth++; depth > deepest {
				return true
			}
		case c == '}' || c == ']':
			depth--
		}
	}
	return false
}
