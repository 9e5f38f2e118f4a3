package signing_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/audit"
	"github.com/ckptstore/ckptstore/internal/audit/ledger"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/signing"
)

const (
	thisStore  = "0192f0c1-2a3b-7c4d-8e5f-60718293a4b5"
	otherStore = "0192f0c1-2a3b-7c4d-8e5f-60718293a4b6"
)

var keysLane = events.Aggregate{Trial: events.Keys}

// newSigner makes a key in a file, which is the second result.
func newSigner(t *testing.T, name string) (*audit.Signer, string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "key")
	if _, err := ledger.NewKey(file, name); err != nil {
		t.Fatal(err)
	}
	s, err := ledger.ReadSigner("", file)
	if err != nil {
		t.Fatal(err)
	}
	return s, file
}

// keyedLog is a log with decisions about keys. Nothing guards it.
type keyedLog struct {
	*jetlog.Log
	n int // events made
}

// newLog returns the log of thisStore, which grants ada the key of an admin.
func newLog(t *testing.T, ada *audit.Signer) *keyedLog {
	t.Helper()
	server, err := jetlog.StartServer(t.Context(), jetlog.ServerOptions{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Shutdown)
	log, err := jetlog.Connect(t.Context(), jetlog.Options{Dial: func(context.Context) (net.Conn, error) { return server.Dial() }})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(log.Close)
	l := &keyedLog{Log: log}
	if err := log.Create(t.Context(), l.decision(t, events.Aggregate{}, events.StoreCreated{Store: thisStore, Format: 1, Data: "data"})); err != nil {
		t.Fatal(err)
	}
	l.decide(t, ada, grant("admin", ada))
	return l
}

func grant(role string, key *audit.Signer) events.AccessGranted {
	return events.AccessGranted{User: key.Name(), Role: role, Key: key.Public()}
}

func (l *keyedLog) decision(t *testing.T, lane events.Aggregate, body events.Body) events.Decision {
	t.Helper()
	l.n++
	d, err := events.NewDecision(events.Stamp{ID: fmt.Sprint("id-", l.n), Source: "test", Time: time.Now()}, lane, body)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// decide appends a decision about keys.
func (l *keyedLog) decide(t *testing.T, by *audit.Signer, body events.Body) {
	t.Helper()
	end, err := l.LaneEnd(t.Context(), keysLane)
	if err != nil {
		t.Fatal(err)
	}
	d := l.decision(t, keysLane, body)
	d.Signature = signed(t, by, thisStore, d.Event, end)
	if _, err := l.Decide(t.Context(), d, end); err != nil {
		t.Fatal(err)
	}
}

func signed(t *testing.T, by *audit.Signer, store string, e events.Event, after uint64) string {
	t.Helper()
	header, err := by.Sign(store, e, after)
	if err != nil {
		t.Fatal(err)
	}
	return header
}

func denied(err error) bool { return slices.Contains(problem.Kinds(err), problem.Denied) }

// TestAdmit: a gate admits a decision with the signature of a granted key, and refuses it if any part of
// it differs from what was signed, or if the key may not sign it.
func TestAdmit(t *testing.T) {
	ada, _ := newSigner(t, "ada")
	bert, _ := newSigner(t, "bert")
	revoked, _ := newSigner(t, "revoked")
	expired, _ := newSigner(t, "expired")
	reader, _ := newSigner(t, "reader")
	eve, _ := newSigner(t, "eve")
	l := newLog(t, ada)
	operator := grant("operator", bert)
	operator.Runs, operator.Require = []string{"gpt.*"}, []string{"gpt.large"}
	l.decide(t, ada, operator)
	l.decide(t, ada, grant("operator", revoked))
	l.decide(t, ada, events.AccessRevoked{User: "revoked", Keys: []string{revoked.Key()}})
	past := grant("operator", expired)
	past.Expires = "2001-01-01T00:00:00Z"
	l.decide(t, ada, past)
	l.decide(t, ada, grant("reader", reader))

	const after = 41
	type made struct {
		by    *audit.Signer // nil: not signed
		store string        // for which it is signed
		lane  events.Aggregate
		edit  func(*events.Event) // after it is signed
		after uint64              // where it is appended
	}
	small, large := events.Aggregate{Run: "gpt.small", Trial: "main"}, events.Aggregate{Run: "gpt.large", Trial: "main"}
	good := made{by: bert, store: thisStore, lane: small, after: after}
	with := func(change func(*made)) made {
		m := good
		change(&m)
		return m
	}
	edited := func(edit func(*events.Event)) made { return with(func(m *made) { m.edit = edit }) }
	const forged = "forged, or that of another event"
	for _, c := range []struct {
		name string
		made made
		want string // in the refusal; "": admitted
	}{
		{"good", good, ""},
		{"of an admin", with(func(m *made) { m.by = ada }), ""},
		{"of a run that needs a signature", with(func(m *made) { m.lane = large }), ""},
		{"unsigned, where that is allowed", with(func(m *made) { m.by = nil }), ""},
		{"unsigned, where it is not", with(func(m *made) { m.by, m.lane = nil, large }), "is not signed"},

		{"another id", edited(func(e *events.Event) { e.ID += "x" }), forged},
		{"another source", edited(func(e *events.Event) { e.Source = "other" }), forged},
		{"another time", edited(func(e *events.Event) { e.Time = e.Time.Add(time.Second) }), forged},
		{"another version", edited(func(e *events.Event) { e.Version++ }), forged},
		{"another kind", edited(func(e *events.Event) { e.Kind = "checkpoint.unpinned" }), forged},
		{"another body", edited(func(e *events.Event) { e.Data = json.RawMessage(`{"checkpoint":"step-300.a1"}`) }), forged},
		{"another run", edited(func(e *events.Event) { e.Scope.Run = "gpt.other" }), forged},
		{"another trial", edited(func(e *events.Event) { e.Scope.Trial = "t01" }), forged},
		{"another actor", edited(func(e *events.Event) { e.Scope.Actor = events.Rank(3) }), forged},
		{"another store", with(func(m *made) { m.store = otherStore }), forged},
		{"an earlier place", with(func(m *made) { m.after = after - 1 }), "replayed, or moved"},
		{"a later place", with(func(m *made) { m.after = after + 1 }), "replayed, or moved"},
		{"the key of another", edited(func(e *events.Event) { e.Signature = strings.Replace(e.Signature, bert.Key(), ada.Key(), 1) }), forged},
		{"a place that the signer did not sign", with(func(m *made) {
			m.after, m.edit = after+1, func(e *events.Event) { e.Signature = strings.Replace(e.Signature, " 41 ", " 42 ", 1) }
		}), forged},
		{"malformed", edited(func(e *events.Event) { e.Signature = e.Signature[:20] }), "malformed"},

		{"unknown key", with(func(m *made) { m.by = eve }), "no admin has granted"},
		{"revoked key", with(func(m *made) { m.by = revoked }), "has revoked"},
		{"expired key", with(func(m *made) { m.by = expired }), "expired at 2001-01-01"},
		{"the key of a reader", with(func(m *made) { m.by = reader }), "may not sign it"},
		{"a run of others", with(func(m *made) { m.lane = events.Aggregate{Run: "bert", Trial: "main"} }), "may not sign it"},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := l.decision(t, c.made.lane, events.CheckpointPinned{Checkpoint: "step-200.a1"}).Event
			if c.made.by != nil {
				e.Signature = signed(t, c.made.by, c.made.store, e, after)
			}
			if c.made.edit != nil {
				c.made.edit(&e)
			}
			for _, store := range []string{thisStore, ""} { // "": read from the log
				err := signing.NewGate(store, nil).Admit(t.Context(), l.Log, e, c.made.after)
				switch {
				case c.want == "" && err != nil:
					t.Errorf("store %q: %v", store, err)
				case c.want != "" && (!denied(err) || !strings.Contains(err.Error(), c.want)):
					t.Errorf("store %q: %v, want an error of the kind %v with %q", store, err, problem.Denied, c.want)
				}
			}
		})
	}
	e := l.decision(t, large, events.CheckpointPinned{Checkpoint: "a"}).Event
	var none *signing.Gate
	if err := none.Admit(t.Context(), l.Log, e, 0); err != nil {
		t.Errorf("without a gate: %v", err)
	}
}

