package audit_test

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/mod/sumdb/note"
	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/audit"
)

const thisStore = "0192f0c1-2a3b-7c4d-8e5f-60718293a4b5"

// newSigner returns a signer, whose key follows from the seed.
func newSigner(t testing.TB, name string, seed byte) *audit.Signer {
	t.Helper()
	skey, vkey, err := note.GenerateKey(bytes.NewReader(bytes.Repeat([]byte{seed}, 64)), name)
	if err != nil {
		t.Fatal(err)
	}
	s, err := audit.NewSigner(skey + "\n")
	if err != nil {
		t.Fatal(err)
	}
	if s.Public() != vkey || s.Key() != audit.KeyOf(vkey) || s.Name() != name {
		t.Fatalf("signer %s, %s, %s of %s", s.Name(), s.Key(), s.Public(), vkey)
	}
	return s
}

// TestSignatureForm compares the signed bytes and the header with those that earlier
// versions made, and the message with the header.
func TestSignatureForm(t *testing.T) {
	d, err := events.NewDecision(events.Stamp{
		ID: "0192f0c1-2a3b-7c4d-8e5f-60718293a4b5", Source: "trainer/0192f0c1-0000-7000-8000-000000000001",
		Time: time.Date(2026, 3, 14, 15, 9, 26, 535_897_932, time.UTC),
	}, events.Aggregate{Run: "gpt.small", Trial: "main"}, &events.CheckpointCommitted{Attempt: 2, Checkpoint: "step-200.a2", Manifest: strings.Repeat("3d", 32), Bytes: 1 << 32})
	if err != nil {
		t.Fatal(err)
	}
	header, err := newSigner(t, "ada", 7).Sign(thisStore, d.Event, 41)
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "signature", hex.Dump(audit.SignedText(thisStore, d.Event, 41))+header+"\n")
	d.Signature = header
	m := events.Encode(d.Event)
	if got := m.Header[events.HeaderSignature]; !slices.Equal(got, []string{header}) {
		t.Errorf("the header is %q", got)
	}
	if e, err := events.Decode(m); err != nil || e.Signature != header {
		t.Errorf("decoded %+v, %v", e, err)
	}
	for _, bad := range []string{"", "v1", header + " x", strings.Replace(header, "v1", "v2", 1), strings.Replace(header, "41", "041", 1), strings.Replace(header, "ada+", "ada", 1), header[:len(header)-4], strings.ToUpper(header)} {
		if s, err := audit.ParseSignature(bad); err == nil {
			t.Errorf("%q is %+v", bad, s)
		}
	}
	if s, err := audit.ParseSignature(header); err != nil || s.After != 41 || s.Key != newSigner(t, "ada", 7).Key() {
		t.Errorf("%+v, %v", s, err)
	}
	for _, bad := range []string{"", "PRIVATE+KEY+ada", "not a key"} {
		if _, err := audit.NewSigner(bad); err == nil {
			t.Errorf("%q is a signer", bad)
		}
	}
}

// BenchmarkSign signs a commit.
func BenchmarkSign(b *testing.B) {
	d, err := events.NewDecision(events.Stamp{ID: thisStore, Source: "trainer/" + thisStore, Time: time.Now()},
		events.Aggregate{Run: "bert", Trial: "main"}, &events.CheckpointCommitted{Attempt: 2, Checkpoint: "step-200.a2", Manifest: strings.Repeat("3d", 32)})
	if err != nil {
		b.Fatal(err)
	}
	s := newSigner(b, "ada", 7)
	for b.Loop() {
		if _, err := s.Sign(thisStore, d.Event, 41); err != nil {
			b.Fatal(err)
		}
	}
}

// keyedLog is a log in memory whose decisions may be signed.
type keyedLog struct {
	t     *testing.T
	log   []events.Recorded
	lanes map[events.Aggregate]uint64
}

var began = time.Date(2026, 3, 14, 15, 0, 0, 0, time.UTC)

func newKeyedLog(t *testing.T) *keyedLog {
	l := &keyedLog{t: t, lanes: map[events.Aggregate]uint64{}}
	l.add(events.Aggregate{}, nil, events.StoreCreated{Store: thisStore, Format: 1})
	return l
}

