package audit

import (
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	"golang.org/x/mod/sumdb/note"

	"github.com/ckptstore/ckptstore/events"
)

// Roles of keys. A key of another role signs nothing.
const (
	RoleOperator = "operator" // signs decisions of its runs, and of the store
	RoleAdmin    = "admin"    // and about keys
)

// Grant is a key that the log grants to a user.
type Grant struct {
	Key     string    `json:"key"`    // NAME+HASH
	Public  string    `json:"public"` // verifier key
	User    string    `json:"user"`
	Role    string    `json:"role"`
	Runs    []string  `json:"runs"`             // patterns of [path.Match]; none: all
	Since   uint64    `json:"since"`            // sequence of access.granted
	Until   uint64    `json:"until,omitempty"`  // sequence of access.revoked; 0: it signs
	Expires time.Time `json:"expires,omitzero"` // zero: never
	verify  note.Verifier
}

// Ring has the keys that a log grants, as of an event: a fold of the lane of
// [events.Keys]. Each change must be signed by the key of an admin. The first grant is
// signed with the key that it grants, which is an admin's: a verifier that does not know
// this key has only the word of the log for it.
type Ring struct {
	store   string
	roots   []string // verifier keys of admins, from outside of the log; none: the first grant counts
	always  []string // patterns of runs whose decisions the verifier wants signed
	require []string // the same, by the log
	grants  []*Grant // in order
}

// NewRing returns the ring of an empty log of a store. Roots are the keys of admins that
// the verifier trusts; without, the first key of the log counts. Always are patterns of
// runs whose decisions must be signed, whether the log requires it or not.
func NewRing(store string, roots, always []string) *Ring {
	return &Ring{store: store, roots: roots, always: always}
}

// Grants returns the keys, also the revoked ones, in the order of their grants.
func (r *Ring) Grants() []Grant {
	list := make([]Grant, 0, len(r.grants))
	for _, g := range r.grants {
		list = append(list, *g)
	}
	return list
}

// Required returns the patterns of runs whose decisions the log requires to be signed.
func (r *Ring) Required() []string { return slices.Clone(r.require) }

// Requires returns the pattern by which decisions of a run must be signed, "" if none.
func (r *Ring) Requires(run string) string {
	if run == events.None {
		return ""
	}
	for _, list := range [][]string{r.always, r.require} {
		if p := matching(list, run); p != "" {
			return p
		}
	}
	return ""
}

// matching returns the first pattern that a run matches, "" without one. A run's name is no path: a
// star stands for slashes too.
func matching(patterns []string, run string) string {
	flat := func(s string) string { return strings.ReplaceAll(s, "/", "\x00") }
	run = flat(run)
	for _, p := range patterns {
		if ok, err := path.Match(flat(p), run); ok && err == nil {
			return p
		}
	}
	return ""
}

// find returns the newest grant of a key, nil without one.
func (r *Ring) find(key string) *Grant {
	for _, g := range slices.Backward(r.grants) {
		if g.Key == key {
			return g
		}
	}
	return nil
}

// State is the outcome of the check of one signature.
type State string

// The states of signatures.
const (
	Unsigned       State = "not signed"
	Signed         State = "signed"
	Malformed      State = "malformed signature"
	UnknownKey     State = "unknown key"
	WrongSignature State = "wrong signature"
	Replayed       State = "replayed"
	RevokedKey     State = "revoked key"
	ExpiredKey     State = "expired key"
	NotGranted     State = "not granted"
)

// Verdict is the outcome of the check of one decision.
type Verdict struct {
	State   State  `json:"state"`
	Key     string `json:"key,omitempty"`     // NAME+HASH, as the signature names it
	User    string `json:"user,omitempty"`    // to whom the log granted the key
	Problem string `json:"problem,omitempty"` // what is wrong, in words; empty: nothing
}

// Judge checks the signature of a decision that follows another in its lane, by the keys
// of the ring, and was stored at a time.
func (r *Ring) Judge(e events.Event, after uint64, stored time.Time) Verdict {
	if e.Signature == "" {
		v := Verdict{State: Unsigned}
		if p := r.Requires(e.Scope.Run); p != "" {
			v.Problem = fmt.Sprintf("%s of run %q is not signed, and decisions of runs %q must be", e.Kind, e.Scope.Run, p)
		}
		return v
	}
	s, err := ParseSignature(e.Signature)
	if err != nil {
		return Verdict{State: Malformed, Problem: fmt.Sprintf("the signature of %s is malformed: %v", e.Kind, err)}
	}
	v := Verdict{Key: s.Key}
	bad := func(state State, format string, args ...any) Verdict {
		v.State, v.Problem = state, fmt.Sprintf(format, args...)
		return v
	}
	g := r.find(s.Key)
	if g == nil {
		return bad(UnknownKey, "%s is signed with the key %s, which no admin has granted before", e.Kind, s.Key)
	}
	v.User = g.User
	switch {
	case !g.verify.Verify(SignedText(r.store, e, s.After), s.bytes):
		return bad(WrongSignature, "the signature of %s is not one of the key %s for this event: it is forged, or that of another event", e.Kind, s.Key)
	case s.After != after:
		return bad(Replayed, "%s is signed by %s for the place after event %d of its lane, and follows event %d: it was replayed, or moved", e.Kind, s.Key, s.After, after)
	case g.Until > 0:
		return bad(RevokedKey, "%s is signed with the key %s, which event %d has revoked", e.Kind, s.Key, g.Until)
	case !g.Expires.IsZero() && !stored.Before(g.Expires):
		return bad(ExpiredKey, "%s is signed with the key %s, which expired at %s", e.Kind, s.Key, g.Expires.Format(time.RFC3339))
	case g.Role != RoleOperator && g.Role != RoleAdmin,
		e.Scope.Run != events.None && len(g.Runs) > 0 && matching(g.Runs, e.Scope.Run) == "":
		return bad(NotGranted, "%s of run %q is signed with the key %s, which may not sign it: it is granted for %s", e.Kind, e.Scope.Run, s.Key, g.words())
	}
	v.State = Signed
	return v
}

