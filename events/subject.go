package events

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Prefix is the first token of every subject; Filter matches all of them.
const (
	Prefix = "ckpt"
	Filter = "ckpt.>"
)

// CheckpointDecisions is the filter of all decisions about checkpoints.
const CheckpointDecisions = Prefix + ".*.*." + string(Server) + ".checkpoint.*"

// None stands for "no run" and "no trial" in a scope: events of the store have neither,
// events of a job have no trial. In a subject it is "_"; a run named "_" is encoded.
const None = ""

// Keys is the trial, of no run, whose lane has the decisions about keys that sign: a
// reader of this lane alone has all of them.
const Keys = "keys"

// Actor identifies the speaker: "s" decides, "n3" is node 3, "r7" is rank 7.
type Actor string

// Server is the actor of all decisions.
const Server Actor = "s"

// Rank returns the actor of one rank's facts.
func Rank(rank int) Actor { return Actor("r" + strconv.Itoa(rank)) }

// Node returns the actor of one node's facts.
func Node(node int) Actor { return Actor("n" + strconv.Itoa(node)) }

func (a Actor) validate() error {
	if a == Server {
		return nil
	}
	if len(a) >= 2 && (a[0] == 'r' || a[0] == 'n') {
		n, err := strconv.ParseUint(string(a[1:]), 10, 31)
		if err == nil && strconv.FormatUint(n, 10) == string(a[1:]) {
			return nil
		}
	}
	return fmt.Errorf("actor %q is none of s, n<node>, r<rank>", string(a))
}

// Scope is everything in a subject except the kind: the run and trial that an event is
// about, and its actor.
type Scope struct {
	Run   string
	Trial string
	Actor Actor
}

// Validate returns an error if no subject can hold the actor, or if a name is too long.
func (s Scope) Validate() error {
	for _, name := range []string{s.Run, s.Trial} {
		if len(name) > maxName {
			return fmt.Errorf("name of %d bytes is too long, at most %d are allowed", len(name), maxName)
		}
	}
	return s.Actor.validate()
}

// maxName bounds run and trial names in bytes, so that an encoded name,
// every byte escaped, still fits a file name of 255 bytes.
const maxName = 80

// Subject returns the subject of an event of this kind and scope.
func Subject(s Scope, k Kind) string {
	return Prefix + "." + EncodeName(s.Run) + "." + EncodeName(s.Trial) + "." + string(s.Actor) + "." + string(k)
}

// parseSubject is the exact inverse of [Subject]: it rejects anything that Subject
// would not write.
func parseSubject(subject string) (Scope, Kind, error) {
	bad := func(why string) (Scope, Kind, error) {
		return Scope{}, "", fmt.Errorf("subject %q: %s", subject, why)
	}
	tokens := strings.Split(subject, ".")
	if len(tokens) != 6 || tokens[0] != Prefix {
		return bad("not of the form ckpt.<run>.<trial>.<actor>.<family>.<kind>")
	}
	run, err := DecodeName(tokens[1])
	if err != nil {
		return bad(err.Error())
	}
	trial, err := DecodeName(tokens[2])
	if err != nil {
		return bad(err.Error())
	}
	s := Scope{Run: run, Trial: trial, Actor: Actor(tokens[3])}
	if err := s.Validate(); err != nil {
		return bad(err.Error())
	}
	if tokens[4] == "" || tokens[5] == "" {
		return bad("empty kind")
	}
	return s, Kind(tokens[4] + "." + tokens[5]), nil
}

// Aggregate is the unit of decision: all decisions of one trial, or of the store itself
// (the zero Aggregate). They share one lane of the log.
type Aggregate struct {
	Run   string
	Trial string
}

// Lane returns the one literal filter under which the decisions of an aggregate are
// ordered. Nothing under it is ever appended unconditionally.
func (a Aggregate) Lane() string {
	return Prefix + "." + EncodeName(a.Run) + "." + EncodeName(a.Trial) + "." + string(Server) + ".>"
}