func (l *keyedLog) decision(agg events.Aggregate, body events.Body) events.Event {
	l.t.Helper()
	d, err := events.NewDecision(events.Stamp{ID: fmt.Sprint("id-", len(l.log)+1), Source: "test", Time: began}, agg, body)
	if err != nil {
		l.t.Fatal(err)
	}
	return d.Event
}

// append appends an event as it is.
func (l *keyedLog) append(e events.Event) uint64 {
	sequence := uint64(len(l.log)) + 1
	l.log = append(l.log, events.Recorded{Event: e, Sequence: sequence, Stored: began.Add(time.Duration(sequence) * time.Minute)})
	l.lanes[events.Aggregate{Run: e.Scope.Run, Trial: e.Scope.Trial}] = sequence
	return sequence
}

// sign signs an event for the end of its lane.
func (l *keyedLog) sign(e events.Event, by *audit.Signer) events.Event {
	l.t.Helper()
	header, err := by.Sign(thisStore, e, l.lanes[events.Aggregate{Run: e.Scope.Run, Trial: e.Scope.Trial}])
	if err != nil {
		l.t.Fatal(err)
	}
	e.Signature = header
	return e
}

// add appends a decision, signed unless by is nil.
func (l *keyedLog) add(agg events.Aggregate, by *audit.Signer, body events.Body) uint64 {
	l.t.Helper()
	e := l.decision(agg, body)
	if by != nil {
		e = l.sign(e, by)
	}
	return l.append(e)
}

var keysLane, mainLane = events.Aggregate{Trial: events.Keys}, events.Aggregate{Run: "bert", Trial: "main"}

func (l *keyedLog) grant(by, to *audit.Signer, role string, more ...func(*events.AccessGranted)) uint64 {
	l.t.Helper()
	body := events.AccessGranted{User: to.Name(), Role: role, Key: to.Public()}
	for _, f := range more {
		f(&body)
	}
	return l.add(keysLane, by, body)
}

func (l *keyedLog) revoke(by *audit.Signer, keys ...string) uint64 {
	l.t.Helper()
	return l.add(keysLane, by, events.AccessRevoked{User: "x", Keys: keys})
}

func (l *keyedLog) report(p audit.Policy) audit.SignatureReport {
	l.t.Helper()
	s := audit.NewSignatures("", p)
	for _, e := range l.log {
		s.Event(e)
	}
	return s.Report()
}

// states returns the findings as "sequence state".
func states(r audit.SignatureReport) []string {
	list := []string{}
	for _, f := range r.Findings {
		list = append(list, fmt.Sprintf("%d %s", f.Sequence, f.State))
	}
	return list
}

