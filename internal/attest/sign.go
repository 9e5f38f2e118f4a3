package attest

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/sha256"
	"crypto/sha512"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/ckptstore/ckptstore/internal/private"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// Types of a bundle's parts.
const (
	bundleType  = "application/vnd.dev.sigstore.bundle.v0.3+json"
	payloadType = "application/vnd.in-toto+json"
)

// maxKey bounds a file with a key, in bytes.
const maxKey = 64 << 10

// Key signs statements: an ECDSA key on P-256, P-384 or P-521.
type Key struct {
	key  *ecdsa.PrivateKey
	hash crypto.Hash
	hint string // SHA-256 of the public key in PEM
}

// ErrKey reports a key that cannot sign, or must not. Test with errors.Is.
var ErrKey = problem.New(problem.Invalid, "unusable key")

// generate is the next step after an unusable key.
const generate = "make one with `openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out KEY` under umask 077"

// ReadKey reads a private key that only this user can read, in a file without another name
// and outside of the given directories: who writes to a store must not sign for it. The
// errors are [ErrKey], [private.ErrNotPrivate] and those of the file.
func ReadKey(path string, outside ...string) (Key, error) {
	file, err := os.Open(path)
	if err != nil {
		return Key{}, fmt.Errorf("key: %w", err)
	}
	defer func() { _ = file.Close() }()
	info, err := file.Stat()
	if err != nil {
		return Key{}, fmt.Errorf("key: %w", err)
	}
	if err := private.OnlyName(path, info, "keep the key in a file of your own with mode 0600"); err != nil {
		return Key{}, fmt.Errorf("key: %w", err)
	}
	if err := apart(path, outside); err != nil {
		return Key{}, err
	}
	text, err := io.ReadAll(io.LimitReader(file, maxKey+1))
	if err != nil {
		return Key{}, fmt.Errorf("key: %w", err)
	}
	k, err := ParseKey(text)
	if err != nil {
		return Key{}, fmt.Errorf("key %s: %w", path, err)
	}
	return k, nil
}

// apart returns an error if a file lies in one of the directories.
func apart(path string, dirs []string) error {
	real, err := resolved(path)
	if err != nil {
		return fmt.Errorf("key: %w", err)
	}
	for _, dir := range dirs {
		if dir == "" {
			continue
		}
		if full, err := resolved(dir); err == nil && (real == full || strings.HasPrefix(real, full+"/")) {
			return problem.Errorf(problem.Denied, "key %s lies in %s, where processes that write checkpoints can read it: move it to another directory", path, dir)
		}
	}
	return nil
}

// resolved returns an absolute path without symbolic links.
func resolved(path string) (string, error) {
	full, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	return filepath.EvalSymlinks(full)
}

// ParseKey decodes a private key in PEM: PKCS #8, or SEC 1 as `openssl ecparam -genkey`
// writes it, with or without the parameters before it.
func ParseKey(text []byte) (Key, error) {
	if len(text) > maxKey {
		return Key{}, fmt.Errorf("%w: it is larger than %d bytes", ErrKey, maxKey)
	}
	seen := ""
	for {
		var block *pem.Block
		if block, text = pem.Decode(text); block == nil {
			if seen == "" {
				seen = "it is not in PEM"
			}
			return Key{}, fmt.Errorf("%w: %s; %s", ErrKey, seen, generate)
		}
		var key any
		var err error
		switch {
		case block.Type == "EC PARAMETERS":
			continue
		case block.Type == "ENCRYPTED PRIVATE KEY" || block.Headers["DEK-Info"] != "":
			return Key{}, fmt.Errorf("%w: it is encrypted; decrypt it with `openssl pkey -in KEY -out PLAIN` under umask 077", ErrKey)
		case block.Type == "EC PRIVATE KEY":
			key, err = x509.ParseECPrivateKey(block.Bytes)
		case block.Type == "PRIVATE KEY":
			key, err = x509.ParsePKCS8PrivateKey(block.Bytes)
		default:
			seen = fmt.Sprintf("it holds %q and no private key", block.Type)
			continue
		}
		if err != nil {
			return Key{}, fmt.Errorf("%w: %w; %s", ErrKey, err, generate)
		}
		return newKey(key)
	}
}

