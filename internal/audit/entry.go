// Package audit holds the formats and the checks of the tamper evidence of a log: what
// an outsider needs to verify a log without trusting the store that has it. It is pure:
// it reads no file and no clock.
//
//	entry    the leaf of one event, about 250 bytes; index = sequence - 1
//	tree     RFC 6962 over SHA-256, kept as tiles of 256 hashes (C2SP tlog-tiles)
//	head     origin, size and root, a signed note (C2SP tlog-checkpoint)
//	run map  for each trial: the number of its events, the last, and a chain over all
//	sealed   the decision audit.sealed, which holds the root of the run map
//	bundle   the events of one run with all proofs, in one file
//
// An entry holds the digest of the body, not the body, which may have a megabyte:
//
//	"ckptstore-entry/v1\0"   19 bytes
//	sequence                  8 bytes; all numbers are big-endian
//	stored                    8 bytes, nanoseconds since 1970
//	subject                   2 bytes length, then the bytes
//	ce-id                     1 byte length, then the bytes
//	H                        32 bytes, SHA-256 of the headers, see [Entry]
//	length of the body        4 bytes
//	C                        32 bytes, SHA-256(salt ‖ body)
//
// The salt of an event follows from a key of its run and its sequence. Without the key
// an erased body cannot be guessed from C, and the tree stays as it is.
package audit