// TestSignatures judges logs of honest and dishonest deciders. Event 1 is store.created, and
// event 2 grants the key of an admin.
func TestSignatures(t *testing.T) {
	ada, bert, eve := newSigner(t, "ada", 1), newSigner(t, "bert", 2), newSigner(t, "eve", 3)
	bert2 := newSigner(t, "bert", 4)
	pinned := events.CheckpointPinned{Checkpoint: "step-1.a1"}
	for name, test := range map[string]struct {
		do       func(l *keyedLog)
		policy   audit.Policy
		findings []string
		signed   int
		unsigned int
		says     string // of the last finding
	}{
		"signed": {do: func(l *keyedLog) {
			l.grant(ada, bert, "operator")
			l.add(mainLane, bert, pinned)
			l.add(mainLane, bert, events.CheckpointUnpinned{Checkpoint: "step-1.a1"})
			l.add(mainLane, ada, pinned)
		}, signed: 5, unsigned: 1},
		"not signed": {do: func(l *keyedLog) { l.add(mainLane, nil, pinned) }, signed: 1, unsigned: 2},
		"a revoked key of the policy": {do: func(l *keyedLog) {
			l.grant(ada, bert, "admin")
			l.revoke(bert, ada.Key())
			l.grant(ada, ada, "admin")
			l.add(mainLane, ada, pinned)
		}, policy: audit.Policy{Signers: []string{ada.Public()}}, signed: 3, unsigned: 1, findings: []string{"5 revoked key", "6 revoked key"}},
		"must be signed, with a slash": {do: func(l *keyedLog) {
			l.add(keysLane, ada, events.AccessGranted{User: "ada", Role: "admin", Require: []string{"*"}})
			l.add(events.Aggregate{Run: "b/c", Trial: "main"}, nil, pinned)
		}, signed: 2, unsigned: 2, findings: []string{"4 not signed"}},
		"must be signed": {do: func(l *keyedLog) {
			l.add(mainLane, nil, pinned)
			l.add(keysLane, ada, events.AccessGranted{User: "ada", Role: "admin", Require: []string{"b*"}})
			l.add(mainLane, nil, pinned)
			l.add(events.Aggregate{Run: "other", Trial: "main"}, nil, pinned)
			l.add(events.Aggregate{}, nil, events.LogVoided{Sequence: 1})
		}, signed: 2, unsigned: 5, findings: []string{"5 not signed"}, says: `decisions of runs "b*" must be`},
		"no longer": {do: func(l *keyedLog) {
			l.add(keysLane, ada, events.AccessGranted{User: "ada", Role: "admin", Require: []string{"*"}})
			l.add(keysLane, ada, events.AccessRevoked{User: "ada", Require: []string{"*"}})
			l.add(mainLane, nil, pinned)
		}, signed: 3, unsigned: 2},
		"the policy wants it": {do: func(l *keyedLog) { l.add(mainLane, nil, pinned) }, policy: audit.Policy{Signed: []string{"bert"}}, signed: 1, unsigned: 2, findings: []string{"3 not signed"}},
		"requirement of a forger": {do: func(l *keyedLog) {
			l.add(keysLane, ada, events.AccessGranted{User: "ada", Role: "admin", Require: []string{"*"}})
			l.add(keysLane, nil, events.AccessRevoked{User: "ada", Require: []string{"*"}})
			l.add(mainLane, nil, pinned)
		}, signed: 2, unsigned: 3, findings: []string{"4 not signed", "5 not signed"}},
		"unknown key": {do: func(l *keyedLog) { l.add(mainLane, eve, pinned) }, signed: 1, unsigned: 1, findings: []string{"3 unknown key"}, says: "eve+"},
		"key of another": {do: func(l *keyedLog) {
			l.grant(ada, bert, "operator")
			e := l.sign(l.decision(mainLane, pinned), eve)
			e.Signature = strings.Replace(e.Signature, eve.Key(), bert.Key(), 1)
			l.append(e)
		}, signed: 2, unsigned: 1, findings: []string{"4 wrong signature"}, says: "forged"},
		"malformed": {do: func(l *keyedLog) {
			e := l.decision(mainLane, pinned)
			e.Signature = "ada"
			l.append(e)
		}, signed: 1, unsigned: 1, findings: []string{"3 malformed signature"}},
		"body": {do: func(l *keyedLog) {
			e := l.sign(l.decision(mainLane, pinned), ada)
			e.Data = []byte(`{"checkpoint":"step-2.a1"}`)
			l.append(e)
		}, signed: 1, unsigned: 1, findings: []string{"3 wrong signature"}},
		"ID": {do: func(l *keyedLog) {
			e := l.sign(l.decision(mainLane, pinned), ada)
			e.ID += "x"
			l.append(e)
		}, signed: 1, unsigned: 1, findings: []string{"3 wrong signature"}},
		"kind": {do: func(l *keyedLog) {
			e := l.sign(l.decision(mainLane, pinned), ada)
			e.Kind = "checkpoint.unpinned"
			l.append(e)
		}, signed: 1, unsigned: 1, findings: []string{"3 wrong signature"}},
		"version": {do: func(l *keyedLog) {
			e := l.sign(l.decision(mainLane, pinned), ada)
			e.Version = 2
			l.append(e)
		}, signed: 1, unsigned: 1, findings: []string{"3 wrong signature"}},
		"time": {do: func(l *keyedLog) {
			e := l.sign(l.decision(mainLane, pinned), ada)
			e.Time = e.Time.Add(time.Nanosecond)
			l.append(e)
		}, signed: 1, unsigned: 1, findings: []string{"3 wrong signature"}},
		"source": {do: func(l *keyedLog) {
			e := l.sign(l.decision(mainLane, pinned), ada)
			e.Source = "other"
			l.append(e)
		}, signed: 1, unsigned: 1, findings: []string{"3 wrong signature"}},
		"principal": {do: func(l *keyedLog) { // that is the word of the owner, not of the signer
			e := l.sign(l.decision(mainLane, pinned), ada)
			e.Principal = "user:ada"
			l.append(e)
		}, signed: 2, unsigned: 1},
		"another store": {do: func(l *keyedLog) {
			e := l.decision(mainLane, pinned)
			e.Signature, _ = ada.Sign("0192f0c1-0000-7000-8000-00000000000f", e, 0)
			l.append(e)
		}, signed: 1, unsigned: 1, findings: []string{"3 wrong signature"}},
		"replayed": {do: func(l *keyedLog) {
			e := l.sign(l.decision(mainLane, pinned), ada)
			l.append(e)
			l.add(mainLane, ada, events.CheckpointUnpinned{Checkpoint: "step-1.a1"})
			l.append(e)
		}, signed: 3, unsigned: 1, findings: []string{"5 replayed"}, says: "for the place after event 0 of its lane, and follows event 4: it was replayed, or moved; event 3 has the same signature"},
		"replayed in another trial": {do: func(l *keyedLog) {
			e := l.sign(l.decision(mainLane, pinned), ada)
			l.append(e)
			e.Scope.Trial = "other"
			l.append(e)
		}, signed: 2, unsigned: 1, findings: []string{"4 wrong signature"}, says: "event 3 has the same signature"},
		"replayed in another run": {do: func(l *keyedLog) {
			e := l.sign(l.decision(mainLane, pinned), ada)
			l.append(e)
			e.Scope.Run = "other"
			l.append(e)
		}, signed: 2, unsigned: 1, findings: []string{"4 wrong signature"}},
		"signed, and another came first": {do: func(l *keyedLog) { // such as before a kill
			e := l.sign(l.decision(mainLane, pinned), ada)
			l.add(mainLane, ada, events.CheckpointUnpinned{Checkpoint: "step-1.a1"})
			l.append(e)
		}, signed: 2, unsigned: 1, findings: []string{"4 replayed"}},
		"one between was removed": {do: func(l *keyedLog) {
			l.add(mainLane, ada, pinned)
			l.add(mainLane, ada, pinned)
			l.log[2].Kind, l.log[2].Scope = "report.metrics", events.Scope{Run: "bert", Trial: "main", Actor: events.Rank(0)}
		}, signed: 1, unsigned: 1, findings: []string{"4 replayed"}},
		"revoked": {do: func(l *keyedLog) {
			l.grant(ada, bert, "operator")
			l.add(mainLane, bert, pinned)
			l.revoke(ada, bert.Key())
			l.add(mainLane, bert, pinned)
		}, signed: 4, unsigned: 1, findings: []string{"6 revoked key"}, says: "which event 5 has revoked"},
		"rotated": {do: func(l *keyedLog) {
			l.grant(ada, bert, "operator")
			l.add(mainLane, bert, pinned)
			l.grant(ada, bert2, "operator")
			l.add(mainLane, bert, pinned) // they overlap
			l.add(mainLane, bert2, pinned)
			l.revoke(ada, bert.Key())
			l.add(mainLane, bert2, pinned)
		}, signed: 8, unsigned: 1},
		"rotated admin": {do: func(l *keyedLog) {
			l.grant(ada, bert, "admin")
			l.revoke(bert, ada.Key())
			l.grant(ada, eve, "admin")
			l.add(mainLane, bert, pinned)
		}, signed: 4, unsigned: 1, findings: []string{"5 revoked key"}},
		"expired": {do: func(l *keyedLog) {
			l.grant(ada, bert, "operator", func(b *events.AccessGranted) { b.Expires = began.Add(5 * time.Minute).Format(time.RFC3339) })
			l.add(mainLane, bert, pinned)
			l.add(mainLane, bert, pinned)
		}, signed: 3, unsigned: 1, findings: []string{"5 expired key"}},
		"other runs": {do: func(l *keyedLog) {
			l.grant(ada, bert, "operator", func(b *events.AccessGranted) { b.Runs = []string{"b*"} })
			l.add(mainLane, bert, pinned)
			l.add(events.Aggregate{Run: "gpt", Trial: "main"}, bert, pinned)
		}, signed: 3, unsigned: 1, findings: []string{"5 not granted"}},
		"a reader": {do: func(l *keyedLog) {
			l.grant(ada, bert, "reader")
			l.add(mainLane, bert, pinned)
		}, signed: 2, unsigned: 1, findings: []string{"4 not granted"}},
		"granted by an operator": {do: func(l *keyedLog) {
			l.grant(ada, bert, "operator")
			l.grant(bert, eve, "operator")
			l.add(mainLane, eve, pinned)
		}, signed: 2, unsigned: 1, findings: []string{"4 not granted", "5 unknown key"}},
		"granted without a signature": {do: func(l *keyedLog) {
			l.grant(nil, eve, "admin")
			l.add(mainLane, eve, pinned)
		}, signed: 1, unsigned: 2, findings: []string{"3 not signed", "4 unknown key"}, says: "eve"},
		"granted by itself": {do: func(l *keyedLog) {
			l.grant(eve, eve, "admin")
		}, signed: 1, unsigned: 1, findings: []string{"3 unknown key"}},
		"granted under another name": {do: func(l *keyedLog) {
			l.grant(ada, eve, "operator", func(b *events.AccessGranted) { b.User = "bert" })
		}, signed: 2, unsigned: 1, findings: []string{"3 signed"}, says: "no effect"},
		"revoked without a signature": {do: func(l *keyedLog) {
			l.grant(ada, bert, "operator")
			l.revoke(nil, bert.Key())
			l.add(mainLane, bert, pinned)
		}, signed: 3, unsigned: 2, findings: []string{"4 not signed"}},
		"replayed grant": {do: func(l *keyedLog) {
			l.grant(ada, bert, "operator")
			l.revoke(ada, bert.Key())
			l.append(l.log[2].Event)
			l.add(mainLane, bert, pinned)
		}, signed: 3, unsigned: 1, findings: []string{"5 replayed", "6 revoked key"}},
		"granted again": {do: func(l *keyedLog) {
			l.grant(ada, bert, "operator")
			l.revoke(ada, bert.Key())
			l.grant(ada, bert, "operator")
			l.add(mainLane, bert, pinned)
		}, signed: 5, unsigned: 1},
		"not an event about keys": {do: func(l *keyedLog) {
			l.append(events.Event{ID: "x", Kind: "checkpoint.pinned", Version: 1, Time: began, Scope: events.Scope{Trial: events.Keys, Actor: events.Server}, Data: []byte(`{"checkpoint":"a"}`)})
			l.grant(ada, bert, "operator")
			l.add(mainLane, bert, pinned)
		}, signed: 3, unsigned: 2},
		"the verifier's key": {do: func(l *keyedLog) { l.add(mainLane, ada, pinned) }, policy: audit.Policy{Signers: []string{ada.Public()}}, signed: 2, unsigned: 1},
		"the key of a forger": {do: func(l *keyedLog) {
			l.grant(bert, bert, "admin")
			l.add(mainLane, bert, pinned)
			l.add(mainLane, ada, pinned)
		}, policy: audit.Policy{Signers: []string{bert.Public()}}, signed: 2, unsigned: 1, findings: []string{"2 unknown key", "5 unknown key"}},
	} {
		t.Run(name, func(t *testing.T) {
			l := newKeyedLog(t)
			l.grant(ada, ada, "admin")
			test.do(l)
			r := l.report(test.policy)
			if got := states(r); !slices.Equal(got, append([]string{}, test.findings...)) || r.Signed != test.signed || r.Unsigned != test.unsigned {
				t.Errorf("findings %q of %d signed and %d unsigned decisions, want %q, %d and %d:\n%+v", got, r.Signed, r.Unsigned, test.findings, test.signed, test.unsigned, r.Findings)
			}
			if n := len(r.Findings); test.says != "" && (n == 0 || !strings.Contains(r.Findings[n-1].Problem, test.says)) {
				t.Errorf("findings %+v, want %q", r.Findings, test.says)
			}
			if roots := map[bool]string{true: "policy", false: "log"}[test.policy.Signers != nil]; r.Roots != roots {
				t.Errorf("the keys are those of the %s, want %s", r.Roots, roots)
			}
		})
	}
}

