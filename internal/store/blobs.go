package store

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/durable"
)

// Blobs keeps event bodies that are too large for the log, in files named by
// their digest: blobs/<first two digits>/<digest>.
type Blobs struct{ dir string }

// Put returns data inline when it is small. Otherwise it makes it durable in a
// file and returns the claim check. It may be repeated.
func (b *Blobs) Put(_ context.Context, data []byte) (events.Blob, error) {
	if len(data) <= events.MaxInline {
		return events.InlineBlob(data), nil
	}
	digest := checkpoint.Sum(data).String()
	path, root := b.path(digest), b.root()
	if err := root.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return events.Blob{}, fmt.Errorf("store blob: %w", err)
	}
	if err := durable.WriteBelow(root, path, data); err != nil {
		return events.Blob{}, fmt.Errorf("store blob: %w", err)
	}
	if err := errors.Join(root.SyncDir(b.dir), root.SyncDir(filepath.Dir(b.dir))); err != nil {
		return events.Blob{}, fmt.Errorf("store blob: %w", err)
	}
	return events.Blob{Digest: digest, Size: int64(len(data))}, nil
}

// Get returns the data of a blob, verified against its digest. Of one that cannot be
// had the error is [events.ErrNoBlob].
func (b *Blobs) Get(_ context.Context, blob events.Blob) ([]byte, error) {
	if blob.Digest == "" {
		return blob.Inline, nil
	}
	want, err := checkpoint.ParseDigest(blob.Digest)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", events.ErrNoBlob, err)
	}
	path := b.path(blob.Digest)
	data, err := b.root().ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: %w: restore the file from a backup", events.ErrNoBlob, err)
	}
	if err != nil {
		return nil, fmt.Errorf("blob: %w: restore the file from a backup", err)
	}
	if checkpoint.Sum(data) != want || int64(len(data)) != blob.Size {
		return nil, fmt.Errorf("%w: %s is corrupt: its bytes do not have its digest; restore the file from a backup", events.ErrNoBlob, path)
	}
	return data, nil
}

// root is the directory that holds blobs/. No link is followed below it.
func (b *Blobs) root() beneath.Root { return beneath.At(filepath.Dir(b.dir)) }

func (b *Blobs) path(digest string) string { return filepath.Join(b.dir, digest[:2], digest) }
