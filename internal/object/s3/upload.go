package s3

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	minio "github.com/minio/minio-go/v7"
	"golang.org/x/sync/errgroup"

	"github.com/ckptstore/ckptstore/internal/crc32c"
	"github.com/ckptstore/ckptstore/internal/object"
)

// Limits of servers.
const (
	mostParts = 9000 // of 10,000
	mostPart  = 5 << 30
	mib       = 1 << 20
)

// The metadata of an object that tells which upload made it.
const (
	tokenHeader = "X-Amz-Meta-Ckptstore-Upload"
	sumHeader   = "X-Amz-Checksum-Crc32c"
)

// part is a piece of an upload that was written.
type part struct {
	number int
	size   int64
	sum    uint32
	etag   string   // of the server; empty in an upload of one piece
	runs   [][]byte // where the bytes lie, if they stay there until Commit
}

// upload is a file that is being written. Of more than one piece it is a multipart upload,
// begun by the first write; of one piece it is a PUT at the commit.
type upload struct {
	b     *Bucket
	ctx   context.Context // of Create: it ends the writes
	stop  context.CancelFunc
	key   string
	size  int64
	piece int64
	mode  object.Mode
	token string // random

	onBegin func(context.Context, object.Unfinished) error // may be nil
	has     map[int]part                                   // parts that the server has of an earlier process
	made    string                                         // checksum of the object that an earlier process committed
	lost    atomic.Bool                                    // the server has ended the upload of an earlier process: all parts are sent at the commit

	beginning chan struct{} // has an element while the multipart upload begins
	mu        sync.Mutex
	id        string // of the multipart upload; empty until it has begun
	parts     map[int]part
	writing   sync.WaitGroup
	ended     bool
}

var (
	_ object.Upload    = (*upload)(nil)
	_ object.Gatherer  = (*upload)(nil)
	_ object.Outliving = (*upload)(nil)
)

// Create implements [object.Backend]. It makes no request.
func (b *Bucket) Create(ctx context.Context, name string, size int64, mode object.Mode) (object.Upload, error) {
	u, err := b.create(ctx, name, size, mode)
	if err != nil {
		return nil, err
	}
	return u, nil
}

func (b *Bucket) create(ctx context.Context, name string, size int64, mode object.Mode) (*upload, error) {
	if err := b.check(ctx, name); err != nil {
		return nil, err
	}
	piece := b.piece(size)
	if size < 0 || piece > mostPart {
		return nil, fmt.Errorf("create %s: no object has %d bytes", b.Path(name), size)
	}
	ctx, stop := context.WithCancel(ctx)
	return &upload{b: b, ctx: ctx, stop: stop, key: b.at.key(name), size: size, piece: piece, mode: mode, token: rand.Text(), parts: map[int]part{}, beginning: make(chan struct{}, 1)}, nil
}

// piece returns the part size of a file.
func (b *Bucket) piece(size int64) int64 {
	piece := max(b.options.PartSize, (size+mostParts-1)/mostParts)
	if piece > b.options.PartSize {
		piece = (piece + mib - 1) / mib * mib
	}
	return piece
}

// Writes implements [object.Metered].
func (b *Bucket) Writes(size int64) int {
	piece := b.piece(size)
	if size <= piece {
		return 1
	}
	return int((size+piece-1)/piece) + 2 // and the first and the last request of an upload
}

// Piece implements [object.Upload].
func (u *upload) Piece() int { return int(u.piece) }

// Reserved implements [object.Upload].
func (u *upload) Reserved() bool { return false }

// Depth implements [object.Upload].
func (u *upload) Depth() int { return min(writeDepth, u.b.options.Depth) }

// GatherDepth implements [object.Gatherer].
func (u *upload) GatherDepth() int { return min(gatherDepth, u.b.options.Depth) }

// multipart reports whether the file has several pieces.
func (u *upload) multipart() bool { return u.size > u.piece }