// TestSign: a process with a granted key signs what it may decide. It leaves out the signature of a key
// that is unknown where none is required.
func TestSign(t *testing.T) {
	ada, _ := newSigner(t, "ada")
	bert, _ := newSigner(t, "bert")
	eve, _ := newSigner(t, "eve")
	l := newLog(t, ada)
	operator := grant("operator", bert)
	operator.Require = []string{"gpt.large"}
	l.decide(t, ada, operator)
	for _, c := range []struct {
		name   string
		signer *audit.Signer
		run    string
		signed bool
		denied bool
	}{
		{"a granted key", bert, "gpt.large", true, false},
		{"a granted key where none is required", bert, "gpt.small", true, false},
		{"an unknown key", eve, "gpt.large", false, true},
		{"an unknown key where none is required", eve, "gpt.small", false, false},
		{"no key", nil, "gpt.large", false, true},
		{"no key where none is required", nil, "gpt.small", false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := signing.NewGate("", c.signer)
			e := l.decision(t, events.Aggregate{Run: c.run, Trial: "main"}, events.CheckpointPinned{Checkpoint: "a"}).Event
			var err error
			e.Signature, err = g.Sign(t.Context(), l.Log, e, 7)
			if denied(err) != c.denied || err != nil && !c.denied {
				t.Fatal(err)
			}
			if c.denied {
				return
			}
			if (e.Signature != "") != c.signed {
				t.Errorf("signature %q", e.Signature)
			}
			if err := signing.NewGate(thisStore, nil).Admit(t.Context(), l.Log, e, 7); err != nil {
				t.Errorf("another process refuses it: %v", err)
			}
		})
	}
	var none *signing.Gate
	if header, err := none.Sign(t.Context(), l.Log, events.Event{}, 0); header != "" || err != nil || none.Signer() != nil {
		t.Errorf("without a gate: %q, %v", header, err)
	}
}

