package s3

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"strconv"
	"strings"

	minio "github.com/minio/minio-go/v7"
	"golang.org/x/sync/errgroup"

	"github.com/ckptstore/ckptstore/internal/crc32c"
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// Commit implements [object.Upload]. If it returns an error because ctx has ended, the object
// may still appear.
func (u *upload) Commit(ctx context.Context) error {
	if !u.end() {
		return fmt.Errorf("commit %s: the upload has ended", u.b.url(u.key))
	}
	u.writing.Wait()
	err := ctx.Err()
	if err == nil {
		err = u.commit(ctx)
	}
	if err != nil {
		u.abandon()
		return err
	}
	u.stop()
	u.mu.Lock()
	defer u.mu.Unlock()
	u.parts = nil // the memory is its owner's
	return nil
}

func (u *upload) commit(ctx context.Context) error {
	parts, err := u.ordered()
	switch {
	case err != nil:
		return err
	case !u.multipart():
		return u.put(ctx, parts)
	case u.made == encode(whole(parts)):
		return nil
	case u.made != "":
		return fs.ErrExist
	}
	return u.complete(ctx, parts)
}

// ordered returns all parts, in order.
func (u *upload) ordered() ([]part, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	count := int(max((u.size+u.piece-1)/u.piece, 1))
	if u.size == 0 {
		return []part{{number: 1}}, nil
	}
	parts := make([]part, 0, count)
	for number := 1; number <= count; number++ {
		p, there := u.parts[number]
		if !there {
			return nil, fmt.Errorf("commit %s: piece %d of %d was not written", u.b.url(u.key), number, count)
		}
		parts = append(parts, p)
	}
	return parts, nil
}

// whole returns the checksum of all parts.
func whole(parts []part) (crc uint32) {
	for _, p := range parts {
		crc = crc32c.Combine(crc, p.sum, p.size)
	}
	return crc
}

// condition adds the condition of an exclusive commit, to the request that makes the name
// visible.
func (u *upload) condition(header http.Header) http.Header {
	if u.mode == object.Exclusive {
		header.Set("If-None-Match", "*")
	}
	return header
}

// put makes a file of one piece.
func (u *upload) put(ctx context.Context, parts []part) error {
	runs := parts[0].runs
	if runs == nil {
		runs = [][]byte{}
	}
	header := u.condition(u.b.written(u.token))
	header.Set(sumHeader, encode(parts[0].sum))
	r := request{op: "put", key: u.key, class: classPut, header: header, runs: runs, sum: parts[0].sum, settle: u.settle(parts)}
	return u.b.do(ctx, r, func(ctx context.Context, c *call) error {
		_, err := c.core.PutObject(ctx, u.b.at.Bucket, u.key, c.body, u.size, "", "", minio.PutObjectOptions{DisableContentSha256: true})
		return err
	})
}

// errConflict is the answer to a completion that met another at the same time. The upload is
// lost by it, and must be sent again.
var errConflict = problem.New(problem.Conflict, "another commit of the name was under way; save again")

// errLost is the answer to the completion of an earlier process's upload that has ended since.
var errLost = problem.New(problem.Conflict, "the upload was removed by another process or a rule of the bucket; save again")

// conflicts is how often a file is sent again after a conflict.
const conflicts = 3

// complete makes a file of its parts.
func (u *upload) complete(ctx context.Context, parts []part) error {
	for range conflicts {
		err := errLost
		if !u.lost.Swap(false) {
			err = u.completeOnce(ctx, parts)
		}
		// A part of an earlier process may have other bytes than the server listed.
		changed := u.has != nil && errors.Is(err, object.ErrChanged)
		if !errors.Is(err, errConflict) && !errors.Is(err, errLost) && !changed {
			return err
		}
		u.has = nil
		for _, p := range parts {
			if p.runs == nil {
				return err // the bytes are gone
			}
		}
		if parts, err = u.again(ctx, parts); err != nil {
			return err
		}
	}
	return u.completeOnce(ctx, parts)
}