// WriteAt implements [object.Upload]. It copies the bytes of a file of one piece, which it
// must not keep; pieces of a larger one are sent before it returns.
func (u *upload) WriteAt(p []byte, off int64) (int, error) {
	leave, err := u.enter(off, int64(len(p)))
	if err != nil {
		return 0, err
	}
	defer leave()
	if !u.multipart() {
		p = bytes.Clone(p)
		return len(p), u.keep(part{number: 1, size: int64(len(p)), sum: crc32c.Checksum(p), runs: [][]byte{p}})
	}
	g, ctx := errgroup.WithContext(u.ctx)
	g.SetLimit(u.Depth())
	for at := int64(0); at < int64(len(p)); at += u.piece {
		piece := p[at:min(at+u.piece, int64(len(p)))]
		g.Go(func() error {
			runs := [][]byte{piece}
			crc, err := sum(runs)
			if err == nil {
				err = u.send(ctx, u.number(off+at), runs, crc, false)
			}
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return 0, err
	}
	return len(p), nil
}

// WriteFrom implements [object.Gatherer].
func (u *upload) WriteFrom(p [][]byte, off int64, crc uint32) error {
	size := length(p)
	leave, err := u.enter(off, size)
	if err != nil {
		return err
	}
	defer leave()
	switch {
	case !u.multipart():
		return u.keep(part{number: 1, size: size, sum: crc, runs: p})
	case size > u.piece:
		return fmt.Errorf("write %d bytes at %d of %s: a piece has %d", size, off, u.b.url(u.key), u.piece)
	case size == 0:
		return nil
	}
	return u.send(u.ctx, u.number(off), p, crc, true)
}

// number returns the number of the part at an offset.
func (u *upload) number(off int64) int { return int(off/u.piece) + 1 }

// enter begins a write, which leave ends: an upload ends after its writes.
func (u *upload) enter(off, size int64) (leave func(), err error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	switch {
	case u.ended:
		return nil, fmt.Errorf("write to %s: the upload has ended", u.b.url(u.key))
	case off < 0 || off+size > u.size || off%u.piece != 0 && size > 0 || size%u.piece != 0 && off+size != u.size:
		return nil, fmt.Errorf("write %d bytes at %d of %s, which has %d: a piece has %d, except the last", size, off, u.b.url(u.key), u.size, u.piece)
	}
	if err := u.ctx.Err(); err != nil {
		return nil, err
	}
	u.writing.Add(1)
	return u.writing.Done, nil
}

// keep remembers a part.
func (u *upload) keep(p part) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	if _, twice := u.parts[p.number]; twice && p.size > 0 {
		return fmt.Errorf("write to %s: piece %d is written twice", u.b.url(u.key), p.number)
	}
	u.parts[p.number] = p
	return nil
}

// OnBegin implements [object.Outliving].
func (u *upload) OnBegin(use func(context.Context, object.Unfinished) error) { u.onBegin = use }

// send sends a part, unless the server has it.
func (u *upload) send(ctx context.Context, number int, runs [][]byte, crc uint32, stays bool) error {
	p := part{number: number, size: length(runs), sum: crc}
	if stays {
		p.runs = runs
	}
	has := u.has[number]
	if u.made != "" || u.lost.Load() && stays || has.etag != "" && has.size == p.size && has.sum == p.sum {
		p.etag = has.etag
		return u.keep(p)
	}
	id, err := u.begin(ctx)
	if err != nil {
		return err
	}
	p.etag, err = u.b.sendPart(ctx, u.key, id, number, runs, crc)
	if isNoUpload(err) && u.has != nil && stays {
		// Such as a rule of the bucket, or another process that collects what is left.
		u.lost.Store(true)
		err = nil
	}
	if err != nil {
		return err
	}
	return u.keep(p)
}

// sendPart sends a part, and returns its ETag. To send one again is harmless: it replaces
// itself.
func (b *Bucket) sendPart(ctx context.Context, key, id string, number int, runs [][]byte, crc uint32) (etag string, err error) {
	r := request{
		op: fmt.Sprintf("put part %d of", number), key: key, class: classPart, runs: runs, sum: crc,
		header: http.Header{sumHeader: {encode(crc)}}, settle: b.uploadEnded(key, id),
	}
	err = b.do(ctx, r, func(ctx context.Context, c *call) error {
		sent, err := c.core.PutObjectPart(ctx, b.at.Bucket, key, id, number, c.body, length(runs), minio.PutObjectPartOptions{DisableContentSha256: true})
		if err == nil && sent.ETag == "" {
			err = fmt.Errorf("the answer has no ETag: %w", errAnswer)
		}
		etag = sent.ETag
		return err
	})
	return etag, err
}

// uploadEnded returns the look at an upload after attempts to send a part, once: a server that
// refuses a part may close the connection before its answer is read.
func (b *Bucket) uploadEnded(key, id string) func(context.Context, error) (bool, error) {
	broken := 0
	return func(ctx context.Context, failed error) (bool, error) {
		var answer minio.ErrorResponse
		if errors.As(failed, &answer) {
			return judgeAnswer(answer, request{}, &call{}) == refused, failed
		}
		if broken++; broken != 2 {
			return false, nil
		}
		r := request{op: "list the parts of", key: key, class: classList}
		c, err := b.attempt(ctx, r, 1, func(ctx context.Context, c *call) error {
			_, err := c.core.ListObjectParts(ctx, b.at.Bucket, key, id, 0, 1)
			return err
		})
		if err == nil {
			return false, nil
		}
		err = b.fail(r, 1, err, c)
		return isNoUpload(err), err
	}
}

// begin returns the ID of the multipart upload, which it begins once. After an error the next
// write tries again.
func (u *upload) begin(ctx context.Context) (string, error) {
	select {
	case u.beginning <- struct{}{}:
	case <-ctx.Done():
		return "", ctx.Err()
	}
	defer func() { <-u.beginning }()
	u.mu.Lock()
	id := u.id
	u.mu.Unlock()
	if id != "" {
		return id, nil
	}
	id, err := u.b.begin(ctx, u.key, u.token)
	if err == nil && u.onBegin != nil {
		if err = u.onBegin(ctx, object.Unfinished{ID: id, Token: u.token, Piece: u.piece}); err != nil {
			u.b.abort(u.key, id)
		}
	}
	if err != nil {
		return "", err
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.id = id
	return id, nil
}

// begin begins a multipart upload. If the answer is lost and the request repeated, the first
// upload stays, empty, until a lifecycle rule of the bucket removes it: no process has its ID.
func (b *Bucket) begin(ctx context.Context, key, token string) (id string, err error) {
	header := b.written(token)
	header.Set("X-Amz-Checksum-Algorithm", "CRC32C")
	header.Set("X-Amz-Checksum-Type", "FULL_OBJECT")
	err = b.do(ctx, request{op: "create upload of", key: key, class: classCreate, header: header}, func(ctx context.Context, c *call) error {
		id, err = c.core.NewMultipartUpload(ctx, b.at.Bucket, key, minio.PutObjectOptions{})
		if err == nil && id == "" {
			err = fmt.Errorf("the answer has no upload ID: %w", errAnswer)
		}
		return err
	})
	return id, err
}

// written returns the headers of every new object.
func (b *Bucket) written(token string) http.Header {
	header := http.Header{tokenHeader: {token}}
	if b.at.Class != "" {
		header.Set("X-Amz-Storage-Class", b.at.Class)
	}
	if b.at.KMS != "" {
		header.Set("X-Amz-Server-Side-Encryption", "aws:kms")
		header.Set("X-Amz-Server-Side-Encryption-Aws-Kms-Key-Id", b.at.KMS)
		// One key a bucket for a while: otherwise each object is a request to the key service.
		header.Set("X-Amz-Server-Side-Encryption-Bucket-Key-Enabled", "true")
	}
	return header
}

// encode returns a checksum as headers have it.
func encode(crc uint32) string {
	return base64.StdEncoding.EncodeToString(binary.BigEndian.AppendUint32(nil, crc))
}

// decode returns the checksum in a header of a whole object, or of a part.
func decode(header string) (crc uint32, ok bool) {
	text, err := base64.StdEncoding.DecodeString(header)
	if err != nil || len(text) != 4 {
		return 0, false
	}
	return binary.BigEndian.Uint32(text), true
}

// Abort implements [object.Upload]. It returns when no memory of the caller is read any more;
// the server is asked in the background.
func (u *upload) Abort() {
	if u.end() {
		u.abandon()
	}
}

// end ends the upload once, for writers: true for the first caller.
func (u *upload) end() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	first := !u.ended
	u.ended = true
	return first
}

// abandon ends the writes, and removes what the server has of them.
func (u *upload) abandon() {
	u.stop()
	u.writing.Wait()
	u.mu.Lock()
	id := u.id
	u.parts = nil
	u.mu.Unlock()
	if id != "" {
		u.b.abort(u.key, id)
	}
}

// abortTime is how long an abandoned upload is asked to be removed. After it, the bucket's
// lifecycle rule does.
const abortTime = time.Minute

func (b *Bucket) abort(key, id string) {
	b.background.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), abortTime)
		defer cancel()
		if err := b.discard(ctx, key, id); err != nil {
			b.log.Warn("upload not removed", "object", b.url(key), "upload", id, "err", err)
		}
	})
}

// discard removes what the server has of an upload.
func (b *Bucket) discard(ctx context.Context, key, id string) error {
	err := b.do(ctx, request{op: "abort upload of", key: key, class: classAbort}, func(ctx context.Context, c *call) error {
		return c.core.AbortMultipartUpload(ctx, b.at.Bucket, key, id)
	})
	if isNoUpload(err) {
		return nil
	}
	return err
}

// isNoUpload reports whether a server has no upload of that ID: it has ended.
func isNoUpload(err error) bool {
	var failed *Error
	return errors.As(err, &failed) && failed.Code == "NoSuchUpload"
}
