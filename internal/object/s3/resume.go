package s3

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/ckptstore/ckptstore/internal/object"
)

var _ object.Resumer = (*Bucket)(nil)

// Resume implements [object.Resumer]. It asks for the parts of the earlier upload, 1,000 in a
// request, and if there is no such upload, for the object.
func (b *Bucket) Resume(ctx context.Context, name string, size int64, mode object.Mode, earlier object.Unfinished) (object.Upload, error) {
	u, err := b.create(ctx, name, size, mode)
	if err != nil {
		return nil, err
	}
	piece := earlier.Piece
	if earlier.ID == "" {
		return u, nil
	}
	if !u.multipart() || piece <= 0 || piece > mostPart || piece%object.Align != 0 || size <= piece || size > piece*mostParts {
		// The file has become another one since.
		b.abort(u.key, earlier.ID)
		return u, nil
	}
	switch has, err := b.parts(ctx, u.key, earlier.ID); {
	case err == nil:
		u.id, u.token, u.piece, u.has = earlier.ID, earlier.Token, piece, has
		return u, nil
	case ctx.Err() != nil:
		u.stop()
		return nil, fmt.Errorf("resume %s: %w", b.Path(name), err)
	case !isNoUpload(err):
		// Such as a right that is missing: a new upload needs it no more.
		b.log.Warn("upload restarted", "object", b.url(u.key), "error", err)
		b.abort(u.key, earlier.ID)
		return u, nil
	}
	made, token, crc, err := u.look(ctx)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		u.stop()
		return nil, fmt.Errorf("resume %s: %w", b.Path(name), err)
	case mode == object.Exclusive && token == earlier.Token && made == size && crc != "":
		u.token, u.piece, u.made = earlier.Token, piece, crc
	}
	return u, nil
}

// parts returns the parts of an unfinished upload whose checksum the server tells.
func (b *Bucket) parts(ctx context.Context, key, id string) (map[int]part, error) {
	has := map[int]part{}
	for after, more := 0, true; more; {
		err := b.do(ctx, request{op: "list the parts of", key: key, class: classList}, func(ctx context.Context, c *call) error {
			list, err := c.core.ListObjectParts(ctx, b.at.Bucket, key, id, after, page)
			if err != nil {
				return err
			}
			more = list.IsTruncated && list.NextPartNumberMarker > after
			after = list.NextPartNumberMarker
			for _, p := range list.ObjectParts {
				if crc, ok := decode(p.ChecksumCRC32C); ok && p.ETag != "" {
					has[p.PartNumber] = part{number: p.PartNumber, size: p.Size, sum: crc, etag: p.ETag}
				}
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return has, nil
}

// Discard implements [object.Resumer].
func (b *Bucket) Discard(ctx context.Context, name string, upload object.Unfinished) error {
	if err := b.check(ctx, name); err != nil {
		return err
	}
	if upload.ID == "" {
		return fmt.Errorf("discard an upload of %s: it has no ID", b.Path(name))
	}
	return b.discard(ctx, b.at.key(name), upload.ID)
}

// Uploads implements [object.Resumer]. MinIO lists none by a prefix.
func (b *Bucket) Uploads(ctx context.Context, dir string, use func(string, object.Unfinished)) error {
	root, prefix := b.at.key(""), b.at.key(dir)
	if root != "" {
		root += "/"
	}
	if prefix != "" {
		prefix += "/"
	}
	key, id := "", ""
	for more := true; more; {
		err := b.do(ctx, request{op: "list the uploads below", key: prefix, class: classList}, func(ctx context.Context, c *call) error {
			list, err := c.core.ListMultipartUploads(ctx, b.at.Bucket, prefix, key, id, "", page)
			if err != nil {
				return err
			}
			more = list.IsTruncated && (list.NextKeyMarker != key || list.NextUploadIDMarker != id)
			key, id = list.NextKeyMarker, list.NextUploadIDMarker
			for _, u := range list.Uploads {
				if name, below := strings.CutPrefix(u.Key, root); below && strings.HasPrefix(u.Key, prefix) && u.UploadID != "" {
					use(name, object.Unfinished{ID: u.UploadID})
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}
