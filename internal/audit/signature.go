package audit

import (
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/mod/sumdb/note"

	"github.com/ckptstore/ckptstore/events"
)

// A decision is signed by the trainer or user that makes it, in the header ckpt-sig:
//
//	v1 NAME+HASH AFTER SIGNATURE
//
// NAME+HASH is the key: its name and the key hash of C2SP signed-note, 8 hexadecimal
// digits. AFTER is the sequence of the last decision of the lane that the decider has
// seen, 0 if there is none: the condition on which the log appends the decision.
// SIGNATURE is Ed25519 in base64, over [SignedText].
const (
	signatureVersion = "v1"
	signedMagic      = "ckptstore-decision/v1\x00"
)

// SignedText returns the bytes that the signature of a decision covers. Nothing that the
// decider chose is left out: a signature is of one event at one place of one lane of one
// store. Numbers are big-endian.
//
//	"ckptstore-decision/v1\0"   22 bytes
//	after                        8 bytes
//	SHA-256 of the body         32 bytes
//	store, subject, ce-type, ce-id, ce-source, ce-time, each after its length in 4 bytes
//
// The subject names the lane and the kind. Store is the identity of the store.
func SignedText(store string, e events.Event, after uint64) []byte {
	m := events.Encode(e)
	b := make([]byte, 0, 512)
	b = append(b, signedMagic...)
	b = binary.BigEndian.AppendUint64(b, after)
	body := sha256.Sum256(e.Data)
	b = append(b, body[:]...)
	for _, part := range []string{
		store, m.Subject, m.Header[events.HeaderType][0], m.Header[events.HeaderID][0], m.Header[events.HeaderSource][0], m.Header[events.HeaderTime][0],
	} {
		b = binary.BigEndian.AppendUint32(b, uint32(len(part))) //nolint:gosec // a header
		b = append(b, part...)
	}
	return b
}

// Signer signs decisions with the key of a trainer or a user. It may be used
// concurrently.
type Signer struct {
	key    note.Signer
	public string
}

// NewSigner returns the signer of a key in the form of C2SP signed-note, which must be of
// the type Ed25519.
func NewSigner(text string) (*Signer, error) {
	key, err := note.NewSigner(strings.TrimSpace(text))
	if err != nil {
		return nil, errors.New("it is no signing key: want the file of `ckptstore access keygen`")
	}
	parts := strings.SplitN(strings.TrimSpace(text), "+", 5) // PRIVATE, KEY, name, hash, type and seed
	seed, err := base64.StdEncoding.DecodeString(parts[len(parts)-1])
	if err != nil || len(seed) != 1+ed25519.SeedSize {
		return nil, errors.New("it is no signing key of the type Ed25519")
	}
	public, ok := ed25519.NewKeyFromSeed(seed[1:]).Public().(ed25519.PublicKey)
	if !ok {
		return nil, errors.New("it is no signing key of the type Ed25519")
	}
	verifier, err := note.NewEd25519VerifierKey(key.Name(), public)
	if err != nil {
		return nil, err
	}
	return &Signer{key: key, public: verifier}, nil
}

// Key returns the key as signatures name it: NAME+HASH.
func (s *Signer) Key() string { return keyID(s.key.Name(), s.key.KeyHash()) }

// Name returns the name of the key, which is that of its user.
func (s *Signer) Name() string { return s.key.Name() }

// Public returns the verifier key.
func (s *Signer) Public() string { return s.public }

// Sign returns the header with the signature of a decision of a store that is appended to
// its lane after the decision with a sequence. The same arguments give the same header.
func (s *Signer) Sign(store string, e events.Event, after uint64) (string, error) {
	signature, err := s.key.Sign(SignedText(store, e, after))
	if err != nil {
		return "", fmt.Errorf("sign %s: %w", e.Kind, err)
	}
	return strings.Join([]string{signatureVersion, s.Key(), strconv.FormatUint(after, 10), base64.StdEncoding.EncodeToString(signature)}, " "), nil
}

func keyID(name string, hash uint32) string { return fmt.Sprintf("%s+%08x", name, hash) }

// KeyOf returns a verifier key as signatures name it: NAME+HASH. A text that is no key is
// returned as it is.
func KeyOf(public string) string {
	v, err := note.NewVerifier(public)
	if err != nil {
		return public
	}
	return keyID(v.Name(), v.KeyHash())
}

// Signature is the signature of a decision, as its header states it.
type Signature struct {
	Key   string // NAME+HASH
	After uint64 // sequence of the decision before it in the lane; 0: none
	bytes []byte
}

// ParseSignature parses the header of a signature. It accepts only what [Signer.Sign]
// writes.
func ParseSignature(header string) (s Signature, err error) {
	f := strings.Split(header, " ")
	if len(f) != 4 || f[0] != signatureVersion {
		return s, errors.New("want `v1 KEY AFTER SIGNATURE`")
	}
	name, hash, ok := strings.Cut(f[1], "+")
	if !ok || name == "" || len(hash) != 8 || strings.Trim(hash, "0123456789abcdef") != "" {
		return s, fmt.Errorf("%q is no key", f[1])
	}
	s.Key = f[1]
	if s.After, err = events.ParseSequence(f[2]); err != nil {
		return s, fmt.Errorf("%q is no sequence", f[2])
	}
	s.bytes, err = base64.StdEncoding.Strict().DecodeString(f[3])
	if err != nil || len(s.bytes) != ed25519.SignatureSize {
		return s, errors.New("its signature is not 64 bytes in base64")
	}
	return s, nil
}

// SignerOf returns the key that the signature of an event names, without a check; "" if
// there is none.
func SignerOf(e events.Event) string {
	if e.Signature == "" {
		return ""
	}
	s, err := ParseSignature(e.Signature)
	if err != nil {
		return "malformed"
	}
	return s.Key
}