// TestKeysChange: a gate takes the decisions of a key as soon as it is granted, and refuses them
// after its revocation without being told.
func TestKeysChange(t *testing.T) {
	ada, _ := newSigner(t, "ada")
	bert, _ := newSigner(t, "bert")
	l := newLog(t, ada)
	e := l.decision(t, events.Aggregate{Run: "r", Trial: "main"}, events.CheckpointPinned{Checkpoint: "a"}).Event
	e.Signature = signed(t, bert, thisStore, e, 0)
	g := signing.NewGate("", nil)
	if err := g.Admit(t.Context(), l.Log, e, 0); !denied(err) {
		t.Fatalf("before the grant: %v", err)
	}
	l.decide(t, ada, grant("operator", bert))
	if err := g.Admit(t.Context(), l.Log, e, 0); err != nil {
		t.Fatalf("after the grant: %v", err)
	}
	l.decide(t, ada, events.AccessRevoked{User: "bert", Keys: []string{bert.Key()}})
	late := time.After(time.Minute)
	for err := error(nil); !denied(err); {
		if err = g.Admit(t.Context(), l.Log, e, 0); err != nil && !denied(err) {
			t.Fatal(err)
		}
		select {
		case <-late:
			t.Fatal("the revoked key is taken for a minute")
		case <-time.After(10 * time.Millisecond):
		}
	}
	k, err := signing.ReadKeys(t.Context(), l.Log)
	if err != nil || len(k.Grants) != 2 || k.Grants[0].Until != 0 || k.Grants[1].Key != bert.Key() || k.Grants[1].Until == 0 || k.Require == nil {
		t.Errorf("%+v, %v", k, err)
	}
}

