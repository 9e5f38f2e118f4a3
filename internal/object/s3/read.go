package s3

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	minio "github.com/minio/minio-go/v7"

	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// errReplaced is the error of a reader whose object is no longer the object that it opened.
var errReplaced = problem.New(problem.Conflict, "the object was replaced since it was opened")

// Get implements [object.Backend].
func (b *Bucket) Get(ctx context.Context, name string, most int64) (data []byte, err error) {
	if err := b.check(ctx, name); err != nil {
		return nil, err
	}
	key := b.at.key(name)
	err = b.do(ctx, request{op: "get", key: key, class: classGet}, func(ctx context.Context, c *call) error {
		body, _, _, err := b.get(ctx, c, key, minio.GetObjectOptions{})
		if err != nil {
			return err
		}
		defer body.Close()
		size, err := strconv.ParseInt(c.answer.Get("Content-Length"), 10, 64)
		switch {
		case err != nil:
			size = -1
		case size > most:
			return fmt.Errorf("it has %d bytes: %w", size, object.ErrTooLarge)
		}
		data, err = io.ReadAll(io.LimitReader(body, most+1))
		switch {
		case errors.Is(err, io.ErrUnexpectedEOF):
			return errBroken
		case err != nil:
			return err
		case int64(len(data)) > most:
			return fmt.Errorf("it has more than %d bytes: %w", most, object.ErrTooLarge)
		case size >= 0 && int64(len(data)) != size:
			return fmt.Errorf("%d of %d bytes arrived: %w", len(data), size, errBroken)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return data, nil
}

// opened is an object that is read. Its identity is that of the first answer.
type opened struct {
	b   *Bucket
	ctx context.Context
	key string

	mu    sync.Mutex
	etag  string // empty until the first answer
	info  object.Info
	known bool // info is
}

var (
	_ object.Object = (*opened)(nil)
	_ object.Ranger = (*opened)(nil)
)

// Open implements [object.Backend]. It makes no request: a missing object is an error of the
// first read.
func (b *Bucket) Open(ctx context.Context, name string) (object.Object, error) {
	if err := b.check(ctx, name); err != nil {
		return nil, err
	}
	return &opened{b: b, ctx: ctx, key: b.at.key(name)}, nil
}

// Close implements [object.Object]. Streams of the object stay open.
func (o *opened) Close() error { return nil }

// Stat implements [object.Object]: after a read it costs nothing.
func (o *opened) Stat() (object.Info, error) {
	o.mu.Lock()
	info, known := o.info, o.known
	o.mu.Unlock()
	if known {
		return info, nil
	}
	err := o.b.do(o.ctx, request{op: "stat", key: o.key, class: classHead}, func(ctx context.Context, c *call) error {
		found, err := c.core.StatObject(ctx, o.b.at.Bucket, o.key, minio.StatObjectOptions{Checksum: true})
		if err != nil {
			return err
		}
		info, err = o.pin(found.ETag, found.Size, found.LastModified)
		// Sums of parts end in their number.
		if sum, whole := decode(found.ChecksumCRC32C); whole {
			info.Sum, info.Attested = sum, true
			o.mu.Lock()
			o.info = info
			o.mu.Unlock()
		}
		return err
	})
	return info, err
}

// pin remembers the identity of the first answer, and refuses those of another object.
func (o *opened) pin(etag string, size int64, modified time.Time) (object.Info, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case etag == "":
		return object.Info{}, fmt.Errorf("the answer has no ETag: %w", errPermanent)
	case !o.known:
		o.etag, o.known = etag, true
		o.info = object.Info{Size: size, Modified: modified}
	case o.etag != etag:
		return object.Info{}, fmt.Errorf("%w: %w", errReplaced, errPermanent)
	case o.info.Size != size:
		return object.Info{}, fmt.Errorf("the answer is of %d bytes, the object has %d: %w", size, o.info.Size, errAnswer)
	}
	return o.info, nil
}

// errAnswer is an answer that contradicts its request. Another may not.
var errAnswer = errors.New("the answer does not fit the request")

// errBroken is a body that ended before its length. It is not [io.ErrUnexpectedEOF], which
// tells that the object ends.
var errBroken = errors.New("the connection was closed within the answer")

// ReadAt implements [io.ReaderAt].
func (o *opened) ReadAt(p []byte, off int64) (int, error) {
	if off < 0 {
		return 0, fmt.Errorf("read at %d of %s: negative offset", off, o.b.url(o.key))
	}
	if len(p) == 0 {
		return 0, o.ctx.Err()
	}
	s := &stream{o: o, at: off, end: off + int64(len(p))}
	defer func() { _ = s.Close() }() // nothing was written to it
	n, err := io.ReadFull(s, p)
	if err != nil && s.beyond && s.at == s.end {
		err = io.EOF // all that the object has was read
	}
	return n, err
}

// ReadRange implements [object.Ranger].
func (o *opened) ReadRange(off, n int64) (io.ReadCloser, error) {
	if off < 0 || n < 0 {
		return nil, fmt.Errorf("read %d bytes at %d of %s: negative", n, off, o.b.url(o.key))
	}
	s := &stream{o: o, at: off, end: off + n}
	if n == 0 {
		return s, o.ctx.Err()
	}
	if err := s.open(); err != nil {
		return nil, err
	}
	return s, nil
}

// stream is a range of an object. A body that breaks is continued by a new request for the
// rest, so the reader gets each byte once.
type stream struct {
	o      *opened
	at     int64 // of the next byte
	end    int64
	body   io.ReadCloser
	failed int   // bodies that broke since moved
	moved  int64 // position when one last had brought enough
	beyond bool  // the object ends before end
	err    error
}

// enough is what a body brings for its failure to be a new one.
const enough = 1 << 20

// Read implements [io.Reader].
func (s *stream) Read(p []byte) (int, error) {
	for {
		switch {
		case s.err != nil:
			return 0, s.err
		case s.at >= s.end && s.beyond:
			return 0, io.ErrUnexpectedEOF
		case s.at >= s.end:
			return 0, io.EOF
		case len(p) == 0:
			return 0, nil
		case s.body == nil:
			if err := s.open(); err != nil {
				return 0, err
			}
			continue
		}
		n, err := s.body.Read(p[:min(int64(len(p)), s.end-s.at)])
		s.at += int64(n)
		if err == nil || s.at >= s.end {
			if s.at >= s.end {
				s.drop()
			}
			return n, nil
		}
		s.broken(err)
		if n > 0 {
			return n, nil
		}
	}
}

// broken drops a body that ended early, and waits before the next.
func (s *stream) broken(err error) {
	s.drop()
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		err = errBroken
	}
	if s.at-s.moved >= enough {
		s.failed, s.moved = 0, s.at
	}
	s.failed++
	o := s.o
	r, c := request{op: "read", key: o.key, class: classGet}, &call{class: classGet}
	if o.ctx.Err() == nil && s.failed < o.b.law.tries {
		o.b.transport.counts.repeated.Add(1)
		if err = sleep(o.ctx, o.b.law.pause(s.failed)); err == nil {
			return
		}
	}
	s.err = o.b.fail(r, s.failed, fmt.Errorf("at byte %d: %w", s.at, err), c)
}

// open requests the rest.
func (s *stream) open() error {
	o := s.o
	o.mu.Lock()
	size, known, etag := o.info.Size, o.known, o.etag
	o.mu.Unlock()
	if known && !s.clip(size) {
		return s.err
	}
	err := o.b.do(o.ctx, request{op: "read", key: o.key, class: classGet}, func(ctx context.Context, c *call) error {
		var options minio.GetObjectOptions
		if err := options.SetRange(s.at, s.end-1); err != nil {
			return fmt.Errorf("%w: %w", errPermanent, err)
		}
		if etag != "" {
			options.Set("If-Match", `"`+etag+`"`)
		}
		// The body outlives this attempt; closing it releases the request's context.
		body, found, header, err := o.b.get(ctx, c, o.key, options)
		if err != nil {
			return s.explain(err, c)
		}
		total, err := extent(c.status, header, s.at, s.end)
		if err == nil {
			_, err = o.pin(found.ETag, total, found.LastModified)
		}
		if err != nil {
			_ = body.Close()
			return err
		}
		s.body = body
		size = total
		return nil
	})
	switch {
	case errors.Is(err, errBeyond):
		s.beyond, s.end = true, s.at
		s.err = io.ErrUnexpectedEOF
		return s.err
	case err != nil:
		s.err = err
		return err
	}
	if !s.clip(size) {
		s.drop()
		return s.err
	}
	return nil
}

// clip ends the range where the object does. It reports whether anything is left.
func (s *stream) clip(size int64) bool {
	if s.end > size {
		s.beyond, s.end = true, max(size, s.at)
	}
	if s.at >= s.end {
		s.err = io.ErrUnexpectedEOF
		return false
	}
	return true
}

// errBeyond is a range that begins where the object has ended.
var errBeyond = fmt.Errorf("the range begins beyond the end: %w", errPermanent)

// explain converts an answer that refuses a range or an ETag.
func (s *stream) explain(err error, c *call) error {
	switch c.status {
	case http.StatusRequestedRangeNotSatisfiable:
		return errBeyond
	case http.StatusPreconditionFailed:
		return fmt.Errorf("%w: %w", errReplaced, errPermanent)
	}
	return err
}

// extent returns the size of the object from the header of an answer, after checking that the
// body is the range from at to end.
func extent(status int, header http.Header, at, end int64) (size int64, err error) {
	length := int64(-1)
	if text := header.Get("Content-Length"); text != "" {
		if length, err = strconv.ParseInt(text, 10, 64); err != nil {
			return 0, fmt.Errorf("length %.40q: %w", text, errAnswer)
		}
	}
	first, last, size := int64(0), length-1, length
	switch status {
	case http.StatusPartialContent:
		text := header.Get("Content-Range")
		if _, err := fmt.Sscanf(strings.TrimSpace(text), "bytes %d-%d/%d", &first, &last, &size); err != nil {
			return 0, fmt.Errorf("range %.60q: %w", text, errAnswer)
		}
	case http.StatusOK: // the whole object, from a server that ignores ranges, or because it is that
		if length < 0 {
			return 0, fmt.Errorf("the whole object, without its length: %w", errAnswer)
		}
		if length == 0 {
			return 0, nil
		}
	}
	switch {
	case first != at, last >= size, last != min(end, size)-1 && status == http.StatusPartialContent, last < first:
		return 0, fmt.Errorf("bytes %d to %d of %d, for a request of %d to %d: %w", first, last, size, at, end-1, errAnswer)
	case length >= 0 && length != last-first+1:
		return 0, fmt.Errorf("%d bytes for a range of %d: %w", length, last-first+1, errAnswer)
	}
	return size, nil
}

func (s *stream) drop() {
	if s.body != nil {
		_ = s.body.Close() // it was only read
		s.body = nil
	}
}

// Close implements [io.Closer].
func (s *stream) Close() error {
	s.drop()
	if s.err == nil {
		s.err = fs.ErrClosed
	}
	return nil
}
