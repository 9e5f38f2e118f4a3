package audit

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/transparency-dev/formats/proof"
	"golang.org/x/mod/sumdb/tlog"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// A proof of one event is a file in the form of C2SP tlog-proof. Its extra line is
// [Item] in JSON without the proof, and the proof of an older head, if one was wanted.
const proofMagic = "c2sp.org/tlog-proof@v1\n"

// IsProof reports whether a file is the proof of one event, by its first bytes.
func IsProof(data []byte) bool { return strings.HasPrefix(string(data), proofMagic) }

type extra struct {
	Item        Item         `json:"item"`
	Consistency *Consistency `json:"consistency,omitempty"`
}

// MarshalProof returns the file that proves one event under a signed head.
func MarshalProof(it Item, index int64, checkpoint []byte, since *Consistency) ([]byte, error) {
	hashes := it.Proof
	it.Proof = nil
	text, err := json.Marshal(extra{Item: it, Consistency: since})
	if err != nil {
		return nil, err
	}
	p := proof.TLogProof{Index: uint64(index), Checkpoint: checkpoint, ExtraData: text} //nolint:gosec // not negative
	for _, h := range hashes {
		p.Hashes = append(p.Hashes, h)
	}
	return p.Marshal(), nil
}

// ProvedEvent is what the proof of one event proves.
type ProvedEvent struct {
	Head     Head           `json:"-"`
	Origin   string         `json:"origin"`
	Size     int64          `json:"size"`
	Root     string         `json:"root"`
	Sequence uint64         `json:"sequence"`
	Stored   string         `json:"stored"`
	Message  events.Message `json:"message"`
	// Signer is the key that the event's signature names. The proof of one event cannot
	// show that the key was granted: a bundle does.
	Signer string `json:"signer,omitempty"`
}

// VerifyProof checks the proof of one event. It needs no store, network or clock. Of a file
// that is no proof, the kind of the error is [problem.Invalid]; otherwise as [VerifyBundle].
func VerifyProof(data []byte, p Policy, acceptUnwitnessed bool, old *Head) (v ProvedEvent, err error) {
	if !IsProof(data) {
		return v, problem.Errorf(problem.Invalid, "it is no proof: want the output of `ckptstore audit prove`, which begins with %q", proofMagic)
	}
	f, err := parseProof(data)
	if err != nil {
		return v, fmt.Errorf("%w: proof: %w", ErrTampered, err)
	}
	if v.Head, err = p.Open(f.Checkpoint, acceptUnwitnessed); err != nil {
		return v, err
	}
	v.Origin, v.Size, v.Root = v.Head.Origin, v.Head.Size, v.Head.Root.String()
	var x extra
	if err := strict(f.ExtraData, &x); err != nil {
		return v, fmt.Errorf("%w: the extra line of the proof: %w", ErrTampered, err)
	}
	if x.Item.Proof != nil {
		return v, fmt.Errorf("%w: the extra line of the proof has hashes", ErrTampered)
	}
	for _, h := range f.Hashes {
		x.Item.Proof = append(x.Item.Proof, tlog.Hash(h))
	}
	leaf, m, err := x.Item.opened(v.Head, false)
	if err != nil {
		return v, err
	}
	if f.Index != leaf.Sequence-1 {
		return v, fmt.Errorf("%w: the proof is of index %d, its entry of event %d", ErrTampered, f.Index, leaf.Sequence)
	}
	if err := x.Consistency.checkAll(old, v.Head, p.Logs); err != nil {
		return v, err
	}
	if e, err := events.Decode(m); err == nil {
		v.Signer = SignerOf(e)
		if e.Kind.Decides() && e.Scope.Run != events.None && matching(p.Signed, e.Scope.Run) != "" {
			return v, fmt.Errorf("%w: decisions of run %q must be signed, and the proof of one event does not show which keys were granted: verify a bundle of `ckptstore audit export`", ErrPolicy, e.Scope.Run)
		}
	}
	v.Sequence, v.Message, v.Stored = leaf.Sequence, m, leaf.Stored.Format("2006-01-02T15:04:05.000000000Z07:00")
	return v, nil
}

// parseProof is the inverse of [proof.TLogProof.Marshal] for lines of any length: an event
// may have a megabyte, and Unmarshal takes lines of at most 64 KiB.
func parseProof(data []byte) (f proof.TLogProof, err error) {
	head, checkpoint, ok := strings.Cut(string(data), "\n\n")
	lines := strings.Split(strings.TrimPrefix(head, proofMagic), "\n")
	if !ok || len(lines) < 2 {
		return f, errors.New("want the lines extra and index, hashes, an empty line and a note")
	}
	text, ok := strings.CutPrefix(lines[0], "extra ")
	number, ok2 := strings.CutPrefix(lines[1], "index ")
	if !ok || !ok2 {
		return f, errors.New("want the lines extra and index")
	}
	if f.ExtraData, err = base64.StdEncoding.DecodeString(text); err != nil {
		return f, fmt.Errorf("extra: %w", err)
	}
	if f.Index, err = strconv.ParseUint(number, 10, 64); err != nil {
		return f, fmt.Errorf("index: %w", err)
	}
	for _, line := range lines[2:] {
		h, err := base64.StdEncoding.DecodeString(line)
		if err != nil || len(h) != tlog.HashSize {
			return f, fmt.Errorf("%q is no hash", line)
		}
		f.Hashes = append(f.Hashes, tlog.Hash(h))
	}
	f.Checkpoint = []byte(checkpoint)
	if string(f.Marshal()) != string(data) {
		return f, errors.New("it is not written canonically")
	}
	return f, nil
}