import (
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"slices"
	"strings"
	"time"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// ErrTampered reports that bytes differ from those that a head proves.
var ErrTampered = problem.New(problem.Findings, "tampered")

// Hash is a hash of the tree, SHA-256.
type Hash = tlog.Hash

// Salt is what the digest of a body begins with.
type Salt [sha256.Size]byte

const entryMagic = "ckptstore-entry/v1\x00"

// HeaderSignature is the header with the signature of a decision by its trainer.
const HeaderSignature = events.HeaderSignature

// bound are the headers that an entry binds, apart from those that begin with "ce-".
// Headers that a server adds, such as the ID of a batch, are not among them: a mirror
// or a restored log has others.
var bound = []string{
	events.HeaderMsgID, "Nats-Expected-Last-Subject-Sequence", "Nats-Expected-Last-Subject-Sequence-Subject",
	events.HeaderActor, HeaderSignature,
}

// Salter makes the salts of one run's events. HKDF derives a key of its own from the
// key of the run first, which is the same for all events. Computed for each event, as
// [hkdf.Key] does, a salt took half as long as an entry. A Salter is not safe for
// concurrent use.
type Salter struct {
	mac  hash.Hash
	info []byte // what the salt of an event is derived for; the sequence in it changes
	sum  []byte
}

const saltInfo = "ckptstore-salt/v1\x00"

// NewSalter returns the salter of a run with this key.
func NewSalter(key []byte) (*Salter, error) {
	derived, err := hkdf.Extract(sha256.New, key, nil)
	if err != nil {
		return nil, fmt.Errorf("salts of a run: %w", err)
	}
	info := binary.BigEndian.AppendUint64([]byte(saltInfo), 0)
	info = append(info, 1) // the number of the block: a salt is one
	return &Salter{mac: hmac.New(sha256.New, derived), info: info}, nil
}

// Of returns the salt of the event at a sequence: HKDF-SHA256 of the key of the run,
// without a salt, for "ckptstore-salt/v1\0" and the sequence.
func (s *Salter) Of(sequence uint64) Salt {
	binary.BigEndian.PutUint64(s.info[len(saltInfo):], sequence)
	s.mac.Reset()
	s.mac.Write(s.info)
	s.sum = s.mac.Sum(s.sum[:0])
	return Salt(s.sum)
}

// An entry is shorter than 64 KiB, which is the limit of bundles of entries.
const (
	entryMore  = len(entryMagic) + 8 + 8 + 2 + 1 + 32 + 4 + 32 // apart from subject and ID
	maxSubject = 1<<16 - 1 - entryMore - 255                   // beyond that, an entry does not bind a subject
)

// Entry returns the entry of a message of the log. H is the SHA-256 of the bound headers
// as pairs of name and value, sorted, each part after its length in 4 bytes.
func Entry(m events.Message, sequence uint64, stored time.Time, salt Salt) []byte {
	id := ""
	if v := m.Header[events.HeaderID]; len(v) == 1 && len(v[0]) < 256 {
		id = v[0] // a longer one is in H alone; only a message that is not an event has it
	}
	subject := m.Subject[:min(len(m.Subject), maxSubject)] // a server accepts no longer one
	b := make([]byte, 0, entryMore+len(subject)+len(id))
	b = append(b, entryMagic...)
	b = binary.BigEndian.AppendUint64(b, sequence)
	b = binary.BigEndian.AppendUint64(b, uint64(stored.UnixNano())) //nolint:gosec // read back as it was
	b = binary.BigEndian.AppendUint16(b, uint16(len(subject)))      //nolint:gosec // cut above
	b = append(b, subject...)
	b = append(b, byte(len(id)))
	b = append(b, id...)
	headers := headerDigest(m.Header)
	b = append(b, headers[:]...)
	b = binary.BigEndian.AppendUint32(b, uint32(len(m.Data))) //nolint:gosec // a message has at most a few MiB
	c := sha256.New()
	c.Write(salt[:])
	c.Write(m.Data)
	return c.Sum(b)
}

// Bound reports whether entries bind a header.
func Bound(name string) bool {
	return strings.HasPrefix(name, "ce-") || slices.Contains(bound, name)
}

// headerDigest hashes a text on the stack in one call: a message has about ten headers,
// and a call of the hash for each part of them took longer than the hash.
func headerDigest(header map[string][]string) [32]byte {
	var most [16][2]string
	pairs := most[:0]
	for name, values := range header {
		if !Bound(name) {
			continue
		}
		for _, v := range values {
			pairs = append(pairs, [2]string{name, v})
		}
	}
	slices.SortFunc(pairs, func(a, b [2]string) int {
		if c := strings.Compare(a[0], b[0]); c != 0 {
			return c
		}
		return strings.Compare(a[1], b[1])
	})
	var space [1024]byte
	text := space[:0]
	for _, p := range pairs {
		for _, part := range p {
			text = binary.BigEndian.AppendUint32(text, uint32(len(part))) //nolint:gosec // as above
			text = append(text, part...)
		}
	}
	return sha256.Sum256(text)
}

// Leaf is a parsed entry.
type Leaf struct {
	Sequence uint64
	Stored   time.Time
	Subject  string
	ID       string
	Headers  [32]byte
	Length   uint32
	Content  [32]byte
}

// ParseEntry parses an entry. It accepts only what [Entry] writes.
func ParseEntry(b []byte) (l Leaf, err error) {
	bad := func(what string) (Leaf, error) { return Leaf{}, fmt.Errorf("entry: %s", what) }
	rest, ok := strings.CutPrefix(string(b), entryMagic)
	if !ok {
		return bad("it does not begin with " + entryMagic[:len(entryMagic)-1])
	}
	if len(rest) < 8+8+2 {
		return bad("it is cut off")
	}
	r := []byte(rest)
	l.Sequence = binary.BigEndian.Uint64(r)
	l.Stored = time.Unix(0, int64(binary.BigEndian.Uint64(r[8:]))).UTC() //nolint:gosec // as it was written
	n := int(binary.BigEndian.Uint16(r[16:]))
	r = r[18:]
	if len(r) < n+1 {
		return bad("its subject is cut off")
	}
	l.Subject, r = string(r[:n]), r[n:]
	n, r = int(r[0]), r[1:]
	if len(r) != n+32+4+32 {
		return bad("its length is wrong")
	}
	l.ID, r = string(r[:n]), r[n:]
	l.Headers = [32]byte(r)
	l.Length = binary.BigEndian.Uint32(r[32:])
	l.Content = [32]byte(r[36:])
	if l.Sequence == 0 {
		return bad("its sequence is 0")
	}
	return l, nil
}

// EntryHash returns the hash of an entry in the tree.
func EntryHash(entry []byte) Hash { return tlog.RecordHash(entry) }

// Trial returns the run and the trial of a message, as the tokens of its subject are
// written. Of a subject without them, they are empty.
func Trial(subject string) (run, trial string) {
	prefix, rest, _ := strings.Cut(subject, ".")
	run, rest, _ = strings.Cut(rest, ".")
	trial, _, ok := strings.Cut(rest, ".")
	if !ok || prefix != events.Prefix {
		return "", ""
	}
	return run, trial
}

var errShort = errors.New("a bundle of entries is cut off")

// AppendBundle appends an entry to a bundle of entries in the form of C2SP tlog-tiles:
// its length in 2 bytes, then the entry, which is one of [Entry].
func AppendBundle(b, entry []byte) []byte {
	b = binary.BigEndian.AppendUint16(b, uint16(len(entry))) //nolint:gosec // see maxSubject
	return append(b, entry...)
}

// CutBundle returns the first entry of a bundle of entries, and the rest.
func CutBundle(b []byte) (entry, rest []byte, err error) {
	if len(b) < 2 {
		return nil, nil, errShort
	}
	n := int(binary.BigEndian.Uint16(b))
	if b = b[2:]; len(b) < n {
		return nil, nil, errShort
	}
	return b[:n], b[n:], nil
}
