package data

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/crc32c"
	"github.com/ckptstore/ckptstore/internal/object"
)

// Receipt says that a checkpoint is committed: in which log, where in it, and
// with which manifest. It is the file COMMIT.json, one JSON object whose last
// member, "crc32c", covers all bytes in front of it. Members that are not
// known are ignored.
type Receipt struct {
	Ref         Ref               `json:"-"` // where it was found; not in the file
	Store       string            `json:"store"`
	Run         string            `json:"run"`
	Trial       string            `json:"trial"`
	Checkpoint  string            `json:"checkpoint"`
	Name        string            `json:"name"`
	Step        int64             `json:"step"`
	Attempt     int               `json:"attempt"`
	Sequence    uint64            `json:"sequence"`
	Event       string            `json:"event"`    // ID of the committed event
	Manifest    checkpoint.Digest `json:"manifest"` // names the manifest's file
	CommittedAt time.Time         `json:"committed_at"`
}

func NewReceipt(m checkpoint.Manifest, digest checkpoint.Digest, d Decision) Receipt {
	return Receipt{
		Store: m.Store, Run: m.Run, Trial: m.Trial, Checkpoint: m.Checkpoint, Name: m.Name,
		Step: m.Step, Attempt: m.Attempt,
		Sequence: d.Sequence, Event: d.Event, Manifest: digest, CommittedAt: d.Time.UTC().Round(0),
	}
}

// same reports whether both say the same, wherever they lie.
func (r Receipt) Same(o Receipt) bool {
	at := r.CommittedAt.Equal(o.CommittedAt)
	r.Ref, o.Ref, r.CommittedAt, o.CommittedAt = Ref{}, Ref{}, time.Time{}, time.Time{}
	return at && r == o
}

// matches reports what in the receipt is not as in its manifest.
func (r Receipt) Matches(m checkpoint.Manifest) error {
	d := Decision{Sequence: r.Sequence, Event: r.Event, Time: r.CommittedAt}
	if want := NewReceipt(m, r.Manifest, d); !r.Same(want) {
		return fmt.Errorf("the receipt is that of %s/%s/%s, step %d, attempt %d in store %s; the manifest is that of %s/%s/%s, step %d, attempt %d in store %s",
			r.Run, r.Trial, r.Checkpoint, r.Step, r.Attempt, r.Store,
			m.Run, m.Trial, m.Checkpoint, m.Step, m.Attempt, m.Store)
	}
	return nil
}

// The checksum is the last member, so that it can cover the bytes as they lie
// in the file, with members that this version does not know.
const (
	sumMember = "\n  \"crc32c\": \""
	sumEnd    = "\"\n}\n"
)

func EncodeReceipt(r Receipt) ([]byte, error) {
	r.CommittedAt = r.CommittedAt.UTC().Round(0)
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("encode receipt: %w", err)
	}
	data = append(bytes.TrimSuffix(data, []byte("\n}")), ',')
	return fmt.Appendf(data, "%s%08x%s", sumMember, crc32c.Checksum(data), sumEnd), nil
}

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
	if r.Store == "" || r.Run == "" || r.Trial == "" || r.Checkpoint == "" || r.Manifest == (checkpoint.Digest{}) {
		return Receipt{}, errors.New("decode receipt: store, run, trial, checkpoint and manifest are all needed")
	}
	return r, nil
}

// readReceipt is the receipt of ref. Without one, the error has
// [ErrNotCommitted] in its chain; a damaged one gives a [*CorruptError].
func (r *Root) readReceipt(ctx context.Context, ref Ref) (Receipt, error) {
	path := r.path(ref, ReceiptFile)
	data, err := r.readFile(ctx, ref, ReceiptFile)
	if errors.Is(err, fs.ErrNotExist) {
		return Receipt{}, fmt.Errorf("%s: %w", path, ErrNotCommitted)
	}
	if err != nil {
		return Receipt{}, err
	}
	receipt, err := DecodeReceipt(data)
	if err != nil {
		return Receipt{}, &CorruptError{File: path, Block: -1, Problem: err.Error()}
	}
	receipt.Ref = ref
	return receipt, nil
}

// WriteReceipt makes a missing or damaged receipt anew, from what the log says
// was committed. It checks that the manifest is there and is the one that
// receipt is about. A receipt that says the same is success, one that says
// something else is an error. It is durable on return.
func (r *Root) WriteReceipt(ctx context.Context, ref Ref, receipt Receipt) error {
	err := errors.Join(ctx.Err(), ref.Validate())
	if err == nil {
		err = r.repairReceipt(ctx, ref, receipt)
	}
	if err != nil {
		return fmt.Errorf("write the receipt of checkpoint %s: %w", ref, err)
	}
	return nil
}

func (r *Root) repairReceipt(ctx context.Context, ref Ref, receipt Receipt) error {
	m, err := r.readManifest(ctx, ref, receipt.Manifest)
	if err != nil {
		return err
	}
	if err := receipt.Matches(m); err != nil {
		return err
	}
	return r.writeReceipt(ctx, ref, receipt)
}

func (r *Root) writeReceipt(ctx context.Context, ref Ref, receipt Receipt) error {
	there, err := r.readReceipt(ctx, ref)
	var damaged *CorruptError
	switch {
	case err == nil && !there.Same(receipt):
		return fmt.Errorf("%s already records event %s at sequence %d of store %s; if that store is gone, remove the file",
			r.path(ref, ReceiptFile), there.Event, there.Sequence, there.Store)
	case err != nil && !errors.Is(err, ErrNotCommitted) && !errors.As(err, &damaged):
		return err
	}
	// One that is in place is written again: it may not be durable.
	data, err := EncodeReceipt(receipt)
	if err != nil {
		return err
	}
	if err := r.writeFile(ctx, ref, ReceiptFile, data, object.Replace); err != nil {
		return err
	}
	r.tidy(ctx, ref)
	return r.sync(ctx, ref)
}

// tidy removes what cut writes have left in the directory of a checkpoint that
// is committed: nobody writes there any more. What cannot be removed costs room,
// and is listed by a verification.
func (r *Root) tidy(ctx context.Context, ref Ref) {
	names, _ := r.contents(ctx, ref)
	for _, file := range names {
		if strings.HasSuffix(file, object.Partial) {
			_ = r.b.Remove(ctx, nameOf(ref, file))
		}
	}
}
