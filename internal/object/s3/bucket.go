// Package s3 keeps the files of checkpoints in a bucket of an object store that has the API of
// Amazon S3.
//
//	Location   s3://bucket/prefix?endpoint=…: where the bucket is, without secrets
//	Bucket     the backend: a file is the object PREFIX/NAME; there are no directories
//	transport  every request: signed, counted, watched for silence
//	do         the one law of retries: which failures, how often, when
//	gate       requests at the same time: halved by a server that is overloaded
//
// A small file is one PUT, at its commit. A larger one is a multipart upload, whose parts are
// sent from where their bytes lie. Every part, and the whole object, is sent with its CRC-32C,
// which the server compares with the bytes that arrive.
//
// An answer can be lost after the server has acted. Each upload therefore has a random token
// in its metadata: after an unclear failure the object is looked at, and its token tells whose
// it is. An exclusive commit is conditional (If-None-Match) on the request that makes the name
// visible, so of several one wins.
//
// A reader pins the ETag of its first answer and asks for the same one (If-Match) after it: it
// never has bytes of two objects.
package s3

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"time"

	minio "github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// Options are what a bucket does not take from its [Location].
type Options struct {
	PartSize  int64             // of multipart uploads, at least; 0: 32 MiB
	Depth     int               // requests at the same time; 0: 64
	Transport http.RoundTripper // nil: connections of the bucket's own
	Keys      Source            // nil: the usual chain, from the environment to the role of the machine
	Logger    *slog.Logger      // nil: none
}

const (
	defaultPart  = 32 << 20
	defaultDepth = 64
	readDepth    = 32       // reads of one process at the same time
	writeDepth   = 8        // parts of one file at the same time, each with memory of its own
	gatherDepth  = 32       // the same, from where they lie: a node may have one rank, and a connection 80 MB/s
	span         = 16 << 20 // bytes of one read
)

// Bucket is a bucket, or a prefix in one, that keeps files.
type Bucket struct {
	at        Location
	options   Options
	log       *slog.Logger
	transport *transport
	gate      *gate
	law       law
	history   history
	hedger    *hedger

	mu     sync.Mutex
	client *minio.Core // nil until the region is known
	warned time.Time   // of a request that fails again and again

	background sync.WaitGroup // abandoned uploads
}

var _ object.Backend = (*Bucket)(nil)

// New returns the backend of a bucket. It makes no request; [Bucket.Close] ends it.
func New(at Location, options Options) (*Bucket, error) {
	if options.PartSize <= 0 {
		options.PartSize = defaultPart
	}
	options.PartSize = (options.PartSize + object.Align - 1) / object.Align * object.Align
	if options.Depth <= 0 {
		options.Depth = defaultDepth
	}
	if options.Logger == nil {
		options.Logger = slog.New(slog.DiscardHandler)
	}
	pool, err := authorities()
	if err != nil {
		return nil, err
	}
	keys, err := newKeys(at, options.Keys, pool)
	if err != nil {
		return nil, err
	}
	b := &Bucket{at: at, options: options, log: options.Logger, law: usual, gate: newGate(options.Depth), hedger: newHedger(), history: history{asking: make(chan struct{}, 1)}}
	b.transport = &transport{base: options.Transport, keys: keys, region: regionOf(at), header: http.Header{}, patience: patient}
	if b.transport.base == nil {
		own := connections(options.Depth, pool)
		fresh := own.Clone()
		fresh.DisableKeepAlives = true
		b.transport.base, b.transport.fresh = own, fresh
	}
	if at.Payer != "" {
		b.transport.header.Set("X-Amz-Request-Payer", at.Payer)
	}
	return b, nil
}

// Close waits for uploads that are being abandoned, and closes idle connections. Requests that
// are under way are not ended.
func (b *Bucket) Close() error {
	b.background.Wait()
	if c, ok := b.transport.base.(interface{ CloseIdleConnections() }); ok {
		c.CloseIdleConnections()
	}
	b.transport.keys.close()
	return nil
}

// core returns the client, which needs the region: the requests are signed for it.
func (b *Bucket) core(ctx context.Context) (*minio.Core, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.client != nil {
		return b.client, nil
	}
	region := b.transport.region
	if region == "" {
		asking, err := b.newCore("")
		if err != nil {
			return nil, err
		}
		ctx, cancel := context.WithTimeout(with(ctx, &call{first: b.transport.patience.first}), time.Minute)
		defer cancel()
		if region, err = asking.GetBucketLocation(ctx, b.at.Bucket); err != nil {
			return nil, fmt.Errorf("ask for the bucket's region: %w", err)
		}
		b.transport.setRegion(region)
	}
	client, err := b.newCore(region)
	b.client = client
	return client, err
}

// newCore returns a client whose requests the transport signs, since it also adds the headers
// that the client knows nothing of.
func (b *Bucket) newCore(region string) (*minio.Core, error) {
	host, secure := "s3.amazonaws.com", true
	if b.at.Endpoint != "" {
		scheme, rest, _ := strings.Cut(b.at.Endpoint, "://")
		host, secure = rest, scheme == "https"
	}
	lookup := minio.BucketLookupAuto
	switch b.at.PathStyle {
	case "1":
		lookup = minio.BucketLookupPath
	case "0":
		lookup = minio.BucketLookupDNS
	}
	client, err := minio.NewCore(host, &minio.Options{
		Creds:        credentials.NewStatic("", "", "", credentials.SignatureAnonymous),
		Secure:       secure,
		Transport:    b.transport,
		Region:       region,
		BucketLookup: lookup,
		MaxRetries:   1, // retries are those of do
	})
	if err != nil {
		return nil, problem.Errorf(problem.Invalid, "bucket %s: %w", b.at.Path(""), err)
	}
	client.SetAppInfo("ckptstore", "1")
	return client, nil
}

// Location returns where the bucket is.
func (b *Bucket) Location() Location { return b.at }

// Path implements [object.Backend].
func (b *Bucket) Path(name string) string { return b.at.Path(name) }

// check refuses invalid names, and work of a context that has ended.
func (b *Bucket) check(ctx context.Context, name string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return object.Validate(name)
}

// MakeDir implements [object.Backend]: a bucket has no directories.
func (b *Bucket) MakeDir(ctx context.Context, _ string) error { return ctx.Err() }

// Sync implements [object.Backend]: what is committed is durable.
func (b *Bucket) Sync(ctx context.Context, _ string) error { return ctx.Err() }

// Link implements [object.Backend].
func (b *Bucket) Link(context.Context, string, string, object.Mode) error {
	return fmt.Errorf("link in a bucket: %w", errors.ErrUnsupported)
}

// Usage implements [object.Backend].
func (b *Bucket) Usage(context.Context) (object.Usage, error) {
	return object.Usage{}, fmt.Errorf("space of a bucket: %w", errors.ErrUnsupported)
}

// Reading implements [object.Backend].
func (b *Bucket) Reading() object.Reading {
	return object.Reading{Span: span, Depth: min(readDepth, b.options.Depth)}
}
