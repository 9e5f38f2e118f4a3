package audit_test

import (
	"crypto/rand"
	"encoding/base64"
	"errors"
	"strings"
	"testing"

	fnote "github.com/transparency-dev/formats/note"
	"github.com/transparency-dev/formats/witness"
	"golang.org/x/mod/sumdb/note"

	"github.com/ckptstore/ckptstore/internal/audit"
	"github.com/ckptstore/ckptstore/internal/problem"
)

func keyPair(t *testing.T, name string) (private, public string) {
	t.Helper()
	private, public, err := note.GenerateKey(rand.Reader, name)
	if err != nil {
		t.Fatal(err)
	}
	return private, public
}

// TestPolicyRefused parses policies in which one key counts twice, or none.
func TestPolicyRefused(t *testing.T) {
	_, log := keyPair(t, "example.org/log")
	_, w1 := keyPair(t, "example.org/w1")
	_, w2 := keyPair(t, "example.org/w2")
	cosigner, err := fnote.VKeyToCosignatureV1(w1)
	if err != nil {
		t.Fatal(err)
	}
	// The same key under another name, whose hash is another one.
	signer, err := fnote.VKeyToCosignatureV1(log)
	if err != nil {
		t.Fatal(err)
	}
	renamed := rename(t, w1, "example.org/other")
	one, two := "witness one "+w1+" http://one\n", "witness two "+w2+" http://two\n"
	for what, test := range map[string]struct{ policy, want string }{
		"nothing of a group":        {one + "group g 0 one\nquorum g\n", "at least 1"},
		"nothing, with zeros":       {one + "group g 00 one\nquorum g\n", "at least 1"},
		"nothing, nested":           {one + two + "group g 0 one\ngroup h all g two\nquorum h\n", "at least 1"},
		"no member":                 {one + "group g all\nquorum g\n", "no member"},
		"a member twice":            {one + two + "group g 2 one one two\nquorum g\n", "member one appears twice"},
		"a member of two groups":    {one + two + "group g any one two\ngroup h all g one\nquorum h\n", "member one appears twice"},
		"a key twice":               {one + "witness two " + w1 + " http://two\ngroup g all one two\nquorum g\n", "appears twice"},
		"a key of two types":        {one + "witness two " + cosigner + " http://two\ngroup g all one two\nquorum g\n", "appears twice"},
		"a key under another name":  {one + "witness two " + renamed + " http://two\ngroup g all one two\nquorum g\n", "appears twice"},
		"the log as its witness":    {"log " + log + "\nwitness one " + signer + " http://one\nquorum one\n", "appears twice"},
		"a log twice":               {"log " + log + "\nlog " + log + "\nquorum none\n", "appears twice"},
		"an address twice":          {one + "witness two " + w2 + " http://one/\ngroup g all one two\nquorum g\n", "URL http://one appears twice"},
		"two quorums":               {one + "quorum one\nquorum none\n", "appears twice"},
		"a log without a key":       {"log\nquorum none\n", "want `log KEY`"},
		"no quorum":                 {one, "quorum"},
		"a group that is not there": {"quorum g\n", "not found"},
	} {
		if _, err := audit.ParsePolicy(test.policy); err == nil || !strings.Contains(err.Error(), test.want) || len(problem.Kinds(err)) == 0 || problem.Kinds(err)[0] != problem.Invalid {
			t.Errorf("%s: %v, want %q", what, err, test.want)
		}
	}
	for what, policy := range map[string]string{
		"none":     "log " + log + "\nquorum none # nothing\n",
		"one":      "# a comment\n" + one + "quorum one\n",
		"two logs": "log " + log + "\nlog " + w2 + "\nquorum none\n",
		"nested":   one + two + "group g all one\ngroup h any g two\n\nquorum h\n",
	} {
		if p, err := audit.ParsePolicy(policy); err != nil || p.Unwitnessed() != (what == "none" || what == "two logs") {
			t.Errorf("%s: %v, unwitnessed: %v", what, err, p.Unwitnessed())
		}
	}
}

// rename returns a verifier key with another name.
func rename(t *testing.T, key, name string) string {
	t.Helper()
	parts := strings.SplitN(key, "+", 3)
	v, err := note.NewVerifier(key)
	if err != nil {
		t.Fatal(err)
	}
	public, err := base64.StdEncoding.DecodeString(parts[2])
	if err != nil {
		t.Fatal(err)
	}
	renamed, err := note.NewEd25519VerifierKey(name, public[1:])
	if err != nil {
		t.Fatal(err)
	}
	if other, err := note.NewVerifier(renamed); err != nil || other.KeyHash() == v.KeyHash() {
		t.Fatalf("%s: %v", renamed, err)
	}
	return renamed
}

// TestPolicyUnwitnessed: a policy of nested groups that wants no cosignature is not taken
// for a witnessed one, also where it did not come from [audit.ParsePolicy].
func TestPolicyUnwitnessed(t *testing.T) {
	private, log := keyPair(t, "example.org/log")
	signer, err := note.NewSigner(private)
	if err != nil {
		t.Fatal(err)
	}
	signed, err := audit.Sign(audit.Head{Origin: "example.org/log", Size: 1}, signer)
	if err != nil {
		t.Fatal(err)
	}
	p, err := audit.ParsePolicy("log " + log + "\nquorum none\n")
	if err != nil {
		t.Fatal(err)
	}
	p.Witnesses = witness.NewGroup(1, witness.NewGroup(0))
	if _, err := p.Open(signed, false); !errors.Is(err, audit.ErrPolicy) {
		t.Errorf("%v, want %v", err, audit.ErrPolicy)
	}
	if _, err := p.Open(signed, true); err != nil {
		t.Error(err)
	}
}