func (u *upload) completeOnce(ctx context.Context, parts []part) error {
	u.mu.Lock()
	id := u.id
	u.mu.Unlock()
	header := u.condition(http.Header{})
	header.Set(sumHeader, encode(whole(parts)))
	header.Set("X-Amz-Checksum-Type", "FULL_OBJECT")
	header.Set("X-Amz-Mp-Object-Size", strconv.FormatInt(u.size, 10))
	list := make([]minio.CompletePart, len(parts))
	for i, p := range parts {
		list[i] = minio.CompletePart{PartNumber: p.number, ETag: p.etag, ChecksumCRC32C: encode(p.sum)}
	}
	settle := u.settle(parts)
	r := request{op: "complete upload of", key: u.key, class: classComplete, header: header, first: u.b.transport.patience.commit, settle: func(ctx context.Context, failed error) (bool, error) {
		done, err := settle(ctx, failed)
		var answer minio.ErrorResponse
		if !done && errors.As(failed, &answer) {
			switch {
			case answer.Code == "NoSuchUpload" && u.has != nil:
				return true, fmt.Errorf("%w: %w", errLost, failed)
			case answer.Code == "NoSuchUpload":
				return true, failed
			case answer.StatusCode == http.StatusConflict:
				return true, fmt.Errorf("%w: %w", errConflict, failed)
			}
		}
		return done, err
	}}
	return u.b.do(ctx, r, func(ctx context.Context, c *call) error {
		_, err := c.core.CompleteMultipartUpload(ctx, u.b.at.Bucket, u.key, id, list, minio.PutObjectOptions{})
		return err
	})
}

// again sends all parts in a new upload, from where their bytes lie.
func (u *upload) again(ctx context.Context, parts []part) ([]part, error) {
	u.mu.Lock()
	old := u.id
	u.id = ""
	u.mu.Unlock()
	u.b.abort(u.key, old)
	id, err := u.begin(ctx)
	if err != nil {
		return nil, err
	}
	sent := make([]part, len(parts))
	g, sending := errgroup.WithContext(ctx)
	g.SetLimit(u.GatherDepth())
	for i, p := range parts {
		g.Go(func() (err error) {
			p.etag, err = u.b.sendPart(sending, u.key, id, p.number, p.runs, p.sum)
			sent[i] = p
			return err
		})
	}
	return sent, g.Wait()
}

// settle returns the look at an object after an attempt to commit it whose outcome is unclear.
// An earlier attempt may have made it: then it has this upload's token.
func (u *upload) settle(parts []part) func(context.Context, error) (bool, error) {
	want := encode(whole(parts))
	return func(ctx context.Context, failed error) (bool, error) {
		size, token, crc, err := u.look(ctx)
		exclusive := u.mode == object.Exclusive
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return false, nil
		case err != nil:
			return true, fmt.Errorf("%w; its outcome is unknown: %w", failed, err)
		case token != u.token && exclusive:
			return true, fs.ErrExist
		case token != u.token:
			return false, nil // the object that this upload replaces
		case size != u.size:
			return true, fmt.Errorf("the server has made %d bytes of %d: %w", size, u.size, failed)
		case crc != "" && crc != want && !strings.Contains(crc, "-"):
			return true, fmt.Errorf("the server has made an object with checksum %s of %s: %w", crc, want, failed)
		}
		return true, nil
	}
}

// look returns what the object at the upload's key carries.
func (u *upload) look(ctx context.Context) (size int64, token, crc string, err error) {
	err = u.b.do(ctx, request{op: "look at", key: u.key, class: classHead}, func(ctx context.Context, c *call) error {
		found, err := c.core.StatObject(ctx, u.b.at.Bucket, u.key, minio.StatObjectOptions{Checksum: true})
		size, token, crc = found.Size, c.answer.Get(tokenHeader), c.answer.Get(sumHeader)
		return err
	})
	return size, token, crc, err
}