// TestFirstKey: the first key of a store is an admin's, and signs its own grant.
func TestFirstKey(t *testing.T) {
	ada, eve := newSigner(t, "ada", 1), newSigner(t, "eve", 3)
	l := newKeyedLog(t)
	l.grant(ada, ada, "operator")
	l.grant(nil, ada, "admin")
	l.grant(eve, ada, "admin")
	l.grant(ada, ada, "admin")
	l.grant(eve, eve, "admin")
	if got, want := states(l.report(audit.Policy{})), []string{"2 signed", "3 not signed", "4 unknown key", "6 unknown key"}; !slices.Equal(got, want) {
		t.Errorf("findings %q, want %q", got, want)
	}
}

// TestSignaturesAgree: a decision that a ring of all earlier decisions accepts has no
// finding, and a decision that it does not accept has one, whatever deciders do.
func TestSignaturesAgree(t *testing.T) {
	signers := []*audit.Signer{nil, newSigner(t, "ada", 1), newSigner(t, "bert", 2), newSigner(t, "eve", 3)}
	rapid.Check(t, func(rt *rapid.T) {
		l := newKeyedLog(t)
		ring := audit.NewRing(thisStore, nil, nil)
		check := audit.NewSignatures("", audit.Policy{})
		check.Event(l.log[0])
		for range rapid.IntRange(1, 20).Draw(rt, "decisions") {
			by := rapid.SampledFrom(signers).Draw(rt, "by")
			agg := rapid.SampledFrom([]events.Aggregate{keysLane, mainLane}).Draw(rt, "lane")
			after := l.lanes[agg]
			var body events.Body = events.CheckpointPinned{Checkpoint: "step-1.a1"}
			if agg == keysLane {
				to := rapid.SampledFrom(signers[1:]).Draw(rt, "to")
				body = rapid.SampledFrom([]events.Body{
					events.AccessGranted{User: to.Name(), Role: "admin", Key: to.Public()},
					events.AccessGranted{User: to.Name(), Role: "operator", Key: to.Public()},
					events.AccessRevoked{User: to.Name(), Keys: []string{to.Key()}},
					events.AccessGranted{Role: "admin", Require: []string{"b*"}},
				}).Draw(rt, "body")
			}
			l.add(agg, by, body)
			e := l.log[len(l.log)-1]
			var v audit.Verdict
			if agg == keysLane {
				v = ring.Accepts(e.Event, after, e.Stored)
				if folded := ring.Fold(e, after); folded.Problem != v.Problem {
					rt.Fatalf("event %d is accepted with %q, and folded with %q", e.Sequence, v.Problem, folded.Problem)
				}
			} else {
				v = ring.Judge(e.Event, after, e.Stored)
			}
			got, ok := check.Event(e)
			if got.Problem, v.Problem = first(got.Problem), first(v.Problem); !ok || got.State != v.State || got.Problem != v.Problem {
				rt.Fatalf("event %d is %+v, and the check finds %+v", e.Sequence, v, got)
			}
		}
	})
}

// first returns a problem without what the check of a log adds.
func first(problem string) string {
	problem, _, _ = strings.Cut(problem, "; event ")
	return problem
}

// TestPolicySigners parses the lines of a policy about signatures.
func TestPolicySigners(t *testing.T) {
	ada := newSigner(t, "ada", 1)
	p, err := audit.ParsePolicy("# keys\nsigner " + ada.Public() + " # of ada\nsigned bert*\nsigned gpt\nquorum none\n")
	if err != nil || !slices.Equal(p.Signers, []string{ada.Public()}) || !slices.Equal(p.Signed, []string{"bert*", "gpt"}) || !p.WantsSignatures() {
		t.Errorf("%+v, %v", p, err)
	}
	for _, bad := range []string{"signer\n", "signer ada\n", "signed\n", "signed [\n", "signed a b\n"} {
		if _, err := audit.ParsePolicy(bad + "quorum none\n"); err == nil {
			t.Errorf("%q is a policy", bad)
		}
	}
}