// words describes what a key may sign.
func (g *Grant) words() string {
	text := "the role " + g.Role
	if len(g.Runs) > 0 {
		text += fmt.Sprintf(" and the runs %q", g.Runs)
	}
	return text
}

// Accepts checks a decision of the lane of [events.Keys] that follows another in it.
// Problem is empty if it counts.
func (r *Ring) Accepts(e events.Event, after uint64, stored time.Time) Verdict {
	body, err := e.Body()
	if err != nil {
		return Verdict{State: Unsigned, Problem: fmt.Sprintf("%s about keys has no effect: %v", e.Kind, err)}
	}
	none := func(v Verdict, format string, args ...any) Verdict {
		if v.Problem == "" {
			v.Problem = fmt.Sprintf("%s about keys has no effect: ", e.Kind) + fmt.Sprintf(format, args...)
		}
		return v
	}
	judge := r
	switch b := body.(type) {
	case *events.AccessGranted:
		g, err := grantOf(b)
		if err != nil {
			return none(r.Judge(e, after, stored), "%v", err)
		}
		if g != nil {
			if had := r.find(g.Key); had != nil && !sameKey(had.Public, g.Public) {
				return none(r.Judge(e, after, stored), "another key is named %s", g.Key)
			}
			if r.find(g.Key) == nil && (r.roots == nil && len(r.grants) == 0 || r.root(g)) {
				// Only the holder of the key can grant it first. Later it is a key like others, which may
				// have been revoked.
				judge = &Ring{store: r.store, grants: []*Grant{g}}
				if g.Role != RoleAdmin {
					return none(judge.Judge(e, after, stored), "the first key of a store is that of an admin")
				}
			}
		}
		if p := badPattern(slices.Concat(b.Runs, b.Require)); p != "" {
			return none(judge.Judge(e, after, stored), "%s is no pattern of runs", p)
		}
	case *events.AccessRevoked:
		for _, key := range b.Keys {
			if r.find(key) == nil {
				return none(r.Judge(e, after, stored), "no key %s was granted", key)
			}
		}
	default:
		return Verdict{State: Unsigned}
	}
	v := judge.Judge(e, after, stored)
	switch g := judge.find(v.Key); {
	case v.Problem != "":
		v.Problem = fmt.Sprintf("%s about keys has no effect: ", e.Kind) + v.Problem
	case v.State == Unsigned:
		return none(v, "it is not signed, and only admins decide about keys")
	case g == nil || g.Role != RoleAdmin:
		v.State = NotGranted
		return none(v, "it is signed with the key %s, which is no admin's", v.Key)
	}
	return v
}

// root reports whether the verifier trusts a key.
func (r *Ring) root(g *Grant) bool {
	return slices.ContainsFunc(r.roots, func(key string) bool { return sameKey(key, g.Public) })
}

// sameKey compares verifier keys, which may be written in more than one way.
func sameKey(a, b string) bool {
	name, _, _ := strings.Cut(a, "+")
	other, _, _ := strings.Cut(b, "+")
	return name == other && publicKey(a) == publicKey(b)
}

func badPattern(patterns []string) string {
	for _, p := range patterns {
		if _, err := path.Match(p, ""); err != nil || p == "" {
			return fmt.Sprintf("%q", p)
		}
	}
	return ""
}

// grantOf returns the key that a decision grants, nil if it grants none.
func grantOf(b *events.AccessGranted) (*Grant, error) {
	if b.Key == "" {
		return nil, nil
	}
	v, err := note.NewVerifier(b.Key)
	if err != nil {
		return nil, fmt.Errorf("%q is no key", b.Key)
	}
	if v.Name() != b.User {
		return nil, fmt.Errorf("the key is of %q, and the grant of %q", v.Name(), b.User)
	}
	g := &Grant{Key: keyID(v.Name(), v.KeyHash()), Public: b.Key, User: b.User, Role: b.Role, Runs: append([]string{}, b.Runs...), verify: v}
	if b.Expires != "" {
		if g.Expires, err = time.Parse(time.RFC3339, b.Expires); err != nil {
			return nil, fmt.Errorf("%q is no time at which the key expires", b.Expires)
		}
	}
	return g, nil
}

// Fold applies a decision of the lane of [events.Keys] that follows another in it. One
// whose verdict has a problem has no effect.
func (r *Ring) Fold(e events.Recorded, after uint64) Verdict {
	v := r.Accepts(e.Event, after, e.Stored)
	if v.Problem != "" {
		return v
	}
	body, err := e.Body()
	if err != nil {
		return v // Accepts has reported it
	}
	switch b := body.(type) {
	case *events.AccessGranted:
		if g, err := grantOf(b); g != nil && err == nil {
			g.Since = e.Sequence
			if had := r.find(g.Key); had != nil && had.Until == 0 {
				had.Until = e.Sequence
			}
			r.grants = append(r.grants, g)
			if by := r.find(v.Key); by != nil {
				v.User = by.User
			}
		}
		for _, p := range b.Require {
			if !slices.Contains(r.require, p) {
				r.require = append(r.require, p)
			}
		}
	case *events.AccessRevoked:
		for _, key := range b.Keys {
			if g := r.find(key); g.Until == 0 {
				g.Until = e.Sequence
			}
		}
		r.require = slices.DeleteFunc(r.require, func(p string) bool { return slices.Contains(b.Require, p) })
	}
	return v
}
