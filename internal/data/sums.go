package data

import (
	"context"
	"errors"
	"io/fs"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
)

// readSums fills in the sums of an adopted index, if they are learned.
func (r *Root) readSums(ctx context.Context, ref checkpoint.Ref, x *checkpoint.Index, of checkpoint.Digest) (known bool, err error) {
	data, err := r.readFile(ctx, ref, checkpoint.SumsFile(x.Rank))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if err := checkpoint.DecodeSums(data, x, of); err != nil {
		return false, &CorruptError{File: r.path(ref, checkpoint.SumsFile(x.Rank)), Block: -1, Problem: err.Error()}
	}
	return true, nil
}

// Sums is the file of what was learned of one rank's adopted bytes.
type Sums struct {
	Name   string // within the checkpoint's directory
	Digest checkpoint.Digest
	Size   int64 // in bytes
	New    bool  // it was not there before
}

// writeSums makes the sums of an adopted index durable.
func (r *Root) writeSums(ctx context.Context, ref checkpoint.Ref, x *checkpoint.Index, of checkpoint.Digest) (Sums, error) {
	data := checkpoint.EncodeSums(x, of)
	// Another process may be learning the same.
	if err := r.create(ctx, ref, checkpoint.SumsFile(x.Rank), data); err != nil {
		return Sums{}, err
	}
	if err := r.sync(ctx, ref); err != nil {
		return Sums{}, err
	}
	return Sums{Name: checkpoint.SumsFile(x.Rank), Digest: checkpoint.Sum(data), Size: int64(len(data)), New: true}, nil
}
