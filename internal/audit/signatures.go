package audit

import (
	"crypto/sha256"
	"fmt"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/events"
)

// SignatureFinding is a decision whose signature does not hold.
type SignatureFinding struct {
	Sequence uint64 `json:"sequence"`
	State    State  `json:"state"`
	Key      string `json:"key,omitempty"` // NAME+HASH, as the signature names it
	Problem  string `json:"problem"`
}

// SignatureReport counts the decisions of a log, or of a part, by their signatures.
type SignatureReport struct {
	Decisions int `json:"decisions"` // that were checked
	Signed    int `json:"signed"`    // by a granted key
	Unsigned  int `json:"unsigned"`
	Keys      int `json:"keys"` // that the log grants
	// Roots are the admins' keys by which the keys count: "policy" or "log", whose first
	// grant then is its own word.
	Roots    string             `json:"roots"`
	Findings []SignatureFinding `json:"findings"`
	More     int                `json:"more,omitempty"` // findings that are not listed
}

// Text returns the report in one line.
func (r SignatureReport) Text() string {
	text := fmt.Sprintf("%d of %d decisions signed, %d not signed, %d keys", r.Signed, r.Decisions, r.Unsigned, r.Keys)
	if n := len(r.Findings) + r.More; n > 0 {
		text += fmt.Sprintf(", %d findings", n)
	}
	if r.Keys > 0 && r.Roots == "log" {
		text += "; the first key is as the log itself names it: a line `signer` of the policy names yours"
	}
	return text
}

// signaturesMost bounds the findings that are listed, and copiedMost the signatures that
// are remembered to tell where a copied one is from.
const (
	signaturesMost = 100
	copiedMost     = 1 << 20
)

// Signatures checks the signatures of the decisions of a log, or of all decisions of some
// lanes, in the order of the log. The zero value is not useful; see [NewSignatures].
type Signatures struct {
	ring   *Ring
	lanes  map[string]uint64  // sequence of the last decision of each
	first  map[[8]byte]uint64 // sequence of the first event with a signature
	report SignatureReport
}

// NewSignatures returns the check of a log from its first event. The policy has the keys
// of admins that the verifier trusts, and its own requirements. Store is the identity of
// the store; "" takes it from store.created.
func NewSignatures(store string, p Policy) *Signatures {
	s := &Signatures{ring: NewRing(store, p.Signers, p.Signed), lanes: map[string]uint64{}, first: map[[8]byte]uint64{}}
	s.report.Roots, s.report.Findings = "log", []SignatureFinding{}
	if p.Signers != nil {
		s.report.Roots = "policy"
	}
	return s
}

// laneOf returns the lane of a message by its subject, "" if it has none.
func laneOf(subject string) string {
	tokens := strings.SplitN(subject, ".", 5)
	if len(tokens) < 5 || tokens[3] != string(events.Server) {
		return ""
	}
	return strings.Join(tokens[:4], ".") + ".>"
}

// Pass notes a message whose content is not known, or which is no event: what follows in
// its lane follows it.
func (s *Signatures) Pass(subject string, sequence uint64) {
	if lane := laneOf(subject); lane != "" {
		s.lanes[lane] = sequence
	}
}

// Message checks a message of the log. The verdict is of a decision if ok is set.
func (s *Signatures) Message(m events.Message, sequence uint64, stored time.Time) (v Verdict, ok bool) {
	if laneOf(m.Subject) == "" {
		return v, false
	}
	e, err := events.Decode(m)
	if err != nil || !e.Kind.Decides() {
		s.Pass(m.Subject, sequence)
		return v, false
	}
	return s.Event(events.Recorded{Event: e, Sequence: sequence, Stored: stored})
}

// Event checks an event of the log. The verdict is of a decision if ok is set.
func (s *Signatures) Event(e events.Recorded) (v Verdict, ok bool) {
	if e.Scope.Actor != events.Server {
		return v, false
	}
	agg := events.Aggregate{Run: e.Scope.Run, Trial: e.Scope.Trial}
	after := s.lanes[agg.Lane()]
	s.lanes[agg.Lane()] = e.Sequence
	if !e.Kind.Decides() {
		return v, false
	}
	if e.Sequence == 1 && s.ring.store == "" {
		s.store(e.Event)
	}
	if agg == (events.Aggregate{Trial: events.Keys}) {
		v = s.ring.Fold(e, after)
	} else {
		v = s.ring.Judge(e.Event, after, e.Stored)
	}
	s.count(&v, e)
	return v, true
}

// count counts a verdict. To one of a copied signature it adds where that is from.
func (s *Signatures) count(v *Verdict, e events.Recorded) {
	if e.Signature != "" {
		sum := sha256.Sum256([]byte(e.Signature))
		id := [8]byte(sum[:])
		switch at, had := s.first[id]; {
		case had && v.Problem != "":
			v.Problem += fmt.Sprintf("; event %d has the same signature", at)
		case !had && len(s.first) < copiedMost:
			s.first[id] = e.Sequence
		}
	}
	s.report.Decisions++
	switch v.State {
	case Signed:
		s.report.Signed++
	case Unsigned:
		s.report.Unsigned++
	}
	if v.Problem == "" {
		return
	}
	if len(s.report.Findings) >= signaturesMost {
		s.report.More++
		return
	}
	s.report.Findings = append(s.report.Findings, SignatureFinding{Sequence: e.Sequence, State: v.State, Key: v.Key, Problem: v.Problem})
}

// Report returns what was found so far.
func (s *Signatures) Report() SignatureReport {
	r := s.report
	keys := map[string]bool{}
	for _, g := range s.ring.grants {
		keys[g.Key] = true
	}
	r.Keys = len(keys)
	return r
}

// Grants returns the keys that the log grants so far.
func (s *Signatures) Grants() []Grant { return s.ring.Grants() }
