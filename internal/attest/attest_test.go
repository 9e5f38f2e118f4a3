package attest

import (
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/private"
	"github.com/ckptstore/ckptstore/internal/problem"
)

var update = flag.Bool("update", false, "write the golden files")

func generated(t *testing.T, curve elliptic.Curve) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(curve, rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// inPEM returns a key as `openssl genpkey` writes it.
func inPEM(t *testing.T, key any) []byte {
	t.Helper()
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
}

// TestBundle checks the signature of a bundle by hand, with each curve.
func TestBundle(t *testing.T) {
	t.Parallel()
	for _, curve := range []elliptic.Curve{elliptic.P256(), elliptic.P384(), elliptic.P521()} {
		private := generated(t, curve)
		key, err := ParseKey(inPEM(t, private))
		if err != nil {
			t.Fatal(err)
		}
		text, err := key.Bundle([]byte(`{"a":"é"}`))
		if err != nil {
			t.Fatal(err)
		}
		again, err := key.Bundle([]byte(`{"a":"é"}`))
		if err != nil || string(again) != string(text) {
			t.Errorf("%s: two signatures of one statement differ: %v", curve.Params().Name, err)
		}
		var b bundle
		if err := json.Unmarshal(text, &b); err != nil {
			t.Fatal(err)
		}
		const pae = "DSSEv1 28 application/vnd.in-toto+json 10 {\"a\":\"é\"}"
		if !ecdsa.VerifyASN1(&private.PublicKey, digestOf(key.hash, []byte(pae)), b.Envelope.Signatures[0].Sig) {
			t.Errorf("%s: the signature is not that of %q", curve.Params().Name, pae)
		}
		public, err := key.Public()
		if err != nil {
			t.Fatal(err)
		}
		if b.MediaType != bundleType || string(b.Envelope.Payload) != `{"a":"é"}` || b.VerificationMaterial.PublicKey.Hint != key.Hint() || key.Hint() == "" || !strings.HasPrefix(string(public), "-----BEGIN PUBLIC KEY-----\n") {
			t.Errorf("%s: bundle %s", curve.Params().Name, text)
		}
		if !strings.Contains(string(text), `"tlogEntries": []`) {
			t.Errorf("no list of entries: %s", text)
		}
	}
	if _, err := (Key{}).Bundle([]byte("{")); err == nil {
		t.Error("signed what is not JSON")
	}
}

// TestParseKey parses keys in each form, and refuses others by name.
func TestParseKey(t *testing.T) {
	t.Parallel()
	ec := generated(t, elliptic.P384())
	sec1, err := x509.MarshalECPrivateKey(ec)
	if err != nil {
		t.Fatal(err)
	}
	old := pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: sec1})
	parameters := pem.EncodeToMemory(&pem.Block{Type: "EC PARAMETERS", Bytes: []byte{6, 5, 0x2b, 0x81, 4, 0, 0x22}})
	_, ed, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		text []byte
		bad  string // part of the error; empty: it is a key
	}{
		"openssl genpkey":          {inPEM(t, ec), ""},
		"openssl ecparam -genkey":  {slices.Concat(parameters, old), ""},
		"openssl ecparam -noout":   {old, ""},
		"with a comment":           {slices.Concat([]byte("my key\n"), old), ""},
		"P-224":                    {inPEM(t, generated(t, elliptic.P224())), "its curve is P-224"},
		"Ed25519":                  {inPEM(t, ed), "take ECDSA keys"},
		"encrypted":                {pem.EncodeToMemory(&pem.Block{Type: "ENCRYPTED PRIVATE KEY", Bytes: []byte{1}}), "it is encrypted"},
		"encrypted in the old way": {pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Headers: map[string]string{"DEK-Info": "AES"}, Bytes: []byte{1}}), "it is encrypted"},
		"public":                   {pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: []byte{1}}), `it holds "PUBLIC KEY" and no private key`},
		"damaged":                  {pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: sec1[:20]}), "unusable key"},
		"not PEM":                  {[]byte("hello"), "it is not in PEM"},
		"too large":                {make([]byte, maxKey+1), "it is larger than"},
	} {
		_, err := ParseKey(c.text)
		if c.bad == "" {
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		if !errors.Is(err, ErrKey) || !strings.Contains(err.Error(), c.bad) {
			t.Errorf("%s: %v, want %q", name, err, c.bad)
		}
	}
}

