package checkpoint

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/ckptstore/ckptstore/internal/crc32c"
)

// Receipt records the commit of a checkpoint: the log, the position in it, and the manifest.
// It is the file COMMIT.json, one JSON object whose last member, "crc32c", covers all bytes
// before it. Unknown members are ignored.
type Receipt struct {
	Ref         Ref       `json:"-"` // where it was found; not in the file
	Store       string    `json:"store"`
	Run         string    `json:"run"`
	Trial       string    `json:"trial"`
	Checkpoint  string    `json:"checkpoint"`
	Name        string    `json:"name"`
	Step        int64     `json:"step"`
	Attempt     int       `json:"attempt"`
	Sequence    uint64    `json:"sequence"`
	Event       string    `json:"event"`    // ID of the committed event
	Manifest    Digest    `json:"manifest"` // names the manifest's file
	CommittedAt time.Time `json:"committed_at"`

	// For a list of checkpoints without their manifests; zero in receipts of older versions.
	WorldSize int   `json:"world_size,omitempty"`
	Bytes     int64 `json:"bytes,omitempty"` // of all tensors and values, as [Layout.Bytes]
}

// NewReceipt returns the receipt of a manifest with a digest that d has committed.
func NewReceipt(m Manifest, digest Digest, d Decision) Receipt {
	return Receipt{
		Store: m.Store, Run: m.Run, Trial: m.Trial, Checkpoint: m.Checkpoint, Name: m.Name,
		Step: m.Step, Attempt: m.Attempt,
		Sequence: d.Sequence, Event: d.Event, Manifest: digest, CommittedAt: d.Time.UTC().Round(0),
		WorldSize: m.WorldSize, Bytes: m.Layout.Bytes(),
	}
}

// Same reports whether both receipts have the same content, wherever they lie. A receipt without
// world size, of an older version, has that of the other, and its bytes.
func (r Receipt) Same(o Receipt) bool {
	at := r.CommittedAt.Equal(o.CommittedAt)
	if r.WorldSize == 0 || o.WorldSize == 0 {
		r.WorldSize, r.Bytes = o.WorldSize, o.Bytes
	}
	r.Ref, o.Ref, r.CommittedAt, o.CommittedAt = Ref{}, Ref{}, time.Time{}, time.Time{}
	return at && r == o
}

// Matches returns an error if the receipt's fields differ from the manifest's.
func (r Receipt) Matches(m Manifest) error {
	d := Decision{Sequence: r.Sequence, Event: r.Event, Time: r.CommittedAt}
	if want := NewReceipt(m, r.Manifest, d); !r.Same(want) {
		return fmt.Errorf("the receipt is that of %s/%s/%s, step %d, attempt %d, %d ranks, %d bytes in store %s; the manifest is that of %s/%s/%s, step %d, attempt %d, %d ranks, %d bytes in store %s",
			r.Run, r.Trial, r.Checkpoint, r.Step, r.Attempt, r.WorldSize, r.Bytes, r.Store,
			m.Run, m.Trial, m.Checkpoint, m.Step, m.Attempt, m.WorldSize, m.Layout.Bytes(), m.Store)
	}
	return nil
}

// The checksum is the last member, so that it can cover the bytes as they lie in the file,
// with members that this version does not know.
const (
	sumMember = "\n  \"crc32c\": \""
	sumEnd    = "\"\n}\n"
)

// EncodeReceipt returns the bytes of the receipt file.
func EncodeReceipt(r Receipt) ([]byte, error) {
	r.CommittedAt = r.CommittedAt.UTC().Round(0)
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("encode receipt: %w", err)
	}
	data = append(bytes.TrimSuffix(data, []byte("\n}")), ',')
	return fmt.Appendf(data, "%s%08x%s", sumMember, crc32c.Checksum(data), sumEnd), nil
}

// DecodeReceipt is the inverse of [EncodeReceipt]. It ignores members that this version does
// not know and reports bytes that do not match the checksum.
func DecodeReceipt(data []byte) (Receipt, error) {
	at := bytes.LastIndex(data, []byte(sumMember))
	if at < 0 {
		return Receipt{}, errors.New("decode receipt: truncated, it has no checksum")
	}
	sum := fmt.Sprintf("%s%08x%s", sumMember, crc32c.Checksum(data[:at]), sumEnd)
	if string(data[at:]) != sum {
		return Receipt{}, errors.New("decode receipt: its checksum does not match")
	}
	var r Receipt
	if err := json.Unmarshal(data, &r); err != nil {
		return Receipt{}, fmt.Errorf("decode receipt: %w", err)
	}
	if r.Store == "" || r.Run == "" || r.Trial == "" || r.Checkpoint == "" || r.Manifest == (Digest{}) {
		return Receipt{}, errors.New("decode receipt: store, run, trial, checkpoint and manifest are all needed")
	}
	return r, nil
}

// Decision is the position of a committed event in the log.
type Decision struct {
	Sequence uint64    // in the stream
	Event    string    // ID
	Time     time.Time // of the event
}