// Subjects returns the filter of all events about an aggregate: its decisions and the
// facts of its ranks and nodes.
func (a Aggregate) Subjects() string {
	return Prefix + "." + EncodeName(a.Run) + "." + EncodeName(a.Trial) + ".>"
}

// About reports whether e is under [Aggregate.Subjects].
func (a Aggregate) About(e Event) bool { return e.Scope.Run == a.Run && e.Scope.Trial == a.Trial }

// Owns reports whether e is a decision of this aggregate.
func (a Aggregate) Owns(e Event) bool { return e.Scope == a.scope() }

func (a Aggregate) scope() Scope { return Scope{Run: a.Run, Trial: a.Trial, Actor: Server} }

// EncodeName turns any name into one subject token or file name. Letters, digits, "-"
// and "_" stay; every other byte becomes %XX. The empty name becomes "_" and the name
// "_" becomes "%5F".
func EncodeName(name string) string {
	switch name {
	case None:
		return "_"
	case "_":
		return "%5F"
	}
	if allPlain(name) {
		return name
	}
	var b strings.Builder
	for i := range len(name) {
		if c := name[i]; plain(c) {
			b.WriteByte(c)
		} else {
			fmt.Fprintf(&b, "%%%02X", c)
		}
	}
	return b.String()
}

// DecodeName is the exact inverse of [EncodeName]: it rejects a token that EncodeName
// would have written differently.
func DecodeName(token string) (string, error) {
	if token == "_" {
		return None, nil
	}
	if token != "" && allPlain(token) {
		return token, nil
	}
	var b strings.Builder
	for i := 0; i < len(token); i++ {
		switch c := token[i]; {
		case plain(c):
			b.WriteByte(c)
		case c == '%' && i+2 < len(token):
			v, err := strconv.ParseUint(token[i+1:i+3], 16, 8)
			if err != nil {
				return "", fmt.Errorf("name %q: bad escape", token)
			}
			b.WriteByte(byte(v))
			i += 2
		default:
			return "", fmt.Errorf("name %q: byte %q must be escaped", token, c)
		}
	}
	name := b.String()
	if EncodeName(name) != token {
		return "", fmt.Errorf("name %q is not in its canonical form %q", token, EncodeName(name))
	}
	return name, nil
}

func allPlain(name string) bool {
	for i := range len(name) {
		if !plain(name[i]) {
			return false
		}
	}
	return true
}

func plain(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_'
}

// Pattern names kinds of events: one kind ("checkpoint.committed"), a family
// ("checkpoint.*"), or a word of any family ("*.failed").
type Pattern string

// ParsePattern returns an error for a pattern that matches neither a kind of this
// version nor [Void].
func ParsePattern(text string) (Pattern, error) {
	p := Pattern(text)
	if len(p.Kinds()) == 0 && !p.Match(Void{}.Kind()) {
		return "", fmt.Errorf("no such type %q; it is FAMILY.KIND, such as checkpoint.committed, or FAMILY.*: families are %s",
			text, strings.Join(families(), ", "))
	}
	return p, nil
}

// Match reports whether the pattern names this kind.
func (p Pattern) Match(k Kind) bool {
	family, word, ok := strings.Cut(string(p), ".")
	kindFamily, kindWord, _ := strings.Cut(string(k), ".")
	return ok && (family == "*" || family == kindFamily) && (word == "*" || word == kindWord)
}

// Kinds returns the kinds of this version that the pattern names, sorted.
func (p Pattern) Kinds() []Kind {
	var found []Kind
	for k := range kinds {
		if p.Match(k) {
			found = append(found, k)
		}
	}
	slices.Sort(found)
	return found
}

// Subjects returns the NATS subject filter for the events of a trial that the pattern
// names. [None] stands for any run, and for any trial of a run.
func (p Pattern) Subjects(run, trial string) string {
	filter := Prefix
	for _, name := range []string{run, trial} {
		if name == None {
			filter += ".*"
		} else {
			filter += "." + EncodeName(name)
		}
	}
	return filter + ".*." + string(p)
}

func families() []string {
	var found []string
	for k := range kinds {
		found = append(found, k.Family())
	}
	slices.Sort(found)
	return slices.Compact(found)
}