// TestReadKey refuses keys that other users or the store can read.
func TestReadKey(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	store := filepath.Join(dir, "store")
	text := inPEM(t, generated(t, elliptic.P256()))
	put := func(name string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, text, 0o600), os.Chmod(path, mode)); err != nil {
			t.Fatal(err)
		}
		return path
	}
	good, linked := put("good.pem", 0o600), put("linked.pem", 0o600)
	inside := put("store/data/key.pem", 0o600)
	through, also := filepath.Join(dir, "through.pem"), filepath.Join(dir, "also")
	if err := errors.Join(os.Link(linked, filepath.Join(store, "linked.pem")), os.Symlink(inside, through), os.Symlink(store, also)); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadKey(good, "", filepath.Join(dir, "none"), store); err != nil {
		t.Error(err)
	}
	for what, c := range map[string]struct {
		path, outside string
		is            error
	}{
		"group":        {put("group.pem", 0o640), store, private.ErrNotPrivate},
		"others":       {put("others.pem", 0o604), store, private.ErrNotPrivate},
		"linked":       {linked, store, private.ErrNotPrivate},
		"missing":      {filepath.Join(dir, "none.pem"), store, os.ErrNotExist},
		"a directory":  {store, "", private.ErrNotPrivate},
		"inside":       {inside, store, nil},
		"by a link":    {through, store, nil},
		"store linked": {inside, also, nil},
	} {
		_, err := ReadKey(c.path, c.outside)
		switch {
		case err == nil:
			t.Errorf("%s: the key was read", what)
		case c.is != nil && !errors.Is(err, c.is):
			t.Errorf("%s: %v, want %v", what, err, c.is)
		case c.is == nil && (!slices.Contains(problem.Kinds(err), problem.Denied) || !strings.Contains(err.Error(), "move it to another directory")):
			t.Errorf("%s: %v", what, err)
		}
	}
}

// TestStatements holds the statements to the bytes that verifiers read.
func TestStatements(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 11, 26, 12, 0, 0, 0, time.FixedZone("", 3600))
	c := Checkpoint{Store: "0197-aa", Run: "b/<1>", Trial: "main", ID: "step-2.a1", Step: 2, Sequence: 41, Manifest: "ab12", Committed: at}
	s := Subject{Name: "out", Files: []File{{Name: "b", SHA256: sha256.Sum256([]byte("b"))}, {Name: "a", SHA256: sha256.Sum256([]byte("a"))}, {Name: "c", SHA256: sha256.Sum256([]byte("c")), Also: true}}}
	a, b, cc := sha256.Sum256([]byte("a")), sha256.Sum256([]byte("b")), sha256.Sum256([]byte("c"))
	if s.Root() != sha256.Sum256(slices.Concat(a[:], b[:], cc[:])) {
		t.Error("the root is not the digest of the digests by name")
	}
	model, err := Model(s, c)
	if err != nil {
		t.Fatal(err)
	}
	provenance, err := Provenance(s, Training{
		Checkpoint: c, Job: "job-1", Host: "h", Command: []string{"train", "--key=REDACTED"}, Resume: "auto", Config: map[string]any{"lr": 0.5},
		Attempt: 1, WorldSize: 2, NProc: 2, NNodes: 1, Started: at,
		Parents: []Checkpoint{
			{Store: "0197-aa", Run: "a b", Trial: "main", ID: "step-1.a1", Sequence: 7, Manifest: "cd"},
			{Store: "0197-aa", ID: "gone@step-9.a1", Unresolved: "not found"},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	for name, have := range map[string][]byte{"model.json": model, "provenance.json": provenance} {
		if *update {
			if err := os.WriteFile(filepath.Join("testdata", name), append(have, '\n'), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(filepath.Join("testdata", name))
		if err != nil {
			t.Fatal(err)
		}
		if strings.TrimSpace(string(want)) != string(have) {
			t.Errorf("%s: %s", name, have)
		}
	}
}