// TestDecisionsAboutKeys: only an admin decides about keys.
func TestDecisionsAboutKeys(t *testing.T) {
	ada, _ := newSigner(t, "ada")
	bert, _ := newSigner(t, "bert")
	eve, _ := newSigner(t, "eve")
	l := newLog(t, ada)
	l.decide(t, ada, grant("operator", bert))
	for _, c := range []struct {
		by   *audit.Signer
		want bool
	}{{ada, true}, {bert, false}, {eve, false}, {nil, false}} {
		d := l.decision(t, keysLane, grant("operator", eve))
		end, err := l.LaneEnd(t.Context(), keysLane)
		if err != nil {
			t.Fatal(err)
		}
		_, err = signing.NewGate(thisStore, c.by).Sign(t.Context(), l.Log, d.Event, end)
		if (err == nil) != c.want || err != nil && !denied(err) {
			t.Errorf("signer %v: %v", c.by, err)
		}
	}
}

// TestMayDecide: the last key of an admin that does not expire stays.
func TestMayDecide(t *testing.T) {
	ada, _ := newSigner(t, "ada")
	bert, _ := newSigner(t, "bert")
	admin := func(s *audit.Signer) audit.Grant { return audit.Grant{Key: s.Key(), Role: audit.RoleAdmin} }
	brief := admin(bert)
	brief.Expires = time.Now().Add(time.Hour)
	ended := admin(bert)
	ended.Until = 7
	revokes := func(s *audit.Signer) events.Body { return &events.AccessRevoked{Keys: []string{s.Key()}} }
	grants := func(role string, s *audit.Signer) events.Body {
		b := grant(role, s)
		return &b
	}
	for _, c := range []struct {
		name   string
		grants []audit.Grant
		body   events.Body
		last   bool
	}{
		{"the only admin is revoked", []audit.Grant{admin(ada)}, revokes(ada), true},
		{"the only admin becomes an operator", []audit.Grant{admin(ada)}, grants("operator", ada), true},
		{"one of two admins is revoked", []audit.Grant{admin(ada), admin(bert)}, revokes(ada), false},
		{"the other admin's key expires", []audit.Grant{admin(ada), brief}, revokes(ada), true},
		{"the other admin's key is revoked", []audit.Grant{admin(ada), ended}, revokes(ada), true},
		{"an operator is granted", []audit.Grant{admin(ada)}, grants("operator", bert), false},
		{"an admin is granted", []audit.Grant{admin(ada)}, grants("admin", bert), false},
		{"the first key", nil, grants("admin", ada), false},
		{"a revocation without keys", nil, revokes(ada), true},
	} {
		if err := (signing.Keys{Grants: c.grants}).MayDecide(c.body); errors.Is(err, signing.ErrLastAdmin) != c.last || err != nil && !c.last {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

// TestFromEnv: the environment names a file outside the store.
func TestFromEnv(t *testing.T) {
	ada, file := newSigner(t, "ada")
	t.Setenv(signing.EnvKey, "")
	if s, err := signing.FromEnv(t.TempDir()); s != nil || err != nil {
		t.Errorf("without a file: %v, %v", s, err)
	}
	t.Setenv(signing.EnvKey, file)
	for _, dir := range []string{"", t.TempDir(), filepath.Join(t.TempDir(), "missing")} {
		if s, err := signing.FromEnv(dir); err != nil || s.Key() != ada.Key() {
			t.Errorf("store %q: %v, %v", dir, s, err)
		}
	}
	if s, err := signing.FromEnv(filepath.Dir(file)); err == nil || !strings.Contains(err.Error(), signing.EnvKey) {
		t.Errorf("the key is in the store: %v, %v", s, err)
	}
	t.Setenv(signing.EnvKey, file+"x")
	if s, err := signing.FromEnv(""); err == nil {
		t.Errorf("no such file: %v", s)
	}
}
