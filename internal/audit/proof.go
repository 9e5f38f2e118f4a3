package audit

import (
	"encoding/json"
	"fmt"
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
}

// VerifyProof checks the proof of one event. It needs no store, network or clock.
func VerifyProof(data []byte, p Policy, acceptUnwitnessed bool, old *Head) (v ProvedEvent, err error) {
	var f proof.TLogProof
	if err := f.Unmarshal(data); err != nil {
		return v, problem.Errorf(problem.Invalid, "proof: %w", err)
	}
	if string(f.Marshal()) != string(data) {
		return v, problem.Errorf(problem.Invalid, "proof: it is not written canonically")
	}
	if v.Head, err = p.Open(f.Checkpoint, acceptUnwitnessed); err != nil {
		return v, err
	}
	v.Origin, v.Size, v.Root = v.Head.Origin, v.Head.Size, v.Head.Root.String()
	var x extra
	if err := strict(f.ExtraData, &x); err != nil {
		return v, fmt.Errorf("%w: the extra line of the proof: %w", ErrTampered, err)
	}
	for _, h := range f.Hashes {
		x.Item.Proof = append(x.Item.Proof, tlog.Hash(h))
	}
	leaf, m, err := x.Item.Open()
	if err != nil {
		return v, err
	}
	if f.Index != leaf.Sequence-1 {
		return v, fmt.Errorf("%w: the proof is of index %d, its entry of event %d", ErrTampered, f.Index, leaf.Sequence)
	}
	if err := x.Item.proved(leaf, v.Head); err != nil {
		return v, err
	}
	if err := x.Consistency.checkAll(old, v.Head); err != nil {
		return v, err
	}
	v.Sequence, v.Message, v.Stored = leaf.Sequence, m, leaf.Stored.Format("2006-01-02T15:04:05.000000000Z07:00")
	return v, nil
}