func newKey(key any) (Key, error) {
	ec, ok := key.(*ecdsa.PrivateKey)
	if !ok {
		return Key{}, fmt.Errorf("%w: %T, and verifiers of models take ECDSA keys; %s", ErrKey, key, generate)
	}
	k := Key{key: ec}
	switch ec.Curve {
	case elliptic.P256():
		k.hash = crypto.SHA256
	case elliptic.P384():
		k.hash = crypto.SHA384
	case elliptic.P521():
		k.hash = crypto.SHA512
	default:
		return Key{}, fmt.Errorf("%w: its curve is %s, not P-256, P-384 or P-521; %s", ErrKey, ec.Curve.Params().Name, generate)
	}
	public, err := k.Public()
	if err != nil {
		return Key{}, err
	}
	sum := sha256.Sum256(public)
	k.hint = hex.EncodeToString(sum[:])
	return k, nil
}

// Hint returns the SHA-256 of the public key in PEM, by which a bundle names its key.
func (k Key) Hint() string { return k.hint }

// Public returns the public key in PEM.
func (k Key) Public() ([]byte, error) {
	der, err := x509.MarshalPKIXPublicKey(&k.key.PublicKey)
	if err != nil {
		return nil, fmt.Errorf("public key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}), nil
}

// bundle is a Sigstore bundle v0.3 signed by a key.
type bundle struct {
	MediaType            string `json:"mediaType"`
	VerificationMaterial struct {
		PublicKey struct {
			Hint string `json:"hint"`
		} `json:"publicKey"`
		TlogEntries []struct{} `json:"tlogEntries"`
	} `json:"verificationMaterial"`
	Envelope envelope `json:"dsseEnvelope"`
}

// envelope is a DSSE envelope. JSON has bytes in base64.
type envelope struct {
	Payload     []byte      `json:"payload"`
	PayloadType string      `json:"payloadType"`
	Signatures  []signature `json:"signatures"`
}

type signature struct {
	Sig   []byte `json:"sig"`
	KeyID string `json:"keyid"`
}

// encoded returns what DSSE signs: PAE(type, payload).
func encoded(payload []byte) []byte {
	return append(fmt.Appendf(nil, "DSSEv1 %d %s %d ", len(payloadType), payloadType, len(payload)), payload...)
}

// Bundle signs a statement. The result is a Sigstore bundle v0.3 in JSON.
func (k Key) Bundle(statement []byte) ([]byte, error) {
	if !json.Valid(statement) {
		return nil, errors.New("sign a statement: it is not JSON")
	}
	// Without a source of randomness the nonce follows from key and message.
	sig, err := k.key.Sign(nil, digestOf(k.hash, encoded(statement)), k.hash)
	if err != nil {
		return nil, fmt.Errorf("sign a statement: %w", err)
	}
	b := bundle{MediaType: bundleType, Envelope: envelope{Payload: statement, PayloadType: payloadType, Signatures: []signature{{Sig: sig}}}}
	b.VerificationMaterial.PublicKey.Hint, b.VerificationMaterial.TlogEntries = k.hint, []struct{}{}
	text, err := json.MarshalIndent(b, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("sign a statement: %w", err)
	}
	return append(text, '\n'), nil
}

func digestOf(h crypto.Hash, data []byte) []byte {
	switch h {
	case crypto.SHA384:
		sum := sha512.Sum384(data)
		return sum[:]
	case crypto.SHA512:
		sum := sha512.Sum512(data)
		return sum[:]
	}
	sum := sha256.Sum256(data)
	return sum[:]
}
