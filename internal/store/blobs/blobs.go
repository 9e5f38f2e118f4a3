// Package blobs stores event bodies that are too large for the log, in files named by their
// digest. The event has the digest, so a reader notices any change:
//
//	blobs/<first two digits>/<digest>
//
// A blob is durable before the event that names it is appended.
package blobs

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
	"github.com/ckptstore/ckptstore/internal/object"
)

// Blobs are the event bodies that one store keeps outside of its log. Its methods may be called
// concurrently, also by several processes.
type Blobs struct {
	dir string
	far object.Backend // of a bucket, in place of dir
}

// In returns the blobs in a directory named blobs, which Put makes.
func In(dir string) *Blobs { return &Blobs{dir: dir} }

// At returns the blobs in a part of a bucket.
func At(far object.Backend) *Blobs { return &Blobs{far: far} }

// Put returns small data inline. It makes larger data durable in a file and returns the claim
// check. It may be repeated.
func (b *Blobs) Put(ctx context.Context, data []byte) (events.Blob, error) {
	if len(data) <= events.MaxInline {
		return events.InlineBlob(data), nil
	}
	digest := checkpoint.Sum(data).String()
	if b.far != nil {
		if err := b.send(ctx, digest, data); err != nil {
			return events.Blob{}, fmt.Errorf("store blob: %w", err)
		}
		return events.Blob{Digest: digest, Size: int64(len(data))}, nil
	}
	path, root := b.Path(digest), b.root()
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

// Get returns the data of a blob, verified against its digest. It returns [events.ErrNoBlob] if the
// data is missing or corrupt.
func (b *Blobs) Get(ctx context.Context, blob events.Blob) ([]byte, error) {
	if blob.Digest == "" {
		return blob.Inline, nil
	}
	want, err := checkpoint.ParseDigest(blob.Digest)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", events.ErrNoBlob, err)
	}
	path := b.Path(blob.Digest)
	var data []byte
	if b.far != nil {
		path = b.far.Path(farBlob(blob.Digest))
		data, err = b.far.Get(ctx, farBlob(blob.Digest), blob.Size)
	} else {
		data, err = b.root().ReadFile(path)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: %w: restore the file from a backup", events.ErrNoBlob, err)
	}
	if err != nil {
		return nil, fmt.Errorf("blob: %w: restore the file from a backup", err)
	}
	if checkpoint.Sum(data) != want || int64(len(data)) != blob.Size {
		return nil, fmt.Errorf("%w: %s is corrupt: its digest differs; restore the file from a backup", events.ErrNoBlob, path)
	}
	return data, nil
}

// farBlob returns the name of a blob in a bucket.
func farBlob(digest string) string { return digest[:2] + "/" + digest }

// send makes a blob in a bucket. The same blob may be there already.
func (b *Blobs) send(ctx context.Context, digest string, data []byte) error {
	u, err := b.far.Create(ctx, farBlob(digest), int64(len(data)), object.Exclusive)
	if err != nil {
		return err
	}
	defer u.Abort()
	if _, err := u.WriteAt(data, 0); err != nil {
		return err
	}
	if err := u.Commit(ctx); !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil
}

// root returns the directory that holds blobs/. No link is followed below it.
func (b *Blobs) root() beneath.Root { return beneath.At(filepath.Dir(b.dir)) }

// Path returns the path of the file of a blob in the directory.
func (b *Blobs) Path(digest string) string { return filepath.Join(b.dir, digest[:2], digest) }
